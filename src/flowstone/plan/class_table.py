"""What all ranks of a job hold, by classes of tensors: those that have the same boxes on every rank.

A class is looked at once, whatever is decided of its tensors, and what is decided is written down in columns: how many
of them each rank writes. 8,192 ranks with 4,500 pieces each are a dozen classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups, tensor_classes
from flowstone.plan.replicas import ReplicaSets
from flowstone.table.pieces import Pieces

_CLASSES_REMEMBERED = 256  # of a layout group: with so few, most of its ranks write the same, and share one array


class TensorClass(msgspec.Struct, frozen=True, eq=False):
    """The boxes of a class of tensors, on all ranks: those of the first tensor stand for all.

    tensor  that first one
    size    how many tensors there are
    row     where the table says which of them a rank writes
    box     padded
    begun   whether the rank has begun to write; wrote: whether it has these; None: nobody has begun
    """

    tensor: int
    size: int
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    box: NDArray[np.int64]
    begun: NDArray[np.bool_] | None
    wrote: NDArray[np.bool_] | None


class ClassTable:
    """What all ranks hold, by classes of tensors; and what they write of each, filled in as it is decided.

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
        self._set = np.full(int(self._base[-1]), -1, np.int32)  # of ranks that hold the same, for each row
        self._sets: dict[bytes, int] = {}

    def column(self, number: int) -> TensorClass:
        """All boxes of a class."""
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
        """The names of so large a share of the tensors of each class, rounded up.

        None that another one is called like a block of: they would make one entry of a segment.
        """
        first = np.ceil(self._sizes * shares)
        chosen = self._ordinal < first[self._number]
        names = self.tensors.names
        like_blocks = {name.rpartition("[")[0] for name in names if name.endswith("]")}
        return frozenset(names[at] for at in np.flatnonzero(chosen).tolist()) - like_blocks

    def note_replicas(self, one: TensorClass, group: NDArray[np.int64]) -> None:
        """Remember which ranks hold the same box. `group`: of each row of the class."""
        count = np.bincount(group)
        if one.tensor in self.tensors.buffers or int(count.max(initial=0)) < 2:
            return
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(count) - count
        for at in np.flatnonzero(count > 1).tolist():
            rows = order[starts[at] : starts[at] + count[at]]
            self._set[one.row[rows]] = self._sets.setdefault(np.sort(one.rank[rows]).tobytes(), len(self._sets))

    def replicas(self, ranks: int) -> ReplicaSets:
        """What was noted of all classes."""
        number: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        sets: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        for at, (layout_group, columns) in enumerate(zip(self._layout_groups, self._columns, strict=True)):
            noted = self._set[self._base[at] : self._base[at + 1]].reshape(len(layout_group.ranks), len(columns.kind))
            known: dict[bytes, NDArray[np.int32]] = {}
            for row, rank in enumerate(layout_group.ranks.tolist()):
                own, local = np.unique(noted[row], return_inverse=True)
                alone = int(np.searchsorted(own, 0))  # 1 where there is a -1
                pattern = (local.reshape(-1) - alone).astype(np.int32)
                sets[rank] = own[alone:]
                number[rank] = known.setdefault(pattern.tobytes(), pattern[columns.column])
        return ReplicaSets(number, sets)

    def compare_replicas(
        self, number: int, group: NDArray[np.int64], samples: Sequence[NDArray[np.uint16] | None],
        found: dict[str, tuple[int, list[int]]],
    ) -> None:
        """Enter into `found` the tensors of a class that are not the same everywhere: the first rank, and the others.

        group  of each row of the class
        """
        known: dict[int, tuple[int, NDArray[np.uint16]]] = {}  # of each group, the first rank's
        row = 0
        for at, column in self._by_class[number]:
            layout_group, columns = self._layout_groups[at], self._columns[at]
            positions = np.flatnonzero(columns.column == column)
            positions = positions[np.argsort(columns.ordinal[positions])]
            for rank in layout_group.ranks.tolist():
                mine, row = samples[rank], row + 1
                if mine is None:
                    continue
                first, theirs = known.setdefault(int(group[row - 1]), (rank, mine[positions]))
                for wrong in np.flatnonzero(theirs != mine[positions]).tolist():
                    name = self.tensors.names[int(layout_group.tensor[positions[wrong]])]
                    found.setdefault(name, (first, []))[1].append(rank)

    def writes(self, ranks: int) -> tuple[NDArray[np.int64], ...]:
        """The positions that each rank writes."""
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
    """Of a layout group: the column of each position, and where in it; of each column its class, kind, first position.
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
    """Which positions each rank of a layout group has begun to write; None where no rank has begun."""
    begun = [(row, kept[rank]) for row, rank in enumerate(layout_group.ranks.tolist()) if rank in kept]
    if not begun:
        return None
    written = np.zeros((len(layout_group.ranks), len(layout_group.kind)), np.bool_)
    for row, positions in begun:
        written[row, positions] = True
    return written


def _numbered(written: NDArray[np.bool_] | None) -> NDArray[np.int64] | None:
    """A number for each position: equal where the same ranks have begun to write them."""
    if written is None or not written.size:
        return None
    ranks = np.ascontiguousarray(np.packbits(written, axis=0).T)
    columns = ranks.view(np.dtype((np.void, ranks.shape[1]))).reshape(-1)
    return np.unique(columns, return_inverse=True)[1].reshape(-1)
