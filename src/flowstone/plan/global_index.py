"""The global index: all pieces that the ranks of a job write, as the pieces of one index, grouped by tensor.

The index is made with operations on whole arrays, without an object for each piece, because there may be tens of
millions of pieces. Pieces share the few distinct boxes of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flowstone.format.index import IndexTemplate, index_template
from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups
from flowstone.table.box import padding_mask
from flowstone.table.chunks import Chunks
from flowstone.table.pieces import Alias, Pieces

_SHORT_MAX = np.iinfo(np.uint16).max


def global_index(
    layouts: Sequence[Pieces], writes: Sequence[NDArray[np.int64]], aliases: Sequence[Alias],
    segment: NDArray[np.uint32], *, is_delta: bool = False, is_coded: bool = False,
    has_bases: bool = False,
) -> tuple[IndexTemplate, NDArray[np.int64], NDArray[np.int64]]:
    """Make the index of the pieces that several ranks write. Returns a template of the index (without offsets and
    digests), and the order of pieces and of chunks in it.

    layouts  for each rank, the pieces that it holds
    writes   for each rank, positions of the pieces that it writes, ascending
    segment  for each of these pieces, rank after rank, the number of its segment file
    """
    tensors = Tensors.of(layouts)
    width = int(tensors.ndim.max(initial=0))
    groups = layout_groups(layouts, tensors, width)
    tensor, box = _written(groups, writes, tensors)
    order = by_tensor(tensor, len(tensors.names))
    counts = np.bincount(tensor, minlength=len(tensors.names))
    del tensor
    pieces = _pieces(tensors, groups, np.repeat(np.arange(len(counts)), counts), box[order])
    del box
    chunks = Chunks.unwritten(segment[order], pieces.lengths())
    row = {name: i for i, name in enumerate(tensors.names)}
    tied = [(alias.name, row[alias.target]) for alias in aliases]
    frame = index_template(pieces, tied, chunks, is_delta=is_delta, is_coded=is_coded, has_bases=has_bases)
    return frame, order, chunks_in_order(chunks, order)


def _pieces(
    tensors: Tensors, groups: Sequence[LayoutGroup], rows: NDArray[np.int64], box: NDArray[np.int32]
) -> Pieces:
    """The pieces with tensors `rows` and boxes `box`. Boxes are numbered as in `_written`."""
    width = int(tensors.ndim.max(initial=0))
    boxes = np.concatenate([tensors.whole(width), *(_all_boxes(group) for group in groups)])
    ndim = np.concatenate([tensors.ndim, *(np.tile(group.ndim, len(group.boxes)) for group in groups)])
    used = np.zeros(len(boxes), np.bool_)  # boxes that no written piece has are left out
    used[box] = True
    if not used[len(tensors.names) :].any():
        return Pieces(tensors, rows=rows)
    numbers = boxes[used][padding_mask(ndim[used], width)]
    return Pieces(tensors, np.arange(len(box)), numbers, (np.cumsum(used) - 1)[box], rows)


def by_tensor(tensor: NDArray[np.integer], tensors: int) -> NDArray[np.int64]:
    """The order that groups pieces by tensor; pieces of one tensor keep their order. `tensor`: number of each piece's
    tensor, sorted as 16-bit integers if possible, because numpy sorts these in linear time.
    """
    return np.argsort(tensor.astype(np.uint16) if tensors <= _SHORT_MAX else tensor, kind="stable")


def chunks_in_order(chunks: Chunks, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each chunk in the new order, its number in the old order. `order`: the new order of the pieces."""
    if chunks.has_one_chunk_each:
        return order
    counts = chunks.counts
    before = np.empty(len(order), np.int64)
    before[order] = counts
    before = np.cumsum(before) - before
    return np.arange(int(chunks.first[-1])) + np.repeat(before[order] - chunks.first[:-1], counts)


def _written(
    groups: Sequence[LayoutGroup], writes: Sequence[NDArray[np.int64]], tensors: Tensors
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each written piece, rank after rank: its tensor, and the number of its box.

    Boxes are numbered in this order: one for each full tensor, then the boxes of each layout group, variant after
    variant.
    """
    starts = np.cumsum([0, *map(len, writes)])
    tensor, box = np.empty(int(starts[-1]), np.int32), np.empty(int(starts[-1]), np.int32)
    counts = [len(group.boxes) * len(group.ndim) for group in groups]
    for group, base in zip(groups, accumulate(counts, initial=len(tensors.names)), strict=False):
        is_whole = group.kind == WHOLE
        for i, rank in enumerate(group.ranks.tolist()):
            here, positions = slice(starts[rank], starts[rank + 1]), writes[rank]
            tensor[here] = group.tensor[positions]
            numbers = np.where(is_whole, group.tensor, base + int(group.variant[i]) * len(group.ndim) + group.kind)
            box[here] = numbers[positions]
    return tensor, box


def _all_boxes(group: LayoutGroup) -> NDArray[np.int64]:
    """The boxes of each variant of a layout group, concatenated."""
    return group.boxes.reshape(len(group.boxes) * len(group.ndim), group.boxes.shape[2])
