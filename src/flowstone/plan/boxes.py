"""What a set of boxes covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowstone.errors import CoverageError
from flowstone.pieces import Box


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that together are `box` without `hole`: at most two for each dimension."""
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
    """The first region of `box` that none of `parts` holds; None when they cover it."""
    rest = [box] if box.elements else []
    for part in parts:
        rest = [piece for remaining in rest for piece in subtract(remaining, part)]
        if not rest:
            return None
    return min(rest, key=lambda b: b.offset) if rest else None


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise CoverageError unless `boxes` hold each element of the tensor exactly once."""
    whole = Box.whole(shape)
    for box in boxes:
        if not box.inside(shape):
            raise CoverageError(
                f"cannot save {name!r}: box {box} lies outside the tensor", expected=f"inside shape {tuple(shape)}",
                next="correct the offset or the global shape of this shard",
            )
    for at, box in enumerate(boxes):
        for other in boxes[:at]:
            if box.intersect(other):
                raise CoverageError(
                    f"cannot save {name!r}: boxes {other} and {box} overlap", next="make the shards disjoint"
                )
    hole = uncovered(whole, boxes)
    if hole is not None:
        raise CoverageError(
            f"cannot save {name!r}: no shard holds {hole}", expected=f"shards that fill shape {tuple(shape)}",
            next="hand over the missing shard, or correct the global shape",
        )
