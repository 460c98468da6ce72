"""Early snapshot: copies of pieces that must not wait for a plan (which rank writes which pieces).

The memory may be freed while it is copied. So the engine copies it, and reports if it was freed
(`native/capture/live_memory.h`). Copies are in host memory; the caller limits their total length. One gather copies all
small pieces of a device, and `save` waits for it. torch copies larger pieces of a device in parts, so that it needs
little extra device memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flowstone._native import NO_DIGEST, WriteExtents
from flowstone.config import GATHERED_BYTES_MAX, PACKED_BELOW_BYTES, SNAPSHOT_PART_BYTES
from flowstone.extensions import extension
from flowstone.stage.capture import resolve_device_memory
from flowstone.table.pieces import Memory, Pieces, Places, row_bytes

_ALIGNED_BYTES = 64  # alignment of each copy in memory: a cache line, and enough for any element type


def choose_copied(lengths: NDArray[np.uint64], candidates: NDArray[np.bool_], room_bytes: int) -> NDArray[np.bool_]:
    """For each piece, whether it is copied: those of the `candidates` whose copies fit into `room_bytes` together.
    Small pieces are chosen first. Empty pieces always fit.

    lengths  lengths of all pieces, in bytes
    """
    small = lengths < PACKED_BELOW_BYTES
    order = np.concatenate([np.flatnonzero(candidates & small), np.flatnonzero(candidates & ~small)])
    fits: NDArray[np.bool_] = candidates & (lengths == 0)
    fits[order[np.cumsum(_rooms(lengths[order])) <= max(0, room_bytes)]] = True
    return fits


def snapshot_pieces(pieces: Pieces, places: Places, early: Sequence[int]) -> tuple[Places, list[int]]:
    """Copy the pieces at the positions `early`. Returns `places` with the copies in place of these pieces' memory.

    Also returns the pieces whose memory another thread has freed meanwhile.
    """
    copies: dict[int, tuple[int, object]] = {}
    near: list[tuple[int, Memory]] = []
    far = _small_far(places, np.asarray(early, np.int64), pieces.lengths())
    apart = {*far.tolist()}
    for position in early:
        if position in apart:
            continue
        memory = places.memory(position, pieces[position])
        if memory.device == "cpu":
            near.append((position, memory))
        else:
            copied = _host_copy(memory)
            copies[position] = copied.address, copied.owner
    lengths = np.array([row_bytes(memory) for _, memory in near], np.uint64)
    rooms = _rooms(lengths)
    made = np.empty(int(rooms.sum()), np.uint8)
    targets = (np.uint64(made.ctypes.data) + np.cumsum(rooms) - rooms).tolist()
    rows, gone = _rows([memory for _, memory in near], lengths), []
    for row, (position, memory) in enumerate(near):
        copies[position] = targets[row], made
        if rows.copy(row, 0, row_bytes(memory), targets[row]):
            gone.append(position)
    return places.with_copies(copies | _gathered(places, far, pieces.lengths()[far])), gone


def _small_far(places: Places, early: NDArray[np.int64], lengths: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Those of the `early` pieces that a kernel gathers on their device: small pieces on devices, as many as fit into
    GATHERED_BYTES_MAX bytes together.
    """
    if not places.devices:
        return early[:0]
    small = early[(places.device[early] >= 0) & (lengths[early] < PACKED_BELOW_BYTES)]
    return small[np.cumsum(_rooms(lengths[small])) <= GATHERED_BYTES_MAX]


def _gathered(places: Places, far: NDArray[np.int64], lengths: NDArray[np.uint64]) -> dict[int, tuple[int, object]]:
    """Copies of small pieces on devices: each device gathers all of its pieces at once."""
    if not len(far):
        return {}
    from flowstone.stage.gather import gather_whole  # imported here: most processes have no GPU

    reach = resolve_device_memory(places.take(far.tolist()), lengths)
    gathered = []
    for number, stream in enumerate(reach.streams):
        mine = np.flatnonzero(reach.device == number)
        gathered.append((mine, *gather_whole(reach, stream, mine, lengths[mine])))
        stream.wait_current()
    copies: dict[int, tuple[int, object]] = {}
    for row in np.flatnonzero(reach.device < 0).tolist():  # torch has copied them, or they are empty
        copies[int(far[row])] = int(reach.address[row]), reach
    for stream, (mine, content, begins) in zip(reach.streams, gathered, strict=True):
        stream.synchronize()
        made = content.copy()  # the next gather reuses this memory
        for position, begin in zip(far[mine].tolist(), begins.tolist(), strict=True):
            copies[position] = made.ctypes.data + begin, made
    return copies


def _rooms(lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (lengths + np.uint64(_ALIGNED_BYTES - 1)) // np.uint64(_ALIGNED_BYTES) * np.uint64(_ALIGNED_BYTES)


def snapshot_one(memory: Memory, is_off: Callable[[], bool]) -> tuple[int, object] | None:
    """Copy a piece into dense host memory, and return the copy's address and owner. Copies in parts, and returns None
    as soon as `is_off()` is true.

    raises  OSError  the memory was freed
    """
    if memory.device != "cpu":
        copied = _host_copy(memory)
        return copied.address, copied.owner
    length = row_bytes(memory)
    made = np.empty(length, np.uint8)
    target = made.ctypes.data
    rows = _rows([memory], np.array([length], np.uint64))
    for begin in range(0, length, SNAPSHOT_PART_BYTES):
        if is_off():
            return None
        failed = rows.copy(0, begin, min(length, begin + SNAPSHOT_PART_BYTES), target + begin)
        if failed:
            raise OSError(failed, os.strerror(failed))
    return target, made


def _host_copy(memory: Memory) -> Memory:
    return cast("Memory", extension("torch.device_memory").host_copy(memory))


def _rows(memories: Sequence[Memory], lengths: NDArray[np.uint64]) -> WriteExtents:
    strided = {row: memory for row, memory in enumerate(memories) if not memory.contiguous}
    places = Places(np.array([memory.address for memory in memories], np.uint64), strided, ())
    reach = resolve_device_memory(places, lengths)
    count = len(memories)
    return WriteExtents(
        file=np.zeros(count, np.uint32), offset=np.cumsum(lengths) - lengths, length=lengths, address=places.address,
        chunk=np.full(count, NO_DIGEST, np.uint64), layout=reach.layout, layouts=reach.layouts,
        chunks=0,
    )
