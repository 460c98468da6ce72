"""Overlap: requested pieces whose memory may be shared, with each other or among their own elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.plan.match import StoredTable
from flowstone.state.records import IndirectTarget
from flowstone.state.tensors import overlaps_itself
from flowstone.table.pieces import Memory, Pieces, Places


class LoadTargets:
    """Pieces of a state, their memory, and the stored tensors that are to be loaded there.

    rows      of the table, parallel to the pieces
    indirect  position -> the memory of a piece in the state, where `places` has other memory
    """

    __slots__ = ("indirect", "pieces", "places", "rows", "table")

    def __init__(
        self, pieces: Pieces, places: Places, table: StoredTable, rows: Sequence[int],
        indirect: Mapping[int, IndirectTarget] | None = None,
    ) -> None:
        self.pieces, self.places, self.table, self.rows, self.indirect = pieces, places, table, rows, indirect or {}

    def memory(self, position: int) -> Memory:
        """The memory of the piece in the state."""
        if position in self.indirect:
            return self.indirect[position].memory
        return self.places.memory(position, self.pieces[position])


def candidates(targets: LoadTargets) -> list[list[int]]:
    """Groups of positions, by address: pieces of one group have overlapping ranges of addresses, pieces of two groups
    have not. A piece that may overlap itself is a group, too. Compares addresses, also on devices; reads no memory.
    """
    places = targets.places
    length = _lengths(targets.pieces, targets.table, targets.rows)
    low = places.address.astype(np.uint64)
    high = low + length
    space = places.device if places.devices else np.full(len(length), -1, np.int32)
    apart = {**places.apart, **{at: one.memory for at, one in targets.indirect.items()}}
    for at, memory in apart.items():
        low[at], high[at] = address_range(memory)
    found: list[list[int]] = []
    for number in range(-1, len(places.devices)):
        found += _groups(np.flatnonzero((space == number) & (length > 0)), low, high)
    known = {at for group in found for at in group}
    return found + [[at] for at, memory in apart.items() if length[at] and at not in known and overlaps_itself(memory)]


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


def address_range(memory: Memory) -> tuple[int, int]:
    """The lowest and highest address of a piece, the latter exclusive."""
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True) if n]
    below, above = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return memory.address + below, memory.address + above + memory.item_bytes


def _groups(here: NDArray[np.int64], low: NDArray[np.uint64], high: NDArray[np.uint64]) -> list[list[int]]:
    """Those of `here` whose address range meets others', in groups; no two groups meet."""
    ordered = here[np.argsort(low[here], kind="stable")]
    reach = np.maximum.accumulate(high[ordered])
    clashes = low[ordered][1:] < reach[:-1]
    if not clashes.any():
        return []
    return [group.tolist() for group in np.split(ordered, np.flatnonzero(~clashes) + 1) if len(group) > 1]
