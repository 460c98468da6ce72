"""Shared memory: whether pieces of a state that share bytes have the same stored values for these bytes.

If so, views of one tensor (transposed, sliced, of another dtype, expanded) can be loaded in any order; if not, they
cannot be loaded. Their content is read into separate memory and compared before anything in the state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BOUNCE_BYTES
from flowstone.errors import BudgetError
from flowstone.plan.match import refuse
from flowstone.stage.bounce import host_array
from flowstone.stage.overlap import LoadTargets, address_range
from flowstone.state.records import IndirectTarget
from flowstone.state.tensors import overlaps_itself
from flowstone.store.mount import available_bytes
from flowstone.table.pieces import Memory, Piece, Pieces, Places

Read = Callable[[Sequence[int], Places], None]
"""Fills new memory, which is zero, with the stored bytes of the pieces at these positions, ascending; verified."""

_PAIRS_MAX = 20_000  # of strided pieces that are compared two by two: 40 ms
_WORK_MAX = 100_000  # of one comparison; views in real states take less than a hundredth
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def sharing(targets: LoadTargets, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those of the `candidates` in which some pieces share bytes, each in ascending order.

    Pieces that are the same bytes in memory, and in the checkpoint, do not count; nor do views that interleave without
    sharing a byte.
    """
    return [sorted(group) for group in groups if _overlaps(group, targets)]


def _overlaps(members: Sequence[int], targets: LoadTargets) -> bool:
    """Whether a piece of a group, which is ordered by address, shares bytes with another one, or overlaps itself."""
    memory = {at: targets.memory(at) for at in members}
    bounds = np.array([address_range(memory[at]) for at in members], np.uint64)
    last = np.searchsorted(bounds[:, 0], bounds[:, 1])  # those before it begin before this one ends
    if int((last - np.arange(len(members)) - 1).sum()) > _PAIRS_MAX:
        pairs: Iterable[tuple[int, int]] = _marked(members, memory)
    else:
        pairs = (
            (other, one) for at, one in enumerate(members) for other in members[at + 1 : int(last[at])]
            if share_bytes(memory[one], memory[other])
        )
    unlike = {*targets.pieces.parts.tolist(), *targets.indirect}
    return any(overlaps_itself(one) for one in memory.values()) or any(
        one in unlike or other in unlike or not _is_one_run(memory[one], memory[other])
        or not targets.table.same_bytes(targets.rows[one], targets.rows[other]) for other, one in pairs
    )


def share_bytes(one: Memory, other: Memory) -> bool:
    """Whether two pieces on one device share a byte; True also where that is too hard to tell."""
    (low, high), (begin, end) = address_range(one), address_range(other)
    if high <= begin or end <= low:
        return False
    if one.contiguous and other.contiguous:
        return True
    try:
        # numpy's stubs lack the other values that its documentation allows.
        return np.shares_memory(host_array(one), host_array(other), max_work=_WORK_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _is_one_run(one: Memory, other: Memory) -> bool:
    """Whether both are the same run of bytes: if they are stored equal, loading both in any order is correct."""
    return one.contiguous and other.contiguous and address_range(one) == address_range(other)


def _owner_at(address: int, members: Sequence[int], memory: Mapping[int, Memory]) -> int:
    """The first of these pieces that has an element at this address."""
    spot = Memory(None, address, (1,), (1,), 1)
    return next(at for at in members if share_bytes(memory[at], spot))


def _marked(members: Sequence[int], memory: Mapping[int, Memory]) -> Iterator[tuple[int, int]]:
    """Pairs that share bytes, for very many interleaved views: mark each view's bytes in a map of their memory.

    Takes time and memory by the range of addresses, not by the number of pairs.
    """
    bounds = [address_range(memory[at]) for at in members]
    begin = min(low for low, _ in bounds)
    grain = int(np.gcd.reduce([n for at in members for n in _spacing(memory[at], begin)]))
    owner = np.full((max(high for _, high in bounds) - begin) // grain, -1, np.int32)
    for number, at in enumerate(members):
        one = memory[at]
        inside = np.lib.stride_tricks.as_strided(
            owner[(one.address - begin) // grain :], (*one.shape, one.item_bytes // grain),
            (*(s // grain * 4 for s in one.strides_bytes), 4),
        )
        before = int(inside.max())
        if before >= 0:
            yield at, members[before]
        inside[...] = number


def _spacing(memory: Memory, begin: int) -> list[int]:
    """The distances, in bytes, from which all positions follow: of `begin` to the memory, its items and strides."""
    return [memory.address - begin, memory.item_bytes, *(abs(s) for s in memory.strides_bytes)]


def conflicts(targets: LoadTargets, groups: Sequence[Sequence[int]], read: Read) -> list[tuple[int, int]]:
    """Pairs of pieces that share bytes with different stored values; a pair of one piece: its own elements share them.

    groups  as `sharing` returns them
    raises  BudgetError if there is no memory for a copy of the shared memory; all errors of `read`
    """
    found: list[tuple[int, int]] = []
    pieces = targets.pieces
    for members in groups:
        shadow = _Shadow({at: targets.memory(at) for at in members})
        for batch in _batches(members, pieces):
            content = [np.zeros(pieces[at].bytes, np.uint8) for at in batch]
            read(batch, Places.of([_dense(pieces[at], raw) for at, raw in zip(batch, content, strict=True)]))
            for at, raw in zip(batch, content, strict=True):
                found += shadow.enter(at, _as_in_memory(raw, pieces[at], targets.indirect.get(at)))
    return found


class _Shadow:
    """A copy of the memory that some pieces share, with a mark for each byte that a piece has entered."""

    def __init__(self, memory: Mapping[int, Memory]) -> None:
        self._memory, self._entered = memory, list[int]()
        bounds = [address_range(one) for one in memory.values()]
        self._begin, end = min(low for low, _ in bounds), max(high for _, high in bounds)
        grain = np.gcd.reduce([8, *(n for one in memory.values() for n in _spacing(one, self._begin))])
        self._grain, count = int(grain), (end - self._begin) // int(grain)
        needed, available = count * (self._grain + 1), available_bytes()
        if needed > available:
            raise BudgetError(
                f"comparing the stored values of tensors that share memory takes {needed} bytes",
                found=f"{available} bytes available", next="leave views of other tensors out of the state",
            )
        self._content, self._marks = np.zeros(count, _CARRIERS[self._grain]), np.zeros(count, np.bool_)

    def enter(self, at: int, raw: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
        """Enter the content of one piece; yields it with the piece whose content differs, if any does."""
        memory = self._memory[at]
        content, marks = self._view(self._content, memory), self._view(self._marks, memory)
        values = raw.view(content.dtype).reshape(content.shape)
        unmarked = np.logical_not(marks)
        different = np.flatnonzero(np.logical_and(content != values, marks))
        if len(different):
            grains = np.unravel_index(int(different[0]), content.shape)
            strides = (*memory.strides_bytes, self._grain)
            address = memory.address + sum(int(n) * s for n, s in zip(grains, strides, strict=True))
            yield at, _owner_at(address, self._entered, self._memory)
        np.copyto(content, values, where=unmarked)
        if np.any((content != values) & unmarked):
            yield at, at
        marks[...] = True
        self._entered.append(at)

    def _view(self, array: NDArray[np.generic], memory: Memory) -> NDArray[np.generic]:
        """The grains of the shadow that a piece covers: one dimension more than its elements have."""
        grain, size = self._grain, array.itemsize
        return np.lib.stride_tricks.as_strided(
            array[(memory.address - self._begin) // grain :], (*memory.shape, memory.item_bytes // grain),
            (*(s // grain * size for s in memory.strides_bytes), size),
        )


def _batches(members: Sequence[int], pieces: Pieces) -> Iterator[list[int]]:
    """Batches of pieces that are read at once: several short ones, or a long one."""
    batch: list[int] = []
    room = BOUNCE_BYTES
    for at in members:
        if batch and pieces[at].bytes > room:
            yield batch
            batch, room = [], BOUNCE_BYTES
        batch.append(at)
        room -= pieces[at].bytes
    yield batch


def _dense(piece: Piece, raw: NDArray[np.uint8]) -> Memory:
    """The memory of a piece in `raw`, row-major."""
    return Places.of([Memory(raw, raw.ctypes.data, (), (), 1)]).run(0, piece.box.shape, piece.dtype.item_bytes)


def _as_in_memory(raw: NDArray[np.uint8], piece: Piece, indirect: IndirectTarget | None) -> NDArray[np.uint8]:
    """Values as the memory holds them, which differs from what conjugate and negative views show. Changes `raw`."""
    if indirect is None:
        return raw
    parts = 2 if piece.dtype.name.startswith("complex") else 1
    numbers = raw.view(_CARRIERS[piece.dtype.item_bytes // parts]).reshape(-1, parts)
    sign = numbers.dtype.type(1 << (8 * numbers.itemsize - 1))
    if indirect.is_conj:
        numbers[:, 1] ^= sign
    if indirect.is_neg:
        numbers ^= sign
    return raw


def refuse_conflicts(targets: LoadTargets, groups: Sequence[Sequence[int]], read: Read) -> None:
    """Raise MismatchError for what `conflicts` finds among the `candidates`, if anything."""
    found, names = conflicts(targets, sharing(targets, groups), read), targets.pieces.names
    if found:
        refuse(
            [
                f"overlap     {names[at]}: shares memory with {names[other]}, but their stored values differ"
                if at != other else
                f"overlap     {names[at]}: its elements share memory, but their stored values differ"
                for at, other in found
            ],
            what="tensors that share memory in the state differ in the checkpoint",
            next="give each its own memory (clone()), or leave one out of the state and add fs.Skip for it",
        )
