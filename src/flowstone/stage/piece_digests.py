"""Digests of full pieces on devices, computed by the devices (native/gpu/digest_kernel.h), at one moment.

On each device, one kernel in the current stream digests all pieces. So `save` does not wait, and only digests are
copied to the host. Equal pieces have equal digests on all devices that can compute digests.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import DeviceDigests, GatherLayout
from flowstone.config import CHUNK_BYTES
from flowstone.plan.replicas import mix_bits
from flowstone.stage.device import SideStream, side_stream
from flowstone.table.pieces import Places


class PieceDigests(msgspec.Struct, frozen=True, eq=False):
    """Digests that devices compute.

    rows    positions of the digested pieces
    chunks  how many chunks each of them has
    """

    streams: tuple[SideStream, ...]
    made: tuple[DeviceDigests, ...]
    rows: tuple[NDArray[np.int64], ...]
    chunks: tuple[NDArray[np.int64], ...]

    def wait_digests(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Positions of pieces, and their digests. Blocks until the devices have computed them. Can be called on any
        thread.

        raises  StorageError  a device has failed
        """
        for stream in self.streams:
            stream.synchronize()
        digests = [
            whole_digests(digested.digests(), chunks)
            for digested, chunks in zip(self.made, self.chunks, strict=True)
        ]
        return np.concatenate([np.zeros(0, np.int64), *self.rows]), np.concatenate([np.zeros(0, np.uint64), *digests])


def whole_digests(chunks: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A digest of each piece, never 0. `chunks`: digests of its chunks; `counts`: how many each piece has."""
    starts = np.cumsum(counts) - counts
    number = (np.arange(len(chunks)) - np.repeat(starts, counts)).astype(np.uint64)
    digests = np.add.reduceat(mix_bits(chunks ^ mix_bits(number + np.uint64(1))), starts)
    return np.where(digests == 0, np.uint64(1), digests)


def layouts_of(places: Places, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[GatherLayout]]:
    """The memory layouts of the pieces at `rows`. Returns for each piece an index into a list of layouts (-1: the piece
    is contiguous), and that list.
    """
    layout, layouts = np.full(len(rows), -1, np.int64), list[GatherLayout]()
    if not places.strided:
        return layout, layouts
    for position, row in enumerate(rows.tolist()):
        if (memory := places.strided.get(row)) is not None:
            layout[position] = len(layouts)
            layouts.append(GatherLayout(
                item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes
            ))
    return layout, layouts


def digest_pieces(places: Places, rows: NDArray[np.int64], lengths: NDArray[np.uint64]) -> PieceDigests:
    """Digest the pieces at `rows` of `places` that are on devices. `lengths`: lengths of the pieces at `rows`, in
    bytes.

    Leaves out pieces on devices that cannot digest, empty pieces, and strided pieces whose layout is not shallow (see
    `SideStream.digest`).
    """
    layout, layouts = layouts_of(places, rows)
    is_deep = np.isin(layout, [number for number, layout in enumerate(layouts) if not layout.is_shallow])
    streams, made, digested, chunks = [], [], [], []
    for number, name in enumerate(places.devices):
        mine = (places.device[rows] == number) & (lengths > 0) & ~is_deep
        stream = side_stream(name) if mine.any() else None
        digests = None if stream is None else stream.digest(
            places.address[rows[mine]], lengths[mine], layout[mine], layouts
        )
        if stream is None or digests is None:
            continue
        stream.wait_current()
        streams.append(stream)
        made.append(digests)
        digested.append(rows[mine])
        chunks.append(-(-lengths[mine].astype(np.int64) // CHUNK_BYTES))
    return PieceDigests(tuple(streams), tuple(made), tuple(digested), tuple(chunks))
