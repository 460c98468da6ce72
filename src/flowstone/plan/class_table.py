"""The pieces of all ranks of a job, by classes of tensors: a class has the same boxes on every rank.

Each class is examined once, and decisions about its tensors are stored in columns: how many of them each rank
writes. 8,192 ranks with 4,500 pieces each have a dozen classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups, tensor_classes
from flowstone.plan.replicas import ReplicaSets
from flowstone.table.pieces import Pieces

_CLASSES_REMEMBERED = 256  # per layout group: with so few, most of its ranks write the same pieces, and share one array


class TensorClass(msgspec.Struct, frozen=True, eq=False):
    """The boxes of a class of tensors, on all ranks; the first tensor stands for all.

    tensor  the first one
    size    number of tensors
    row     the row of the table that says which of them a rank writes
    box     padded
    begun   whether the rank has begun to write; wrote: whether it writes these tensors; None: no rank has begun
    """

    tensor: int
    size: int
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    box: NDArray[np.int64]
    begun: NDArray[np.bool_] | None
    wrote: NDArray[np.bool_] | None


class ClassTable:
    """The pieces of all ranks, by classes of tensors; and the part of each class that each rank writes.

    A column is a class on a rank: one position for each of its tensors, in the order of the tensors. The rank writes
    those from `start` to `stop`.
    """

    def __init__(self, layouts: Sequence[Pieces], kept: Mapping[int, NDArray[np.int64]]) -> None:
        self.tensors = Tensors.of(layouts)
        self._width = int(self.tensors.ndim.max(initial=0))
        self._whole = self.tensors.whole(self._width)
        self._layout_groups = layout_groups(layouts, self.tensors, self._width)
        self._written = [_written(layout_group, kept) for layout_group in self._layout_groups]
        self._number = number = tensor_classes(
            self._layout_groups, self.tensors, [_numbered(of) for of in self._written]
        )
        self.count = int(number.max(initial=-1)) + 1
        self._is_kept = np.zeros(len(layouts), np.bool_)
        self._is_kept[list(kept)] = True
        members = np.argsort(number, kind="stable")
        self._sizes = np.bincount(number, minlength=self.count)
        begins = np.cumsum(self._sizes) - self._sizes
        self._first = members[begins]
        self._ordinal = ordinal = np.empty(len(members), np.int64)
        ordinal[members] = np.arange(len(members)) - np.repeat(begins, self._sizes)
        self._columns = [_ClassColumns.of(layout_group, number, ordinal) for layout_group in self._layout_groups]
        counts = [
            len(layout_group.ranks) * len(of.kind) for layout_group, of in zip(
                self._layout_groups, self._columns, strict=True
            )
        ]
        self._base = np.cumsum([0, *counts])
        self._by_class: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for at, columns in enumerate(self._columns):
            for column, of in enumerate(columns.number.tolist()):
                self._by_class[of].append((at, column))
        self.start = np.zeros(int(self._base[-1]), np.int32)
        self.stop = np.zeros(int(self._base[-1]), np.int32)
        self._set = np.full(int(self._base[-1]), -1, np.int32)  # for each row, the set of ranks that hold the same
        self._sets: dict[bytes, int] = {}

    def column(self, number: int) -> TensorClass:
        """The boxes of a class on all ranks."""
        ranks, rows, boxes, wrote = [], [], [], []
        tensor = int(self._first[number])
        for at, column in self._by_class[number]:
            layout_group, columns, written = self._layout_groups[at], self._columns[at], self._written[at]
            kind = int(columns.kind[column])
            ranks.append(layout_group.ranks)
            rows.append(self._base[at] + np.arange(len(layout_group.ranks)) * len(columns.kind) + column)
            whole = np.broadcast_to(self._whole[tensor], (len(layout_group.ranks), 2 * self._width))
            boxes.append(whole if kind == WHOLE else layout_group.boxes[:, kind][layout_group.variant])
            none = np.zeros(len(layout_group.ranks), np.bool_)
            wrote.append(none if written is None else written[:, columns.first[column]])
        rank = np.concatenate(ranks)
        begun = self._is_kept[rank]
        some = bool(begun.any())
        return TensorClass(
            tensor, int(self._sizes[number]), rank, np.concatenate(rows), np.concatenate(boxes),
            begun if some else None, np.concatenate(wrote) if some else None,
        )

    def some_of(self, shares: NDArray[np.float64]) -> frozenset[str]:
        """Names of that share of the tensors of each class, rounded up.

        Leaves out a tensor if another one has the name of one of its blocks: both would make the same segment entry.
        """
        first = np.ceil(self._sizes * shares)
        chosen = self._ordinal < first[self._number]
        names = self.tensors.names
        like_blocks = {name.rpartition("[")[0] for name in names if name.endswith("]")}
        return frozenset(names[at] for at in np.flatnonzero(chosen).tolist()) - like_blocks

    def note_replicas(self, one: TensorClass, group: NDArray[np.int64]) -> None:
        """Note which ranks hold the same box. `group`: for each row of the class."""
        count = np.bincount(group)
        if one.tensor in self.tensors.buffers or int(count.max(initial=0)) < 2:
            return
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(count) - count
        for at in np.flatnonzero(count > 1).tolist():
            rows = order[starts[at] : starts[at] + count[at]]
            self._set[one.row[rows]] = self._sets.setdefault(np.sort(one.rank[rows]).tobytes(), len(self._sets))

    def replicas(self, ranks: int) -> ReplicaSets:
        """The noted sets of all classes."""
        number: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        sets: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        for at, (layout_group, columns) in enumerate(zip(self._layout_groups, self._columns, strict=True)):
            noted = self._set[self._base[at] : self._base[at + 1]].reshape(len(layout_group.ranks), len(columns.kind))
            known: dict[bytes, NDArray[np.int32]] = {}
            for row, rank in enumerate(layout_group.ranks.tolist()):
                own, local = np.unique(noted[row], return_inverse=True)
                alone = int(np.searchsorted(own, 0))  # 1 if there is a -1
                pattern = (local.reshape(-1) - alone).astype(np.int32)
                sets[rank] = own[alone:]
                number[rank] = known.setdefault(pattern.tobytes(), pattern[columns.column])
        return ReplicaSets(number, sets)

    def compare_replicas(
        self, number: int, group: NDArray[np.int64], digests: Sequence[NDArray[np.uint64] | None],
        found: dict[str, tuple[int, list[int]]],
    ) -> None:
        """Add to `found` the tensors of a class that differ between ranks: the first rank, and the ranks that differ.

        group    for each row of the class
        digests  for each rank that has any, of each piece; 0 if it is unknown
        """
        # For each group, the digests that are known so far, each with the first rank that knows it.
        known: dict[int, tuple[NDArray[np.int64], NDArray[np.uint64]]] = {}
        row = 0
        for at, column in self._by_class[number]:
            layout_group, columns = self._layout_groups[at], self._columns[at]
            positions = np.flatnonzero(columns.column == column)
            positions = positions[np.argsort(columns.ordinal[positions])]
            for rank in layout_group.ranks.tolist():
                all_mine, row = digests[rank], row + 1
                if all_mine is None:
                    continue
                mine = all_mine[positions]
                first, theirs = known.setdefault(int(group[row - 1]), (np.full(len(mine), rank), mine.copy()))
                is_new = theirs == 0
                first[is_new], theirs[is_new] = rank, mine[is_new]
                for wrong in np.flatnonzero((theirs != mine) & (mine != 0)).tolist():
                    name = self.tensors.names[int(layout_group.tensor[positions[wrong]])]
                    found.setdefault(name, (int(first[wrong]), []))[1].append(rank)

    def writes(self, ranks: int) -> tuple[NDArray[np.int64], ...]:
        """For each rank, the positions that it writes."""
        found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * ranks
        for at, (layout_group, columns) in enumerate(zip(self._layout_groups, self._columns, strict=True)):
            shape = (len(layout_group.ranks), len(columns.kind))
            part = slice(self._base[at], self._base[at + 1])
            start, stop = self.start[part].reshape(shape), self.stop[part].reshape(shape)
            known: dict[bytes, NDArray[np.int64]] = {}
            for row, rank in enumerate(layout_group.ranks.tolist()):
                key = start[row].tobytes() + stop[row].tobytes()
                if key not in known:
                    if shape[1] > _CLASSES_REMEMBERED:
                        known.clear()
                    begin, end = start[row][columns.column], stop[row][columns.column]
                    known[key] = np.flatnonzero((columns.ordinal >= begin) & (columns.ordinal < end))
                found[rank] = known[key]
        return tuple(found)


class _ClassColumns(msgspec.Struct, frozen=True, eq=False):
    """For a layout group: each position's column and place in it; each column's class, kind and first position.
    """

    column: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    number: NDArray[np.int64]
    kind: NDArray[np.int64]
    first: NDArray[np.int64]

    @classmethod
    def of(cls, layout_group: LayoutGroup, number: NDArray[np.int64], ordinal: NDArray[np.int64]) -> _ClassColumns:
        occurrence = layout_group.occurrences()
        key = number[layout_group.tensor] * (int(occurrence.max(initial=0)) + 1) + occurrence
        _, first, column = np.unique(key, return_index=True, return_inverse=True)
        return cls(
            column.reshape(-1), ordinal[layout_group.tensor], number[
                layout_group.tensor[first]
            ], layout_group.kind[first], first
        )


def _written(layout_group: LayoutGroup, kept: Mapping[int, NDArray[np.int64]]) -> NDArray[np.bool_] | None:
    """Which positions each rank of a layout group has begun to write; None if no rank has begun."""
    begun = [(row, kept[rank]) for row, rank in enumerate(layout_group.ranks.tolist()) if rank in kept]
    if not begun:
        return None
    written = np.zeros((len(layout_group.ranks), len(layout_group.kind)), np.bool_)
    for row, positions in begun:
        written[row, positions] = True
    return written


def _numbered(written: NDArray[np.bool_] | None) -> NDArray[np.int64] | None:
    """A number for each position: equal if the same ranks have begun to write both."""
    if written is None or not written.size:
        return None
    ranks = np.ascontiguousarray(np.packbits(written, axis=0).T)
    columns = ranks.view(np.dtype((np.void, ranks.shape[1]))).reshape(-1)
    return np.unique(columns, return_inverse=True)[1].reshape(-1)
