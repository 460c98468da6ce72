"""Fingerprints of a state, window by window: with them a replay of a journal is proven (docs/FORMAT.md, Journals).

What lies on a device is digested there, in the current stream: behind the step that was made, and before any later one.
Only the digests come to the host, once the device has made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Places

_ALIGN = 64


class _Far(msgspec.Struct, frozen=True, eq=False):
    """Digests that a device makes, of the parts at these positions."""

    stream: SideStream
    made: _native.Digested
    at: NDArray[np.int64]


class Window(msgspec.Struct, frozen=True, eq=False):
    """A part of the state that is fingerprinted. `parts`: addresses and lengths; `owners` keep them alive.

    pieces  of which piece each part is, by its position among those that are fingerprinted
    far     digests that devices have been told to make
    """

    number: int
    parts: tuple[tuple[int, int], ...]
    owners: object
    pieces: tuple[int, ...] = ()
    far: tuple[_Far, ...] = ()

    def host_digests(self) -> NDArray[np.uint64]:
        """XXH3-64 of each part in host memory, which must not change meanwhile; 0 of others."""
        address, length = np.array(self.parts, np.uint64).reshape(-1, 2).T
        length = length.copy()
        for one in self.far:
            length[one.at] = 0
        found = np.array(digests_of(address, length), np.uint64)  # of a list alone, numpy may make floats
        return np.where(length > 0, found, np.uint64(0))

    def digests(self, host: NDArray[np.uint64]) -> list[int]:
        """Of all parts; `host`: what `host_digests` has found. Waits until the devices have made theirs.

        raises  OSError  a device has failed
        """
        found = host.copy()
        for one in self.far:
            one.stream.native.synchronize()
            found[one.at] = one.made.digests()
        digests: list[int] = found.tolist()
        return digests

    def fingerprint(self) -> str:
        return fingerprint_of(self.digests(self.host_digests()))


def digests_of(addresses: Sequence[int] | NDArray[np.uint64], lengths: Sequence[int] | NDArray[np.uint64]) -> list[int]:
    """XXH3-64 of runs of host memory."""
    found: list[int] = _native.digest_memory(np.asarray(addresses, np.uint64), np.asarray(lengths, np.uint64)).tolist()
    return found


def fingerprint_of(digests: Sequence[int]) -> str:
    """XXH3-64 of these digests."""
    return f"{_native.xxh3_64(np.array(digests, '<u8').view(np.uint8)):016x}"


def can_digest(places: Places) -> bool:
    """Whether all devices of these pieces digest memory: asked with none of it."""
    none = np.zeros(0, np.uint64)
    streams = [side_stream(name) for name in places.devices]
    return all(stream is not None and stream.digest(none, none) is not None for stream in streams)


def window_of(
    number: int, windows: int, places: Places, rows: NDArray[np.int64], length: NDArray[np.uint64], owners: object, *,
    by_chunks: bool,
) -> Window | None:
    """One of `windows` equal parts of the pieces at `rows` of `places`, one behind the other in this order.

    length     of these pieces, in bytes; they are runs of bytes
    by_chunks  parts are divided into chunks, which devices can digest: then some may be on a device

    None if a device cannot digest its parts.
    """
    ends = np.cumsum(length.astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    size = -(-total // (windows * _ALIGN)) * _ALIGN
    begin, end = number * size, min((number + 1) * size, total)
    address, parts, pieces = places.address[rows], [], []
    for at in range(int(np.searchsorted(ends, begin, "right")), len(ends)):
        first = int(ends[at]) - int(length[at])
        if first >= end:
            break
        low, high = max(begin, first), min(end, int(ends[at]))
        cuts = [*range(low, high, CHUNK_BYTES if by_chunks else max(high - low, 1)), high]
        for begins, stops in pairwise(cuts):
            parts.append((int(address[at]) + begins - first, stops - begins))
            pieces.append(at)
    far: list[_Far] = []
    for device, name in enumerate(places.devices):
        mine = np.flatnonzero(places.device[rows[pieces]] == device) if pieces else np.zeros(0, np.int64)
        if not len(mine):
            continue
        stream, table = side_stream(name), np.array(parts, np.uint64)[mine]
        made = None if stream is None or not by_chunks else stream.digest(*np.ascontiguousarray(table.T))
        if stream is None or made is None:
            return None
        stream.wait_current()
        far.append(_Far(stream, made, mine))
    return Window(number, tuple(parts), owners, tuple(pieces), tuple(far))
