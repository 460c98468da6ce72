"""Overlap: finds requested pieces that may share memory, with each other or among their own elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.plan.match import StoredTable
from flowstone.state.memory import IndirectTarget, overlaps_itself
from flowstone.table.pieces import Memory, Pieces, Places


class LoadTargets:
    """Pieces of a state, their memory, and the stored tensors to be loaded into them.

    table     the stored tensors
    rows      for each piece, the row of its tensor in `table`
    indirect  position -> memory of the piece in the state, for pieces that are first loaded into other memory; for
              these pieces, `places` has that other memory
    """

    __slots__ = ("indirect", "pieces", "places", "rows", "table")

    def __init__(
        self, pieces: Pieces, places: Places, table: StoredTable, rows: Sequence[int],
        indirect: Mapping[int, IndirectTarget] | None = None,
    ) -> None:
        self.pieces, self.places, self.table, self.rows, self.indirect = pieces, places, table, rows, indirect or {}

    def memory(self, position: int) -> Memory:
        """The memory that the piece at `position` has in the state."""
        if position in self.indirect:
            return self.indirect[position].memory
        return self.places.memory(position, self.pieces[position])


def find_overlap_groups(targets: LoadTargets) -> list[list[int]]:
    """Groups of pieces whose address ranges overlap; pieces of different groups do not overlap. A piece that may
    overlap itself is a group, too. Compares addresses, also on devices; reads no memory.
    """
    places = targets.places
    length = _lengths(targets.pieces, targets.table, targets.rows)
    low = places.address.astype(np.uint64)
    high = low + length
    space = places.device if places.devices else np.full(len(length), -1, np.int32)
    apart = {**places.strided, **{position: target.memory for position, target in targets.indirect.items()}}
    for position, memory in apart.items():
        low[position], high[position] = address_range(memory)
    groups: list[list[int]] = []
    for number in range(-1, len(places.devices)):
        groups += _groups(np.flatnonzero((space == number) & (length > 0)), low, high)
    grouped = {position for group in groups for position in group}
    return groups + [
        [position] for position, memory in apart.items()
        if length[position] and position not in grouped and overlaps_itself(memory)
    ]


def _lengths(pieces: Pieces, table: StoredTable, rows: Sequence[int]) -> NDArray[np.uint64]:
    """Length of each piece in bytes. Piece objects are created only for pieces that are converted, or that are a part
    of their tensor.
    """
    tensor = np.array(rows, np.int64)
    length: NDArray[np.uint64] = table.tensors.lengths[tensor].astype(np.uint64)
    stored = tuple(map(table.tensors.dtypes.__getitem__, rows))
    cast = [] if stored == pieces.dtypes else [
        position for position, dtype in enumerate(stored) if dtype != pieces.dtypes[position]
    ]
    if len(pieces.parts) or cast:
        apart = np.array([*pieces.parts.tolist(), *cast], np.int64)
        length[apart] = pieces.lengths()[apart]
    return length


def address_range(memory: Memory) -> tuple[int, int]:
    """The lowest address of a piece, and the address after its highest byte."""
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True) if n]
    below, above = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return memory.address + below, memory.address + above + memory.item_bytes


def _groups(here: NDArray[np.int64], low: NDArray[np.uint64], high: NDArray[np.uint64]) -> list[list[int]]:
    """Divide the pieces of `here` that overlap into groups, by their address ranges."""
    ordered = here[np.argsort(low[here], kind="stable")]
    reach = np.maximum.accumulate(high[ordered])
    clashes = low[ordered][1:] < reach[:-1]
    if not clashes.any():
        return []
    return [group.tolist() for group in np.split(ordered, np.flatnonzero(~clashes) + 1) if len(group) > 1]
