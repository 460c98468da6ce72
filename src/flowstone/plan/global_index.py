"""The global index: all pieces that the ranks of a job write, as the pieces of one index, grouped by tensor.

Column by column, and never a record for a piece: there may be tens of millions. They share the few distinct boxes of
each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flowstone.format.index import Frame, frame_of
from flowstone.plan.layout_groups import WHOLE, LayoutGroup, Tensors, layout_groups
from flowstone.table.box import padding_mask
from flowstone.table.chunks import Chunks
from flowstone.table.pieces import Alias, Pieces

_SHORT_MAX = np.iinfo(np.uint16).max


def global_index(
    layouts: Sequence[Pieces], writes: Sequence[NDArray[np.int64]], aliases: Sequence[Alias],
    segment: NDArray[np.uint32], *, is_delta: bool = False, is_coded: bool = False,
    has_bases: bool = False,
) -> tuple[Frame, NDArray[np.int64], NDArray[np.int64]]:
    """The index of the pieces that several ranks write: its frame, and the order of pieces and of chunks in it.

    layouts  the layout of each rank
    writes   for each rank, positions of the pieces that it writes, ascending
    segment  for each of these pieces, rank after rank
    """
    tensors = Tensors.of(layouts)
    width = int(tensors.ndim.max(initial=0))
    found = layout_groups(layouts, tensors, width)
    tensor, box = _written(found, writes, tensors)
    order = by_tensor(tensor, len(tensors.names))
    counts = np.bincount(tensor, minlength=len(tensors.names))
    del tensor
    pieces = _pieces(tensors, found, np.repeat(np.arange(len(counts)), counts), box[order])
    del box
    chunks = Chunks.to_come(segment[order], pieces.lengths())
    row = {name: at for at, name in enumerate(tensors.names)}
    tied = [(alias.name, row[alias.target]) for alias in aliases]
    frame = frame_of(pieces, tied, chunks, is_delta=is_delta, is_coded=is_coded, has_bases=has_bases)
    return frame, order, chunks_in_order(chunks, order)


def _pieces(
    tensors: Tensors, found: Sequence[LayoutGroup], rows: NDArray[np.int64], box: NDArray[np.int32]
) -> Pieces:
    """The pieces with tensors `rows` and boxes `box`, which are numbered as in `_written`."""
    width = int(tensors.ndim.max(initial=0))
    boxes = np.concatenate([tensors.whole(width), *(_all_boxes(group) for group in found)])
    ndim = np.concatenate([tensors.ndim, *(np.tile(group.ndim, len(group.boxes)) for group in found)])
    used = np.zeros(len(boxes), np.bool_)  # some boxes are of pieces that other ranks write
    used[box] = True
    if not used[len(tensors.names) :].any():
        return Pieces(tensors, rows=rows)
    numbers = boxes[used][padding_mask(ndim[used], width)]
    return Pieces(tensors, np.arange(len(box)), numbers, (np.cumsum(used) - 1)[box], rows)


def by_tensor(tensor: NDArray[np.integer], tensors: int) -> NDArray[np.int64]:
    """Order of the pieces grouped by tensor, stable within a tensor. Short integers sort in linear time."""
    return np.argsort(tensor.astype(np.uint16) if tensors <= _SHORT_MAX else tensor, kind="stable")


def chunks_in_order(chunks: Chunks, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each chunk its number before the pieces were ordered. `order`: of the pieces."""
    if chunks.one_each:
        return order
    counts = chunks.counts
    before = np.empty(len(order), np.int64)
    before[order] = counts
    before = np.cumsum(before) - before
    return np.arange(int(chunks.first[-1])) + np.repeat(before[order] - chunks.first[:-1], counts)


def _written(
    found: Sequence[LayoutGroup], writes: Sequence[NDArray[np.int64]], tensors: Tensors
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each written piece, rank after rank: its tensor, and the number of its box.

    Boxes are numbered: first the whole of each tensor, then those of each layout group, variant after variant.
    """
    starts = np.cumsum([0, *map(len, writes)])
    tensor, box = np.empty(int(starts[-1]), np.int32), np.empty(int(starts[-1]), np.int32)
    counts = [len(group.boxes) * len(group.ndim) for group in found]
    for group, base in zip(found, accumulate(counts, initial=len(tensors.names)), strict=False):
        is_whole = group.kind == WHOLE
        for at, rank in enumerate(group.ranks.tolist()):
            here, positions = slice(starts[rank], starts[rank + 1]), writes[rank]
            tensor[here] = group.tensor[positions]
            numbers = np.where(is_whole, group.tensor, base + int(group.variant[at]) * len(group.ndim) + group.kind)
            box[here] = numbers[positions]
    return tensor, box


def _all_boxes(group: LayoutGroup) -> NDArray[np.int64]:
    """The boxes of each variant of a layout group, concatenated."""
    return group.boxes.reshape(len(group.boxes) * len(group.ndim), group.boxes.shape[2])
