"""Overlap: requested pieces that share memory with another one, so that both cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.plan.match import StoredTable
from flowstone.stage.bounce import host_array
from flowstone.table.pieces import Memory, Pieces, Places

_PAIRS_MAX = 20_000  # of strided pieces that are compared two by two: 40 ms
_WORK_MAX = 100_000  # of one comparison; views in real states take less than a hundredth


def overlaps(pieces: Pieces, places: Places, table: StoredTable, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of positions: each piece that shares bytes with another one, once, and the one that it shares them with.

    rows  of the table, parallel: the tensors to be loaded there
    Pieces that are the same bytes in memory, and in the checkpoint, do not count; nor do views that interleave without
    sharing a byte. Looks only at addresses, also on devices; reads no memory.
    """
    length = _lengths(pieces, table, rows)
    low = places.address.astype(np.uint64)
    high = low + length
    space = places.device if places.devices else np.full(len(length), -1, np.int32)
    for at, memory in places.apart.items():
        low[at], high[at] = _reach(memory)
    found = []
    for number in range(-1, len(places.devices)):
        here = np.flatnonzero((space == number) & (length > 0))
        for group in _groups(here, low, high):
            found += _shared(group, low, high, pieces, places, table, rows)
    return found


def _lengths(pieces: Pieces, table: StoredTable, rows: Sequence[int]) -> NDArray[np.uint64]:
    """Length of each piece in bytes. A whole piece that is stored as requested needs no Piece record."""
    tensor = np.array(rows, np.int64)
    length: NDArray[np.uint64] = table.tensors.lengths[tensor].astype(np.uint64)
    stored = tuple(map(table.tensors.dtypes.__getitem__, rows))
    cast = [] if stored == pieces.dtypes else [at for at, dtype in enumerate(stored) if dtype != pieces.dtypes[at]]
    if len(pieces.parts) or cast:
        apart = np.array([*pieces.parts.tolist(), *cast], np.int64)
        length[apart] = pieces.lengths()[apart]
    return length


def _reach(memory: Memory) -> tuple[int, int]:
    """The lowest and highest address of a piece, the latter exclusive."""
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True) if n]
    below, above = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return memory.address + below, memory.address + above + memory.item_bytes


def _groups(here: NDArray[np.int64], low: NDArray[np.uint64], high: NDArray[np.uint64]) -> list[NDArray[np.int64]]:
    """Those of `here` whose address range meets others', in groups; no two groups meet."""
    ordered = here[np.argsort(low[here], kind="stable")]
    reach = np.maximum.accumulate(high[ordered])
    clashes = low[ordered][1:] < reach[:-1]
    if not clashes.any():
        return []
    return [group for group in np.split(ordered, np.flatnonzero(~clashes) + 1) if len(group) > 1]


def _shared(
    group: NDArray[np.int64], low: NDArray[np.uint64], high: NDArray[np.uint64], pieces: Pieces, places: Places,
    table: StoredTable, rows: Sequence[int],
) -> list[tuple[int, int]]:
    """Of a group, ordered by address: pieces that share bytes with an earlier one."""
    members = group.tolist()
    memory = {at: places.memory(at, pieces[at]) for at in members}
    last = np.searchsorted(low[group], high[group])  # those before it begin before this one ends
    if int((last - np.arange(len(members)) - 1).sum()) > _PAIRS_MAX:
        pairs: Iterable[tuple[int, int]] = _marked(members, memory)
    else:
        pairs = (
            (other, one) for at, one in enumerate(members) for other in members[at + 1 : int(last[at])]
            if _share(memory[one], memory[other])
        )
    found: dict[int, int] = {}
    for other, one in pairs:
        if other not in found and not _are_one(one, other, memory, pieces, table, rows):
            found[other] = one
    return list(found.items())


def _share(one: Memory, other: Memory) -> bool:
    """Whether two pieces with overlapping address ranges share a byte."""
    if one.contiguous and other.contiguous:
        return True
    try:
        # numpy's stubs lack the other values that its documentation allows.
        return np.shares_memory(host_array(one), host_array(other), max_work=_WORK_MAX)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _are_one(
    one: int, other: int, memory: dict[int, Memory], pieces: Pieces, table: StoredTable, rows: Sequence[int]
) -> bool:
    """Whether both are the same run of bytes, and stored equal: then loading both in any order is correct."""
    a, b = memory[one], memory[other]
    same = a.contiguous and b.contiguous and _reach(a) == _reach(b)
    return same and not np.isin([one, other], pieces.parts).any() and table.same_bytes(rows[one], rows[other])


def _marked(members: Sequence[int], memory: dict[int, Memory]) -> Iterator[tuple[int, int]]:
    """Pairs that share bytes, for very many interleaved views: mark each view's bytes in a map of their memory.

    Takes time and memory by the range of addresses, not by the number of pairs.
    """
    bounds = [_reach(memory[at]) for at in members]
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
    """All distances in bytes between its elements, and between `begin` and them."""
    return [memory.address - begin, memory.item_bytes, *(abs(s) for s in memory.strides_bytes)]
