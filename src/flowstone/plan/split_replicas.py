"""Split replicas: a replica that is too long for one rank is divided into blocks of rows, which several ranks write.

If thousands of ranks hold few large tensors, one replica can be longer than the bytes that each rank should write. All
ranks that hold the replica divide it in the same way, and its blocks are assigned to writers as separate pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups
from flowstone.table.box import padding_mask
from flowstone.table.chunks import distinct
from flowstone.table.pieces import Pieces, TensorColumns


class ReplicaSplit(msgspec.Struct, frozen=True):
    """Which pieces are written in blocks of rows: the long pieces of some tensors.

    names        names of these tensors
    above_bytes  pieces up to this length are not split
    block_bytes  length of a block, rounded to rows
    """

    names: frozenset[str]
    above_bytes: int
    block_bytes: int


class Blocks(msgspec.Struct, frozen=True, eq=False):
    """How the pieces of a rank are split: arrays with one entry for each block, or unsplit piece, in the order of the
    pieces.

    source         position of the piece before splitting
    dim            the dimension along which the piece is split: the first of more than one element; -1: it is not split
    start, length  which range of that dimension the block has, relative to the piece
    """

    source: NDArray[np.int64]
    dim: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def split_replicas(layouts: Sequence[Pieces], split: ReplicaSplit) -> tuple[list[Pieces], list[Blocks]]:
    """For each rank, its pieces after splitting, and how they were split. Ranks with equal pieces share the arrays."""
    tensors = Tensors.of(layouts)
    width = int(tensors.ndim.max(initial=0))
    splitter = _Splitter(split, tensors, width)
    by_rank: dict[int, tuple[Pieces, Blocks]] = {}
    for group in layout_groups(layouts, tensors, width):
        for rows in splitter.alike(group):
            ranks = group.ranks[rows].tolist()
            columns = splitter.blocks(group, int(rows[0]))
            split_pieces = splitter.split(group, rows, columns, layouts[ranks[0]].tensors)
            for rank, pieces in zip(ranks, split_pieces, strict=True):
                by_rank[rank] = pieces, columns
    return [by_rank[rank][0] for rank in range(len(layouts))], [by_rank[rank][1] for rank in range(len(layouts))]


class _Splitter:
    """Splits the replicas of a job."""

    def __init__(self, split: ReplicaSplit, tensors: Tensors, width: int) -> None:
        self._split, self._width = split, width
        self._ndim, self._item_bytes = tensors.ndim, tensors.item_bytes
        self._is_split = np.array([name in split.names for name in tensors.names], np.bool_)
        self._whole = tensors.whole(width)
        shapes = np.column_stack([self._ndim, self._whole])
        self._shape = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)  # a number for each distinct shape
        self._columns: dict[tuple[int, bytes], TensorColumns] = {}

    def alike(self, group: LayoutGroup) -> Iterator[NDArray[np.int64]]:
        """Divide the ranks of a layout group into parts, so that within a part each tensor that is split has boxes of
        equal shape. Yields the ranks of each part, as row numbers of the group.
        """
        kinds = distinct(group.kind[self._is_split[group.tensor]])
        sides = group.boxes[:, kinds[kinds != WHOLE], self._width :].reshape(len(group.boxes), -1)
        alike = np.unique(sides, axis=0, return_inverse=True)[1].reshape(-1)[group.variant]
        return (np.flatnonzero(alike == number) for number in range(int(alike.max()) + 1))

    def blocks(self, group: LayoutGroup, row: int) -> Blocks:
        """How the pieces of one rank of the group are split."""
        sides = self._whole[group.tensor, self._width :]
        part = group.kind != WHOLE
        sides[part] = group.boxes[group.variant[row], group.kind[part], self._width :]
        ndim = self._ndim[group.tensor]
        elements = np.where(np.arange(self._width) < ndim[:, None], sides, 1).prod(axis=1)
        bytes_ = elements * self._item_bytes[group.tensor]
        padded = np.column_stack([sides, np.zeros(len(sides), np.int64)])  # one more dimension, in case all are scalars
        dim = (padded > 1).argmax(axis=1)
        rows = np.maximum(padded[np.arange(len(sides)), dim], 1)
        is_split = self._is_split[group.tensor] & (bytes_ > self._split.above_bytes)
        count = np.where(is_split, np.minimum(rows, -(-bytes_ // self._split.block_bytes)), 1)
        source = np.repeat(np.arange(len(count)), count)
        block = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        start = rows[source] * block // count[source]
        stop = rows[source] * (block + 1) // count[source]
        return Blocks(source, np.where(count[source] > 1, dim[source], -1), start, stop - start)

    def split(
        self, group: LayoutGroup, rows: NDArray[np.int64], blocks: Blocks, tensors: TensorColumns
    ) -> Iterator[Pieces]:
        """Yield the pieces of these ranks after splitting. Each distinct box is listed once."""
        width, tensor, old = self._width, group.tensor[blocks.source], group.kind[blocks.source]
        is_split = blocks.dim >= 0
        parts = np.flatnonzero(is_split | (old != WHOLE))
        shape = np.where(old == WHOLE, self._shape[tensor], -1)
        block = np.where(is_split, [blocks.dim, blocks.start, blocks.length], -1)
        keys = np.column_stack([old, shape, *block])[parts]
        _, first, kinds = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        of_kind = parts[first]  # for each distinct box, the first piece that has it
        variants, variant = np.unique(group.variant[rows], return_inverse=True)
        # The index WHOLE (-1) picks the last box, which is added for full tensors.
        whole_boxes = np.concatenate([group.boxes[variants], np.zeros((len(variants), 1, 2 * width), np.int64)], axis=1)
        boxes = np.where((old[of_kind] == WHOLE)[:, None], self._whole[tensor[of_kind]], whole_boxes[:, old[of_kind]])
        of_blocks = np.flatnonzero(is_split[of_kind])
        dim = blocks.dim[of_kind][of_blocks]
        boxes[:, of_blocks, dim] += blocks.start[of_kind][of_blocks]
        boxes[:, of_blocks, width + dim] = blocks.length[of_kind][of_blocks]
        kinds = kinds.reshape(-1)
        flat = list(np.ascontiguousarray(boxes[:, padding_mask(self._ndim[tensor[of_kind]], width)]))
        new = self._take(tensors, blocks.source)
        return (Pieces(new, parts, flat[i], kinds) for i in variant.tolist())

    def _take(self, tensors: TensorColumns, source: NDArray[np.int64]) -> TensorColumns:
        """The tensors of the pieces after splitting: entry i is that of the unsplit piece `source[i]`. Ranks with the
        same `tensors` object, whose pieces are split in the same way (equal `source`), share the result.
        """
        key = id(tensors), source.tobytes()
        if key not in self._columns:
            self._columns[key] = tensors.take(source.tolist())
        return self._columns[key]
