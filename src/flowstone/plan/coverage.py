"""Which elements a set of boxes covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import CoverageError
from flowstone.table.box import Box


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that together are `box` without `hole`: at most two per dimension."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    rest = []
    offset, end = list(box.offset), list(box.end)
    for dim in range(len(offset)):
        for begin, stop in ((offset[dim], common.offset[dim]), (common.end[dim], end[dim])):
            if begin < stop:
                low, high = list(offset), list(end)
                low[dim], high[dim] = begin, stop
                rest.append(Box(tuple(low), tuple(h - a for h, a in zip(high, low, strict=True))))
        offset[dim], end[dim] = common.offset[dim], common.end[dim]
    return rest


def uncovered(box: Box, parts: Iterable[Box]) -> Box | None:
    """The first region of `box` that is in none of `parts`; None if they cover it."""
    rest = [box] if box.elements else []
    for part in parts:
        rest = [piece for remaining in rest for piece in subtract(remaining, part)]
        if not rest:
            return None
    return min(rest, key=lambda b: b.offset) if rest else None


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise CoverageError unless `boxes` cover each element of the tensor exactly once."""
    whole = Box.whole(shape)
    for box in boxes:
        if not box.inside(shape):
            raise CoverageError(
                f"cannot save {name!r}: box {box} lies outside the tensor",
                expected=f"a box inside shape {tuple(shape)}",
                next="correct the offset or the global shape of this shard",
            )
    pair = _overlap(boxes)
    if pair is not None:
        raise CoverageError(
            f"cannot save {name!r}: boxes {pair[0]} and {pair[1]} overlap",
            next="correct the offsets: no two shards may have an element in common",
        )
    hole = uncovered(whole, boxes)
    if hole is not None:
        raise CoverageError(
            f"cannot save {name!r}: no shard holds {hole}", expected=f"shards that fill shape {tuple(shape)}",
            next="pass the missing shard, or correct the global shape",
        )


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """The first overlapping pair of boxes, in the order of `boxes`; None if all are disjoint."""
    ndim = len(boxes[0].offset) if boxes else 0
    begin = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), ndim)
    end = np.array([box.end for box in boxes], np.int64).reshape(len(boxes), ndim)
    for i, box in enumerate(boxes):
        common = np.minimum(end[:i], end[i]) > np.maximum(begin[:i], begin[i])
        overlapping = np.flatnonzero(common.all(axis=1))
        if len(overlapping):
            return boxes[int(overlapping[0])], box
    return None


def tiles(offset: NDArray[np.int64], sides: NDArray[np.int64], shape: Sequence[int]) -> bool:
    """Whether aligned boxes fill `shape`, each element once.

    Boxes are aligned if they form a grid, or if cuts along one dimension divide them into slices, each filled by
    aligned boxes. Returns False for boxes that fill `shape` without being aligned, such as a pinwheel.

    offset, sides  one row per box, one column per dimension, in elements
    """
    some = sides.all(axis=1)
    if not some.all():
        offset, sides = offset[some], sides[some]
    if len(offset) == 0:
        return math.prod(shape) == 0
    if len(offset) == 1:
        return not offset.any() and tuple(sides[0].tolist()) == tuple(shape)
    return _is_grid(offset, sides, shape) or _is_sliced(offset, sides, shape)


def _is_grid(offset: NDArray[np.int64], sides: NDArray[np.int64], shape: Sequence[int]) -> bool:
    """Whether the boxes are the cells of a grid that fills `shape`, each once."""
    cells, cell = 1, np.zeros(len(offset), np.int64)
    for dim, length in enumerate(shape):
        edges, edge = np.unique(offset[:, dim], return_inverse=True)
        cells *= len(edges)
        stops = np.append(edges[1:], length)[edge]
        if edges[0] != 0 or cells > len(offset) or (offset[:, dim] + sides[:, dim] != stops).any():
            return False
        cell = cell * len(edges) + edge
    return cells == len(offset) and bool((np.bincount(cell, minlength=cells) == 1).all())


def _is_sliced(offset: NDArray[np.int64], sides: NDArray[np.int64], shape: Sequence[int]) -> bool:
    """Whether the boxes can be grouped along some dimension into slices that lie side by side and together cover
    `shape`, so that the boxes of each slice tile it.
    """
    for dim in range(len(shape)):
        begin = offset[:, dim]
        order = np.argsort(begin, kind="stable")
        edges, starts = np.unique(begin[order], return_index=True)
        stops = (begin + sides[:, dim])[order]
        ends = stops[starts]
        together = (stops == np.repeat(ends, np.diff([*starts, len(order)]))).all()
        if not together or edges[0] != 0 or ends[-1] != shape[dim] or (edges[1:] != ends[:-1]).any():
            continue
        if len(edges) == 1:
            continue  # all boxes have the full length of this dimension
        inner = (*shape[:dim], *shape[dim + 1 :])
        less_offset, less_sides = np.delete(offset, dim, axis=1), np.delete(sides, dim, axis=1)
        return all(tiles(less_offset[part], less_sides[part], inner) for part in np.split(order, starts[1:]))
    return False
