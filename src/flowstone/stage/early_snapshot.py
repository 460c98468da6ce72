"""Early snapshot: copies of pieces that must not wait, made before it is known which rank writes them.

Sources are live memory, which may go away meanwhile: the engine copies them and reports that (`native/live_memory.h`).
Copies are in host memory, and count against the budget: who asks for them says how much is left. Of a device, small
pieces come by one gather, which `save` waits for; torch copies the others, in parts, so that it needs little memory
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import GATHERED_BYTES_MAX, PACKED_BELOW_BYTES, SNAPSHOT_PART_BYTES
from flowstone.stage.capture import host_copy, within_reach
from flowstone.table.pieces import Memory, Pieces, Places, row_bytes

_ALIGNED_BYTES = 64  # alignment of each copy: fits any element type, and a cache line


def within_room(lengths: NDArray[np.uint64], wanted: NDArray[np.bool_], room_bytes: int) -> NDArray[np.bool_]:
    """Of those `wanted` the ones of which there is room for copies: small ones first, and those of no bytes always.

    lengths  of all, in bytes
    """
    small = lengths < PACKED_BELOW_BYTES
    order = np.concatenate([np.flatnonzero(wanted & small), np.flatnonzero(wanted & ~small)])
    fits: NDArray[np.bool_] = wanted & (lengths == 0)
    fits[order[np.cumsum(_rooms(lengths[order])) <= max(0, room_bytes)]] = True
    return fits


def snapshot(pieces: Pieces, places: Places, early: Sequence[int]) -> tuple[Places, list[int]]:
    """The same places, except that the pieces at `early` are copied into memory of ours.

    Also returns those of them whose memory is gone: another thread has freed it in the meantime.
    """
    copies: dict[int, tuple[int, object]] = {}
    near: list[tuple[int, Memory]] = []
    far = _small_far(places, np.asarray(early, np.int64), pieces.lengths())
    apart = {*far.tolist()}
    for at in early:
        if at in apart:
            continue
        memory = places.memory(at, pieces[at])
        if memory.device == "cpu":
            near.append((at, memory))
        else:
            copied = host_copy(memory)
            copies[at] = copied.address, copied.owner
    lengths = np.array([row_bytes(memory) for _, memory in near], np.uint64)
    rooms = _rooms(lengths)
    made = np.empty(int(rooms.sum()), np.uint8)
    targets = (np.uint64(made.ctypes.data) + np.cumsum(rooms) - rooms).tolist()
    rows, gone = _rows([memory for _, memory in near], lengths), []
    for row, (at, memory) in enumerate(near):
        copies[at] = targets[row], made
        if rows.copy(row, 0, row_bytes(memory), targets[row]):
            gone.append(at)
    return places.with_copies(copies | _gathered(places, far, pieces.lengths()[far])), gone


def _small_far(places: Places, early: NDArray[np.int64], lengths: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Those of `early` that devices gather: as many as that is for."""
    if not places.devices:
        return early[:0]
    small = early[(places.device[early] >= 0) & (lengths[early] < PACKED_BELOW_BYTES)]
    return small[np.cumsum(_rooms(lengths[small])) <= GATHERED_BYTES_MAX]


def _gathered(places: Places, far: NDArray[np.int64], lengths: NDArray[np.uint64]) -> dict[int, tuple[int, object]]:
    """Copies of small pieces on devices: each device gathers its own, all at a time."""
    if not len(far):
        return {}
    from flowstone.stage.gather import gather_whole  # imported here: most processes have no GPU

    reach = within_reach(places.take(far.tolist()), lengths)
    gathered = []
    for number, stream in enumerate(reach.streams):
        mine = np.flatnonzero(reach.device == number)
        gathered.append((mine, *gather_whole(reach, stream, mine, lengths[mine])))
        stream.wait_current()
    copies: dict[int, tuple[int, object]] = {}
    for row in np.flatnonzero(reach.device < 0).tolist():  # torch has copied them, or they have no bytes
        copies[int(far[row])] = int(reach.address[row]), reach
    for stream, (mine, found, begins) in zip(reach.streams, gathered, strict=True):
        stream.synchronize()
        made = found.copy()  # the memory that devices gather into is for the next gather
        for at, begin in zip(far[mine].tolist(), begins.tolist(), strict=True):
            copies[at] = made.ctypes.data + begin, made
    return copies


def _rooms(lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (lengths + np.uint64(_ALIGNED_BYTES - 1)) // np.uint64(_ALIGNED_BYTES) * np.uint64(_ALIGNED_BYTES)


def snapshot_one(memory: Memory, is_off: Callable[[], bool]) -> tuple[int, object] | None:
    """A dense copy on the host: its address and owner. Copies in parts; returns None once `is_off()` is true.

    raises  OSError  the memory is gone
    """
    if memory.device != "cpu":
        copied = host_copy(memory)
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


def _rows(memories: Sequence[Memory], lengths: NDArray[np.uint64]) -> _native.WriteExtents:
    strided = {at: memory for at, memory in enumerate(memories) if not memory.contiguous}
    places = Places(np.array([memory.address for memory in memories], np.uint64), strided, ())
    reach = within_reach(places, lengths)
    count = len(memories)
    return _native.WriteExtents(
        file=np.zeros(count, np.uint32), offset=np.cumsum(lengths) - lengths, length=lengths, address=places.address,
        chunk=np.full(count, _native.NO_DIGEST, np.uint64), layout=reach.layout, layouts=reach.layouts,
        chunks=0,
    )
