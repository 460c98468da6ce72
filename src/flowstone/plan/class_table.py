"""The pieces of all ranks of a job, by classes of tensors. Two tensors are in one class if they have the same dtype and
shape and, on each rank, the same box (region) as each other. That box may differ from rank to rank.

Each class is examined once. For each rank and class, the table stores which of the tensors the rank writes. A job of
8,192 ranks with 4,500 pieces each has a dozen classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups, tensor_classes
from flowstone.plan.replicas import ReplicaSets
from flowstone.table.pieces import Pieces

# In layout groups with fewer classes than this, most ranks write the same pieces, and share one array.
_CLASSES_REMEMBERED = 256


class TensorClass(msgspec.Struct, frozen=True, eq=False):
    """The boxes that ranks hold of the tensors of one class. The boxes of the first tensor represent those of all.

    tensor  row of the first tensor
    size    number of tensors in the class
    row     for each rank, the table's row that says which of the tensors it writes
    box     for each rank its box: offsets, then lengths, padded with zeros
    has_begun  for each rank, whether it has begun to write; None: no rank has begun
    is_written  for each rank, whether it has begun to write these tensors; None: no rank has begun
    """

    tensor: int
    size: int
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    box: NDArray[np.int64]
    has_begun: NDArray[np.bool_] | None
    is_written: NDArray[np.bool_] | None


class ClassTable:
    """Which tensors each rank writes. Tensors with the same dtype, the same shape and, on each rank, the same box
    (region) form a class. The tensors of a class are divided among the ranks.

    The table has one row for each class and rank. The rank writes the tensors with the numbers [start, stop), in the
    order of the class.

    begun  rank -> positions of the pieces that this rank has already begun to write
    """

    def __init__(self, layouts: Sequence[Pieces], begun: Mapping[int, NDArray[np.int64]]) -> None:
        self.tensors = Tensors.of(layouts)
        self._width = int(self.tensors.ndim.max(initial=0))
        self._whole = self.tensors.whole(self._width)
        self._layout_groups = layout_groups(layouts, self.tensors, self._width)
        self._written = [_written(layout_group, begun) for layout_group in self._layout_groups]
        self._number = number = tensor_classes(
            self._layout_groups, self.tensors, [_position_numbers(written) for written in self._written]
        )
        self.count = int(number.max(initial=-1)) + 1
        self._has_begun = np.zeros(len(layouts), np.bool_)
        self._has_begun[list(begun)] = True
        members = np.argsort(number, kind="stable")
        self._sizes = np.bincount(number, minlength=self.count)
        begins = np.cumsum(self._sizes) - self._sizes
        self._first = members[begins]
        self._ordinal = ordinal = np.empty(len(members), np.int64)
        ordinal[members] = np.arange(len(members)) - np.repeat(begins, self._sizes)
        self._columns = [_ClassColumns.of(layout_group, number, ordinal) for layout_group in self._layout_groups]
        counts = [
            len(layout_group.ranks) * len(columns.kind) for layout_group, columns in zip(
                self._layout_groups, self._columns, strict=True
            )
        ]
        self._base = np.cumsum([0, *counts])
        self._by_class: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for group_number, columns in enumerate(self._columns):
            for column, class_number in enumerate(columns.number.tolist()):
                self._by_class[class_number].append((group_number, column))
        self.start = np.zeros(int(self._base[-1]), np.int32)
        self.stop = np.zeros(int(self._base[-1]), np.int32)
        self._set = np.full(int(self._base[-1]), -1, np.int32)  # for each row, the number of its set of replicas
        self._sets: dict[bytes, int] = {}

    def column(self, number: int) -> TensorClass:
        """The boxes that all ranks hold of the tensors of class `number`."""
        ranks, rows, boxes, wrote = [], [], [], []
        tensor = int(self._first[number])
        for group_number, column in self._by_class[number]:
            layout_group, columns = self._layout_groups[group_number], self._columns[group_number]
            written = self._written[group_number]
            kind = int(columns.kind[column])
            ranks.append(layout_group.ranks)
            rows.append(self._base[group_number] + np.arange(len(layout_group.ranks)) * len(columns.kind) + column)
            whole = np.broadcast_to(self._whole[tensor], (len(layout_group.ranks), 2 * self._width))
            boxes.append(whole if kind == WHOLE else layout_group.boxes[:, kind][layout_group.variant])
            none = np.zeros(len(layout_group.ranks), np.bool_)
            wrote.append(none if written is None else written[:, columns.first[column]])
        rank = np.concatenate(ranks)
        begun = self._has_begun[rank]
        any_begun = bool(begun.any())
        return TensorClass(
            tensor, int(self._sizes[number]), rank, np.concatenate(rows), np.concatenate(boxes),
            begun if any_begun else None, np.concatenate(wrote) if any_begun else None,
        )

    def choose_share(self, shares: NDArray[np.float64]) -> frozenset[str]:
        """Choose some tensors of each class, and return their names. `shares`: for each class, which fraction of its
        tensors to choose, from 0 to 1; the number of tensors is rounded up.

        Omits a tensor if a block of it would get the same entry in a segment file as another tensor.
        """
        first = np.ceil(self._sizes * shares)
        chosen = self._ordinal < first[self._number]
        names = self.tensors.names
        like_blocks = {name.rpartition("[")[0] for name in names if name.endswith("]")}
        return frozenset(names[row] for row in np.flatnonzero(chosen).tolist()) - like_blocks

    def record_replicas(self, tensor_class: TensorClass, group: NDArray[np.int64]) -> None:
        """Record which ranks hold the same box. `group`: for each row of the class, the number of its group of equal
        boxes.
        """
        count = np.bincount(group)
        if tensor_class.tensor in self.tensors.buffers or int(count.max(initial=0)) < 2:
            return
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(count) - count
        for i in np.flatnonzero(count > 1).tolist():
            rows = order[starts[i] : starts[i] + count[i]]
            ranks = np.sort(tensor_class.rank[rows]).tobytes()
            self._set[tensor_class.row[rows]] = self._sets.setdefault(ranks, len(self._sets))

    def replicas(self, ranks: int) -> ReplicaSets:
        """The sets of replicas that `record_replicas` recorded, for all classes and ranks."""
        number: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        sets: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        for group_number, (layout_group, columns) in enumerate(zip(self._layout_groups, self._columns, strict=True)):
            rows = slice(self._base[group_number], self._base[group_number + 1])
            noted = self._set[rows].reshape(len(layout_group.ranks), len(columns.kind))
            patterns: dict[bytes, NDArray[np.int32]] = {}
            for row, rank in enumerate(layout_group.ranks.tolist()):
                own, local = np.unique(noted[row], return_inverse=True)
                alone = int(np.searchsorted(own, 0))  # how many numbers are -1 (not a replica): 0 or 1
                pattern = (local.reshape(-1) - alone).astype(np.int32)
                sets[rank] = own[alone:]
                number[rank] = patterns.setdefault(pattern.tobytes(), pattern[columns.column])
        return ReplicaSets(number, sets)

    def compare_replicas(
        self, number: int, group: NDArray[np.int64], digests: Sequence[NDArray[np.uint64] | None],
        differing: dict[str, tuple[int, list[int]]],
    ) -> None:
        """Add to `differing` the tensors of a class that differ between ranks: name -> the first rank, and the ranks
        that differ.

        group    for each row of the class, the number of its group of equal boxes
        digests  for each rank, the digest of each of its pieces, 0 if unknown; None if all are unknown
        """
        # For each group, the digests known so far, each with the first rank that knows it.
        references: dict[int, tuple[NDArray[np.int64], NDArray[np.uint64]]] = {}
        row = 0
        for group_number, column in self._by_class[number]:
            layout_group, columns = self._layout_groups[group_number], self._columns[group_number]
            positions = np.flatnonzero(columns.column == column)
            positions = positions[np.argsort(columns.ordinal[positions])]
            for rank in layout_group.ranks.tolist():
                all_mine, row = digests[rank], row + 1
                if all_mine is None:
                    continue
                mine = all_mine[positions]
                first, theirs = references.setdefault(int(group[row - 1]), (np.full(len(mine), rank), mine.copy()))
                is_new = theirs == 0
                first[is_new], theirs[is_new] = rank, mine[is_new]
                for offset in np.flatnonzero((theirs != mine) & (mine != 0)).tolist():
                    name = self.tensors.names[int(layout_group.tensor[positions[offset]])]
                    differing.setdefault(name, (int(first[offset]), []))[1].append(rank)

    def writes(self, ranks: int) -> tuple[NDArray[np.int64], ...]:
        """For each rank, the positions of the pieces that it writes."""
        writes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * ranks
        for group_number, (layout_group, columns) in enumerate(zip(self._layout_groups, self._columns, strict=True)):
            shape = (len(layout_group.ranks), len(columns.kind))
            part = slice(self._base[group_number], self._base[group_number + 1])
            start, stop = self.start[part].reshape(shape), self.stop[part].reshape(shape)
            positions_by_key: dict[bytes, NDArray[np.int64]] = {}
            for row, rank in enumerate(layout_group.ranks.tolist()):
                key = start[row].tobytes() + stop[row].tobytes()
                if key not in positions_by_key:
                    if shape[1] > _CLASSES_REMEMBERED:
                        positions_by_key.clear()
                    begin, end = start[row][columns.column], stop[row][columns.column]
                    positions_by_key[key] = np.flatnonzero((columns.ordinal >= begin) & (columns.ordinal < end))
                writes[rank] = positions_by_key[key]
        return tuple(writes)


class _ClassColumns(msgspec.Struct, frozen=True, eq=False):
    """Where the classes of tensors are in the pieces of a layout group. A column: all pieces whose tensors are of one
    class, and that come after equally many pieces of their tensor.

    column   for each piece, the number of its column
    ordinal  for each piece, the number of its tensor in the class
    number   for each column, the number of its class
    kind     for each column, the kind of its boxes (see LayoutGroup)
    first    for each column, the position of its first piece
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


def _written(layout_group: LayoutGroup, begun: Mapping[int, NDArray[np.int64]]) -> NDArray[np.bool_] | None:
    """For each rank of a layout group and each of its pieces, whether the rank has begun to write the piece. None if no
    rank has begun.
    """
    rows = [(row, begun[rank]) for row, rank in enumerate(layout_group.ranks.tolist()) if rank in begun]
    if not rows:
        return None
    written = np.zeros((len(layout_group.ranks), len(layout_group.kind)), np.bool_)
    for row, positions in rows:
        written[row, positions] = True
    return written


def _position_numbers(written: NDArray[np.bool_] | None) -> NDArray[np.int64] | None:
    """A number for each position. Two positions have the same number if the same ranks have begun to write them."""
    if written is None or not written.size:
        return None
    ranks = np.ascontiguousarray(np.packbits(written, axis=0).T)
    columns = ranks.view(np.dtype((np.void, ranks.shape[1]))).reshape(-1)
    return np.unique(columns, return_inverse=True)[1].reshape(-1)
