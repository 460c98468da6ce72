"""Shared memory: checks whether pieces of a state that share bytes have the same stored values for these bytes.

If the values are the same, views of one tensor (transposed, sliced, of another dtype, expanded) can be loaded in any
order; if not, they cannot be loaded. The stored values are read into separate memory, and compared, before anything in
the state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BOUNCE_BYTES
from flowstone.errors import BudgetError
from flowstone.plan.match import raise_mismatch
from flowstone.stage.bounce import host_array
from flowstone.stage.overlap import LoadTargets, address_range
from flowstone.state.memory import IndirectTarget, overlaps_itself
from flowstone.store.mount import available_bytes
from flowstone.table.pieces import Memory, Piece, Pieces, Places

Read = Callable[[Sequence[int], Places], None]
"""Reads the stored bytes of the pieces at these positions (ascending) into new, zeroed memory, and verifies them."""

_PAIRS_MAX = 20_000  # up to so many pairs of strided pieces are compared one by one, which takes 40 ms
_WORK_MAX = 100_000  # numpy's effort limit for one comparison; views in real states take less than a hundredth
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def find_sharing_groups(targets: LoadTargets, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The `groups` in which pieces, or elements of one piece, share bytes, each in ascending order.

    Pieces that are the same bytes both in memory and in the checkpoint do not count as sharing. Neither do views that
    interleave without sharing a byte.
    """
    return [sorted(group) for group in groups if _overlaps(group, targets)]


def _overlaps(members: Sequence[int], targets: LoadTargets) -> bool:
    """Whether pieces of a group, or elements of one piece, share bytes in a way that counts for `find_sharing_groups`.
    The group is ordered by address.
    """
    memory = {position: targets.memory(position) for position in members}
    bounds = np.array([address_range(memory[position]) for position in members], np.uint64)
    last = np.searchsorted(bounds[:, 0], bounds[:, 1])  # pieces before `last` begin before this one ends
    if int((last - np.arange(len(members)) - 1).sum()) > _PAIRS_MAX:
        pairs: Iterable[tuple[int, int]] = _marked(members, memory)
    else:
        pairs = (
            (other, first) for index, first in enumerate(members) for other in members[index + 1 : int(last[index])]
            if share_bytes(memory[first], memory[other])
        )
    unlike = {*targets.pieces.parts.tolist(), *targets.indirect}
    return any(overlaps_itself(piece) for piece in memory.values()) or any(
        first in unlike or other in unlike or not _is_one_run(memory[first], memory[other])
        or not targets.table.same_bytes(targets.rows[first], targets.rows[other]) for other, first in pairs
    )


def share_bytes(first: Memory, other: Memory) -> bool:
    """Whether two pieces on one device share a byte; also True if that is too hard to compute."""
    (low, high), (begin, end) = address_range(first), address_range(other)
    if high <= begin or end <= low:
        return False
    if first.contiguous and other.contiguous:
        return True
    try:
        # numpy's documentation allows other values of max_work, which its type stubs lack.
        return np.shares_memory(host_array(first), host_array(other), max_work=_WORK_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _is_one_run(first: Memory, other: Memory) -> bool:
    """Whether two pieces are the same contiguous bytes in memory. If their stored values are equal, both can be loaded
    in any order.
    """
    return first.contiguous and other.contiguous and address_range(first) == address_range(other)


def _owner_at(address: int, members: Sequence[int], memory: Mapping[int, Memory]) -> int:
    """The first of these pieces that has an element at this address."""
    spot = Memory(None, address, (1,), (1,), 1)
    return next(position for position in members if share_bytes(memory[position], spot))


def _marked(members: Sequence[int], memory: Mapping[int, Memory]) -> Iterator[tuple[int, int]]:
    """Find pairs that share bytes, among very many interleaved views: mark each view's bytes in a map of their memory.

    Time and memory that this takes depend on the range of addresses, not on the number of pairs.
    """
    bounds = [address_range(memory[position]) for position in members]
    begin = min(low for low, _ in bounds)
    grain = int(np.gcd.reduce([n for position in members for n in _spacing(memory[position], begin)]))
    owner = np.full((max(high for _, high in bounds) - begin) // grain, -1, np.int32)
    for number, position in enumerate(members):
        view = memory[position]
        inside = np.lib.stride_tricks.as_strided(
            owner[(view.address - begin) // grain :], (*view.shape, view.item_bytes // grain),
            (*(s // grain * 4 for s in view.strides_bytes), 4),
        )
        before = int(inside.max())
        if before >= 0:
            yield position, members[before]
        inside[...] = number


def _spacing(memory: Memory, begin: int) -> list[int]:
    """The numbers of bytes that determine where each element of `memory` begins and ends, counted from the address
    `begin`: the distance from `begin` to the first element, the length of an element, and the strides. A divisor of all
    these numbers divides the distance from `begin` to the beginning, and to the end, of every element.
    """
    return [memory.address - begin, memory.item_bytes, *(abs(s) for s in memory.strides_bytes)]


def find_conflicts(targets: LoadTargets, groups: Sequence[Sequence[int]], read: Read) -> list[tuple[int, int]]:
    """Pairs of pieces that share bytes for which the checkpoint has different values. A pair of a piece with itself
    means that several of its own elements share bytes.

    groups  as `find_sharing_groups` returns them
    raises  BudgetError if there is no memory for a copy of the shared memory; all errors of `read`
    """
    differences: list[tuple[int, int]] = []
    pieces = targets.pieces
    for members in groups:
        shadow = _Shadow({position: targets.memory(position) for position in members})
        for batch in _batches(members, pieces):
            content = [np.zeros(pieces[position].bytes, np.uint8) for position in batch]
            read(batch, Places.of([_dense(pieces[row], raw) for row, raw in zip(batch, content, strict=True)]))
            for position, raw in zip(batch, content, strict=True):
                values = _as_in_memory(raw, pieces[position], targets.indirect.get(position))
                differences += shadow.enter(position, values)
    return differences


class _Shadow:
    """A copy of the memory that some pieces share, with a mark for each unit that was entered. A unit is 1, 2, 4 or 8
    bytes: the largest of these lengths at whose multiples, from the start of the copy, all elements begin and end.
    """

    def __init__(self, memory: Mapping[int, Memory]) -> None:
        self._memory, self._entered = memory, list[int]()
        bounds = [address_range(piece) for piece in memory.values()]
        self._begin, end = min(low for low, _ in bounds), max(high for _, high in bounds)
        grain = np.gcd.reduce([8, *(n for piece in memory.values() for n in _spacing(piece, self._begin))])
        self._grain, count = int(grain), (end - self._begin) // int(grain)
        needed, available = count * (self._grain + 1), available_bytes()
        if needed > available:
            raise BudgetError(
                f"comparing the stored values of tensors that share memory takes {needed} bytes",
                found=f"{available} bytes available", next="leave views of other tensors out of the state",
            )
        self._content, self._marks = np.zeros(count, _CARRIERS[self._grain]), np.zeros(count, np.bool_)

    def enter(self, position: int, raw: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
        """Enter the stored bytes of one piece. If they differ from bytes that another piece has entered there, yields
        the pair of both pieces; if they differ among themselves, the pair of the piece with itself.
        """
        memory = self._memory[position]
        content, marks = self._view(self._content, memory), self._view(self._marks, memory)
        values = raw.view(content.dtype).reshape(content.shape)
        unmarked = np.logical_not(marks)
        different = np.flatnonzero(np.logical_and(content != values, marks))
        if len(different):
            grains = np.unravel_index(int(different[0]), content.shape)
            strides = (*memory.strides_bytes, self._grain)
            address = memory.address + sum(int(n) * s for n, s in zip(grains, strides, strict=True))
            yield position, _owner_at(address, self._entered, self._memory)
        np.copyto(content, values, where=unmarked)
        if np.any((content != values) & unmarked):
            yield position, position
        marks[...] = True
        self._entered.append(position)

    def _view(self, array: NDArray[np.generic], memory: Memory) -> NDArray[np.generic]:
        """The entries of `array` that belong to a piece's elements. `array` has one entry for each unit of the shared
        memory; the result's last dimension has the units of one element.
        """
        grain, size = self._grain, array.itemsize
        return np.lib.stride_tricks.as_strided(
            array[(memory.address - self._begin) // grain :], (*memory.shape, memory.item_bytes // grain),
            (*(s // grain * size for s in memory.strides_bytes), size),
        )


def _batches(members: Sequence[int], pieces: Pieces) -> Iterator[list[int]]:
    """Batches of pieces that are read together: several short ones, or a long one."""
    batch: list[int] = []
    left_bytes = BOUNCE_BYTES
    for position in members:
        if batch and pieces[position].bytes > left_bytes:
            yield batch
            batch, left_bytes = [], BOUNCE_BYTES
        batch.append(position)
        left_bytes -= pieces[position].bytes
    yield batch


def _dense(piece: Piece, raw: NDArray[np.uint8]) -> Memory:
    """The memory of a piece in `raw`, row-major."""
    return Places.of([Memory(raw, raw.ctypes.data, (), (), 1)]).run(0, piece.box.shape, piece.dtype.item_bytes)


def _as_in_memory(raw: NDArray[np.uint8], piece: Piece, indirect: IndirectTarget | None) -> NDArray[np.uint8]:
    """The bytes that a piece has in memory, from its values `raw`. They differ for views with a conjugate or negative
    bit. Changes `raw`.
    """
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
    """Raise MismatchError if `find_conflicts` finds pairs of pieces in `groups`."""
    differing, names = find_conflicts(targets, find_sharing_groups(targets, groups), read), targets.pieces.names
    if differing:
        raise_mismatch(
            [
                f"overlap     {names[position]}: shares memory with {names[other]}, but their stored values differ"
                if position != other else
                f"overlap     {names[position]}: its elements share memory, but their stored values differ"
                for position, other in differing
            ],
            subject="tensors that share memory in the state differ in the checkpoint",
            next="give each tensor its own memory (clone()); or leave one out of the state, and add fs.Skip for it",
        )
