"""Boxes: regions of tensors, in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Box:
    """A region of a tensor: `offset` and `shape` in elements, one entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "offset", tuple(self.offset))
            object.__setattr__(self, "shape", tuple(self.shape))
            negative = any(n < 0 for n in (*self.offset, *self.shape))
        except TypeError:
            raise ArgumentError(
                f"box offset {self.offset!r:.60} or shape {self.shape!r:.60} is not a sequence of whole numbers",
                next="give both with one int for each dimension: fs.Box((0, 0), (128, 768))",
            ) from None
        if len(self.offset) != len(self.shape):
            raise ArgumentError(
                f"box offset {self.offset} and shape {self.shape} differ in length",
                next="give one number for each dimension"
            )
        if negative:
            raise ArgumentError(
                f"box offset {self.offset} or shape {self.shape} is negative", next="count elements from 0"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 if any side is 0."""
        return math.prod(self.shape)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of `shape`, which has the same number of dimensions."""
        return len(shape) == len(self.shape) and all(e <= n for e, n in zip(self.end, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None if the boxes share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> Box:
        """This box, with offsets relative to the beginning of `outer`, a box that contains this one."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


def products(numbers: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The product of each run of numbers. `starts`, `counts`: where each run begins in `numbers`, and its length. The
    product of an empty run (the shape of a scalar) is 1.
    """
    result = np.ones(len(counts), np.int64)
    for dim in range(int(counts.max(initial=0))):
        has = np.flatnonzero(counts > dim)
        if len(has) == len(counts):
            result *= numbers[starts + dim]
        else:
            result[has] *= numbers[starts[has] + dim]
    return result


def padding_mask(ndim: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
    """For boxes that are padded to `width` offsets and `width` lengths, a mask that is True for numbers that are not
    padding. `ndim`: number of dimensions of each box.
    """
    half = np.arange(width) < ndim[:, None]
    return np.concatenate([half, half], axis=1)
