"""The region of a tensor to read: a Box, or an index as in numpy."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

from flowstone.errors import ArgumentError
from flowstone.stores.arguments import shown
from flowstone.table.box import Box

_Index: TypeAlias = slice | SupportsIndex | EllipsisType
Region: TypeAlias = Box | _Index | tuple[_Index, ...] | None
"""None: the full tensor."""


def to_box(region: object, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[int, ...]]:
    """A region of a tensor of `shape` as a Box, and the shape of the result.

    region  a Box; or an index by numpy's rules: slices without a step, integers, `...`, and tuples of them; None: all
    raises  ArgumentError
    """
    if region is None:
        return Box.whole(shape), shape
    if isinstance(region, Box):
        if any(type(n) is not int for n in (*region.offset, *region.shape)):
            try:
                region = Box(tuple(map(operator.index, region.offset)), tuple(map(operator.index, region.shape)))
            except TypeError:
                raise ArgumentError(
                    f"box {region} has numbers that are not integers", next="give offset and shape as ints"
                ) from None
        if not region.inside(shape):
            raise ArgumentError(
                f"box {region} does not fit in {name!r} of shape {shape}", next="give an offset and a shape within it"
            )
        return region, region.shape
    return _indexed(region if isinstance(region, tuple) else (region,), shape, name)


def _indexed(index: tuple[object, ...], shape: tuple[int, ...], name: str) -> tuple[Box, tuple[int, ...]]:
    """The Box of a numpy index, and the shape of its result."""
    if sum(part is ... for part in index) == 0:
        index = (*index, ...)
    ellipsis = next(i for i, part in enumerate(index) if part is ...)
    left = len(shape) - (len(index) - 1)
    if left < 0 or sum(part is ... for part in index) > 1:
        raise ArgumentError(
            f"{len(index) - 1} indices for {name!r} of shape {shape}", next="give at most one index for each dimension"
        )
    full = (*index[:ellipsis], *[slice(None)] * left, *index[ellipsis + 1 :])
    offset, length, result = [], [], []
    for part, side in zip(full, shape, strict=True):
        begin, stop = _run(part, side, shape, name)
        offset.append(begin)
        length.append(stop - begin)
        if isinstance(part, slice):
            result.append(stop - begin)
    return Box(tuple(offset), tuple(length)), tuple(result)


def _run(part: object, side: int, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """The range (begin, end) that one index, an integer or a slice, selects in a dimension of length `side`."""
    try:
        if isinstance(part, slice):
            begin, stop, step = part.indices(side)
            if step == 1:
                return begin, max(begin, stop)
        elif not isinstance(part, bool):
            number = operator.index(part)  # type: ignore[arg-type]
            if -side <= number < side:
                return number % side, number % side + 1
            raise ArgumentError(
                f"index {number} is out of range for {name!r} of shape {shape}",
                next="count from 0, or from the end with -1",
            )
    except (TypeError, ValueError):
        pass  # the code below raises the error
    raise ArgumentError(
        f"{shown(part)} does not select one box of {name!r}",
        expected="a fs.Box, slices without a step, integers, or `...`",
        next="read a larger range, then index the result",
    )
