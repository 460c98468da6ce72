"""Digests of whole pieces on devices, as they are at one moment, made where they lie (native/digest_kernel.h).

One kernel for each device, in its current stream: `save` waits for nothing, and nothing but the digests comes to the
host. Equal pieces have equal digests, on any device that can make them.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.plan.replicas import mixed
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Places


class PieceDigests(msgspec.Struct, frozen=True, eq=False):
    """Digests on their way, of each device that can make them.

    rows    positions of the digested pieces
    chunks  how many each of them has
    """

    streams: tuple[SideStream, ...]
    made: tuple[_native.Digested, ...]
    rows: tuple[NDArray[np.int64], ...]
    chunks: tuple[NDArray[np.int64], ...]

    def digests(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Positions of pieces, and their digests. Blocks until the devices have made them. Any thread.

        raises  StorageError  a device has failed
        """
        for stream in self.streams:
            stream.synchronize()
        found = [whole_digests(one.digests(), chunks) for one, chunks in zip(self.made, self.chunks, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *self.rows]), np.concatenate([np.zeros(0, np.uint64), *found])


def whole_digests(chunks: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A digest of each piece, never 0. `chunks`: digests of their chunks, so many of each (at least one), in order."""
    starts = np.cumsum(counts) - counts
    number = (np.arange(len(chunks)) - np.repeat(starts, counts)).astype(np.uint64)
    found = np.add.reduceat(mixed(chunks ^ mixed(number + np.uint64(1))), starts)
    return np.where(found == 0, np.uint64(1), found)


def layouts_of(places: Places, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[_native.GatherLayout]]:
    """How the pieces at `rows` lie in memory: of each an index into the layouts; -1: it is one run."""
    layout, layouts = np.full(len(rows), -1, np.int64), list[_native.GatherLayout]()
    if not places.apart:
        return layout, layouts
    for at, row in enumerate(rows.tolist()):
        if (memory := places.apart.get(row)) is not None:
            layout[at] = len(layouts)
            layouts.append(_native.GatherLayout(
                item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes
            ))
    return layout, layouts


def digest_pieces(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64]) -> PieceDigests:
    """Digest the pieces at `rows` of `places` that are in a device's memory. `lengths`: of those, in bytes.

    Left out are those of devices that cannot, empty ones, and strided ones whose layout is not shallow.
    """
    layout, layouts = layouts_of(places, rows)
    is_deep = np.isin(layout, [at for at, one in enumerate(layouts) if not one.is_shallow])
    streams, made, digested, chunks = [], [], [], []
    for number, name in enumerate(places.devices):
        mine = (places.device[rows] == number) & (lengths > 0) & ~is_deep
        stream = side_stream(name) if mine.any() else None
        found = None if stream is None else stream.digest(
            places.address[rows[mine]], lengths[mine], layout[mine], layouts
        )
        if stream is None or found is None:
            continue
        stream.wait_current()
        streams.append(stream)
        made.append(found)
        digested.append(rows[mine])
        chunks.append(-(-lengths[mine].astype(np.int64) // CHUNK_BYTES))
    return PieceDigests(tuple(streams), tuple(made), tuple(digested), tuple(chunks))
