"""Fingerprints of a state. Each step has the fingerprint of one window, which is a part of the state; a replay compares
it (docs/FORMAT.md, Journals).

A device computes digests of its own memory in the current stream, after the last step and before any later one. Only
the digests are copied to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Places

_ALIGN = 64


class _DeviceDigests(msgspec.Struct, frozen=True, eq=False):
    """Digests that one device computes, of the parts of a window at the positions `rows`."""

    stream: SideStream
    made: _native.DeviceDigests
    rows: NDArray[np.int64]


class FingerprintWindow(msgspec.Struct, frozen=True, eq=False):
    """A window of the state: the memory whose fingerprint is computed at one step.

    parts   address and length of each range of memory in the window
    owners  keep that memory alive
    pieces  for each range, the piece (part of a tensor) to which it belongs, by its number among the pieces with
            fingerprints
    far     the digests of memory on devices, which the devices compute
    """

    number: int
    parts: tuple[tuple[int, int], ...]
    owners: object
    pieces: tuple[int, ...] = ()
    far: tuple[_DeviceDigests, ...] = ()

    def host_digests(self) -> NDArray[np.uint64]:
        """XXH3-64 of each range in host memory, which must not change meanwhile; 0 for the ranges on devices."""
        address, length = np.array(self.parts, np.uint64).reshape(-1, 2).T
        length = length.copy()
        for device in self.far:
            length[device.rows] = 0
        digests = np.array(digests_of(address, length), np.uint64)  # without a dtype, numpy may make floats
        return np.where(length > 0, digests, np.uint64(0))

    def digests(self, host: NDArray[np.uint64]) -> list[int]:
        """The digests of all parts. `host`: the result of `host_digests`. Waits for the devices.

        raises  OSError  a device has failed
        """
        all_digests = host.copy()
        for device in self.far:
            device.stream.native.synchronize()
            all_digests[device.rows] = device.made.digests()
        digests: list[int] = all_digests.tolist()
        return digests

    def fingerprint(self) -> str:
        return fingerprint_of(self.digests(self.host_digests()))


class FrozenDigests:
    """Detects changes of frozen tensors: compares their digests with those of the last time that their window was read.
    For the journal's thread, except `take_changed`.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], int] = {}  # address and length of a tensor -> digest
        self._changed = ""

    def compare(self, window: FingerprintWindow, digests: Sequence[int], names: Mapping[int, str]) -> None:
        """Compare the digests of the frozen tensors in a window with earlier ones, and store them. `names`: number of a
        frozen piece -> its name.
        """
        for part, piece, digest in zip(window.parts, window.pieces, digests, strict=True):
            name = names.get(piece)
            if name is not None and self._digests.setdefault(part, digest) != digest:
                self._digests[part], self._changed = digest, name

    def take_changed(self) -> str:
        """The name of a frozen tensor that has changed since the last call; "" if none has."""
        name, self._changed = self._changed, ""
        return name


def digests_of(addresses: Sequence[int] | NDArray[np.uint64], lengths: Sequence[int] | NDArray[np.uint64]) -> list[int]:
    """XXH3-64 of each range of host memory."""
    digests = _native.digest_memory(np.asarray(addresses, np.uint64), np.asarray(lengths, np.uint64))
    return digests.tolist()  # type: ignore[no-any-return]


def fingerprint_of(digests: Sequence[int]) -> str:
    """XXH3-64 of these digests, as 16 hexadecimal digits."""
    return f"{_native.xxh3_64(np.array(digests, '<u8').view(np.uint8)):016x}"


def can_digest(places: Places) -> bool:
    """Whether all devices with these pieces (parts of tensors) can compute digests. Tries it with empty input."""
    none = np.zeros(0, np.uint64)
    streams = [side_stream(name) for name in places.devices]
    return all(stream is not None and stream.digest(none, none) is not None for stream in streams)


def window_of(
    number: int, windows: int, places: Places, rows: NDArray[np.int64], length: NDArray[np.uint64], owners: object, *,
    by_chunks: bool,
) -> FingerprintWindow | None:
    """Describe one window (part) of the state. The pieces (parts of tensors) at the positions `rows` of `places` are
    divided, in this order, into `windows` windows of equal length; `number` chooses one of them.

    length     length of each of these pieces in bytes; each is contiguous in memory
    by_chunks  whether to divide the window into chunks, as devices compute digests of chunks; True if a piece may be on
               a device

    Returns None if a device cannot compute digests.
    """
    ends = np.cumsum(length.astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    size = -(-total // (windows * _ALIGN)) * _ALIGN
    begin, end = number * size, min((number + 1) * size, total)
    address, parts, pieces = places.address[rows], [], []
    for index in range(int(np.searchsorted(ends, begin, "right")), len(ends)):
        first = int(ends[index]) - int(length[index])
        if first >= end:
            break
        low, high = max(begin, first), min(end, int(ends[index]))
        cuts = [*range(low, high, CHUNK_BYTES if by_chunks else max(high - low, 1)), high]
        for begins, stops in pairwise(cuts):
            parts.append((int(address[index]) + begins - first, stops - begins))
            pieces.append(index)
    far: list[_DeviceDigests] = []
    for device, name in enumerate(places.devices):
        mine = np.flatnonzero(places.device[rows[pieces]] == device) if pieces else np.zeros(0, np.int64)
        if not len(mine):
            continue
        stream, table = side_stream(name), np.array(parts, np.uint64)[mine]
        made = None if stream is None or not by_chunks else stream.digest(*np.ascontiguousarray(table.T))
        if stream is None or made is None:
            return None
        stream.wait_current()
        far.append(_DeviceDigests(stream, made, mine))
    return FingerprintWindow(number, tuple(parts), owners, tuple(pieces), tuple(far))
