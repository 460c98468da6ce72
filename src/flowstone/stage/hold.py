"""Hold: copies of what must not wait, where nobody knows yet who writes it.

Sources are live memory, which may go away meanwhile: the engine copies them, and says so (`native/live_memory.h`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from flowstone import _native
from flowstone.config import HOLD_BYTES
from flowstone.pieces import Memory, Pieces, Places
from flowstone.stage.capture import host_copy, within_reach
from flowstone.stage.landing import host_array


def hold(pieces: Pieces, places: Places, early: Sequence[int]) -> Places:
    """The same places, but for the pieces at `early`: those are copied, and lie in memory of ours."""
    address, apart, owners = places.address.copy(), dict(places.apart), list(places.owners)
    for at in early:
        memory = places.memory(at, pieces[at])
        if memory.device != "cpu":
            copied = host_copy(memory)
            address[at], owners[at] = copied.address, copied.owner
        else:
            array = host_array(memory).copy(order="C")
            address[at], owners[at] = array.ctypes.data, array
        apart.pop(at, None)
    return Places(address, apart, owners)


def hold_one(memory: Memory, is_off: Callable[[], bool]) -> tuple[int, object] | None:
    """A dense copy on the host: its address and owner. A part at a time; None once it `is_off`.

    raises  OSError  the memory is not there any more
    """
    if memory.device != "cpu":
        copied = host_copy(memory)
        return copied.address, copied.owner
    length = int(np.prod(memory.shape, dtype=np.int64)) * memory.item_bytes
    made = np.empty(length, np.uint8)
    target = made.ctypes.data
    rows = _one_row(memory, length)
    for begin in range(0, length, HOLD_BYTES):
        if is_off():
            return None
        failed = rows.copy(0, begin, min(length, begin + HOLD_BYTES), target + begin)
        if failed:
            raise OSError(failed, os.strerror(failed))
    return target, made


def _one_row(memory: Memory, length: int) -> _native.WriteRows:
    places = Places(np.array([memory.address], np.uint64), {} if memory.contiguous else {0: memory}, ())
    _, layout, layouts, *_ = within_reach(places)
    return _native.WriteRows(
        file=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.array([length], np.uint64),
        address=places.address, chunk=np.array([_native.NO_DIGEST], np.uint64), layout=layout, layouts=layouts,
        chunks=0,
    )
