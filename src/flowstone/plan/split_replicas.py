"""Split replicas: those too long for one writer become blocks of rows, written by several ranks.

If thousands of ranks hold few large tensors, one replica is more than a rank's share of the job. All ranks that
hold it split it alike, and its blocks are assigned to writers as separate pieces.
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
    """Which pieces are written in blocks of rows: long pieces of some tensors.

    names        of these tensors
    above_bytes  pieces up to this length stay whole
    block_bytes  length of a block, rounded to rows
    """

    names: frozenset[str]
    above_bytes: int
    block_bytes: int


class Blocks(msgspec.Struct, frozen=True, eq=False):
    """How the pieces of a rank are split, in columns: one entry per piece or block, in the order of the pieces.

    source         position of the piece
    dim            the split dimension: the first with more than one entry; -1 if the piece stays whole
    start, length  of the block in that dimension, from the begin of the piece
    """

    source: NDArray[np.int64]
    dim: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def split_replicas(layouts: Sequence[Pieces], split: ReplicaSplit) -> tuple[list[Pieces], list[Blocks]]:
    """The layout of each rank after splitting, and how it was made. Ranks with equal layouts share columns."""
    tensors = Tensors.of(layouts)
    width = int(tensors.ndim.max(initial=0))
    splitter = _Splitter(split, tensors, width)
    found: dict[int, tuple[Pieces, Blocks]] = {}
    for group in layout_groups(layouts, tensors, width):
        for rows in splitter.alike(group):
            ranks = group.ranks[rows].tolist()
            columns = splitter.blocks(group, int(rows[0]))
            for rank, one in zip(ranks, splitter.split(group, rows, columns, layouts[ranks[0]].tensors), strict=True):
                found[rank] = one, columns
    return [found[rank][0] for rank in range(len(layouts))], [found[rank][1] for rank in range(len(layouts))]


class _Splitter:
    """Splits the replicas of a job.

    shape  for each tensor a number: equal for equal shapes
    """

    def __init__(self, split: ReplicaSplit, tensors: Tensors, width: int) -> None:
        self._split, self._width = split, width
        self._ndim, self._item_bytes = tensors.ndim, tensors.item_bytes
        self._is_split = np.array([name in split.names for name in tensors.names], np.bool_)
        self._whole = tensors.whole(width)
        shapes = np.column_stack([self._ndim, self._whole])
        self._shape = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
        self._columns: dict[tuple[int, bytes], TensorColumns] = {}

    def alike(self, group: LayoutGroup) -> Iterator[NDArray[np.int64]]:
        """Ranks of a layout group, as rows, grouped: in one group, boxes of tensors that may be split have equal sides.
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
        padded = np.column_stack([sides, np.zeros(len(sides), np.int64)])  # gives a scalar a dimension to look at
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
        """The pieces of these ranks after splitting: each distinct box once, as in an unsplit layout."""
        width, tensor, old = self._width, group.tensor[blocks.source], group.kind[blocks.source]
        is_split = blocks.dim >= 0
        parts = np.flatnonzero(is_split | (old != WHOLE))
        shape = np.where(old == WHOLE, self._shape[tensor], -1)
        block = np.where(is_split, [blocks.dim, blocks.start, blocks.length], -1)
        keys = np.column_stack([old, shape, *block])[parts]
        _, first, kinds = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        at = parts[first]  # one part of each kind
        variants, variant = np.unique(group.variant[rows], return_inverse=True)
        # Index WHOLE (-1) picks the last box, which exists for that purpose.
        whole_boxes = np.concatenate([group.boxes[variants], np.zeros((len(variants), 1, 2 * width), np.int64)], axis=1)
        boxes = np.where((old[at] == WHOLE)[:, None], self._whole[tensor[at]], whole_boxes[:, old[at]])
        of_blocks = np.flatnonzero(is_split[at])
        dim = blocks.dim[at][of_blocks]
        boxes[:, of_blocks, dim] += blocks.start[at][of_blocks]
        boxes[:, of_blocks, width + dim] = blocks.length[at][of_blocks]
        kinds = kinds.reshape(-1)
        flat = list(np.ascontiguousarray(boxes[:, padding_mask(self._ndim[tensor[at]], width)]))
        new = self._take(tensors, blocks.source)
        return (Pieces(new, parts, flat[at], kinds) for at in variant.tolist())

    def _take(self, tensors: TensorColumns, source: NDArray[np.int64]) -> TensorColumns:
        """The split columns, shared by all ranks that shared `tensors` and are split alike."""
        key = id(tensors), source.tobytes()
        if key not in self._columns:
            self._columns[key] = tensors.take(source.tolist())
        return self._columns[key]
