"""Random layouts of tensors with awkward shapes over ranks: frameworks' layouts, and ones that no framework makes.

A case is made from one number, so that a failing case can be repeated alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.torch.shards import DimensionSplit, boxes_of, flat_boxes

RANKS_MAX = 13
_SIDES = (1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 24, 31)
_ELEMENTS_MAX = 3000
_DTYPES = ("float32", "float64", "float16", "int8", "int64", "uint8", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class Placed:
    """The effect of a mesh dimension: it cuts each part of the tensor along `dim` into `factor`, or replicates it."""

    dim: int | None = None
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in row-major order, and the effect of each mesh dimension."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    placements: tuple[Placed, ...]

    def splits(self, rank: int, ndim: int) -> list[tuple[DimensionSplit, ...]] | None:
        """How each dimension of a tensor is cut for a rank; None if the rank has no part in the mesh."""
        if rank not in self.ranks:
            return None
        position = np.unravel_index(self.ranks.index(rank), self.shape)
        rows: list[list[DimensionSplit]] = [[] for _ in range(ndim)]
        for placed, parts, mine in zip(self.placements, self.shape, position, strict=True):
            if placed.dim is not None:
                rows[placed.dim].append(DimensionSplit(parts, int(mine), placed.factor))
        return [tuple(of) for of in rows]


@dataclass(frozen=True, slots=True)
class Lies:
    """A tensor's layout: the boxes of each rank, and the mesh that they come from, if there is one."""

    how: str
    boxes: tuple[tuple[Box, ...], ...]
    mesh: Mesh | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A job of `size` ranks; `lies` is parallel to the case's tensors."""

    size: int
    lies: tuple[Lies, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """The layout that the ranks of `source` save, and the layout that the ranks of `target` load."""

    seed: int
    tensors: tuple[Tensor, ...]
    source: Layout
    target: Layout

    def values(self) -> dict[str, np.ndarray]:
        """The bytes of every tensor's elements, as an additional dimension. No two runs of them are equal."""
        chance = np.random.default_rng(self.seed)
        return {
            part.name: chance.integers(0, 256, (*part.shape, part.dtype.item_bytes), np.uint8) for part in self.tensors
        }

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.source.size} ranks save, {self.target.size} load"]
        for tensor, source, target in zip(self.tensors, self.source.lies, self.target.lies, strict=True):
            lines.append(f"  {tensor.name} {tensor.dtype.name} {tensor.shape}: {source.how} -> {target.how}")
        return "\n".join(lines)


def make(seed: int, ranks_max: int = RANKS_MAX) -> Case:
    """The case with that number."""
    chance = random.Random(seed)
    tensors = tuple(
        Tensor(f"t{number}", DTYPES[chance.choice(_DTYPES)], _shape(chance)) for number in range(chance.randint(1, 4))
    )
    source, target = (_layout(chance, chance.randint(1, ranks_max), tensors) for _ in range(2))
    return Case(seed, tensors, source, target)


def inside(box: Box) -> tuple[slice, ...]:
    """The slices of a box in an array."""
    return tuple(slice(begin, end) for begin, end in zip(box.offset, box.end, strict=True))


def _shape(chance: random.Random) -> tuple[int, ...]:
    shape: list[int] = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))):
        side = 0 if chance.random() < 0.02 else chance.choice(_SIDES)
        shape.append(side if math.prod(shape) * side <= _ELEMENTS_MAX else 1)
    return tuple(shape)


def _layout(chance: random.Random, size: int, tensors: Sequence[Tensor]) -> Layout:
    return Layout(size, tuple(_lies(chance, size, tensor.shape) for tensor in tensors))


def _lies(chance: random.Random, size: int, shape: tuple[int, ...]) -> Lies:
    how = chance.choice(("mesh", "mesh", "mesh", "flat", "tiles", "tiles", "whole"))
    if not shape or 0 in shape:
        how = chance.choice(("mesh", "everywhere"))
    if how == "mesh":
        return _on_a_mesh(chance, size, shape)
    ranks: list[list[Box]] = [[] for _ in range(size)]
    if how == "flat":
        for rank, (begin, stop) in zip(_some_order(chance, size), _ranges(chance, math.prod(shape), size), strict=True):
            ranks[rank] += [box for box, _ in flat_boxes(shape, begin, stop)]
    elif how == "tiles":
        for box in _tiles(chance, Box.whole(shape), chance.randint(1, 2 * size)):
            for rank in _some_ranks(chance, size):
                ranks[rank].append(box)
    else:
        for rank in range(size) if how == "everywhere" else _some_ranks(chance, size):
            ranks[rank].append(Box.whole(shape))
    return Lies(how, tuple(map(tuple, ranks)))


def _on_a_mesh(chance: random.Random, size: int, shape: tuple[int, ...]) -> Lies:
    count = size if chance.random() < 0.8 else chance.randint(1, size)
    first = chance.randint(0, size - count)
    ranks = list(range(first, first + count))
    if chance.random() < 0.2:
        chance.shuffle(ranks)
    sides = _factors(chance, count)
    placements = tuple(_placed(chance, len(shape)) for _ in sides)
    mesh = Mesh(tuple(ranks), sides, placements)
    boxes = []
    for rank in range(size):
        splits = mesh.splits(rank, len(shape))
        own = [] if splits is None else [box for box, _ in boxes_of(shape, splits)]
        boxes.append(tuple(box for box in own if box.elements))
    if not math.prod(shape):
        boxes = [(Box.whole(shape),) if rank in ranks else () for rank in range(size)]
    words = ", ".join("replicate" if p.dim is None else f"shard {p.dim} by {p.factor}" for p in placements)
    return Lies(f"mesh {sides} of {len(ranks)} ({words})", tuple(boxes), mesh)


def _placed(chance: random.Random, ndim: int) -> Placed:
    kind = chance.choice(("replicate", "shard", "shard", "strided")) if ndim else "replicate"
    if kind == "replicate":
        return Placed()
    return Placed(chance.randrange(ndim), chance.randint(2, 3) if kind == "strided" else 1)


def _factors(chance: random.Random, count: int) -> tuple[int, ...]:
    """One to three numbers whose product is `count`."""
    collected = []
    for _ in range(chance.randint(0, 2)):
        collected.append(chance.choice([n for n in range(1, count + 1) if count % n == 0]))
        count //= collected[-1]
    collected.append(count)
    chance.shuffle(collected)
    return tuple(collected)


def _some_order(chance: random.Random, size: int) -> list[int]:
    return chance.sample(range(size), size) if chance.random() < 0.5 else list(range(size))


def _some_ranks(chance: random.Random, size: int) -> list[int]:
    return chance.sample(range(size), 1 if chance.random() < 0.6 else chance.randint(1, size))


def _ranges(chance: random.Random, total: int, count: int) -> list[tuple[int, int]]:
    """Divide 0..total into `count` ranges, some of them empty: of equal size as far as possible, or of any size."""
    if chance.random() < 0.5:
        size = -(-total // count)
        cuts = [min(size * index, total) for index in range(count + 1)]
    else:
        cuts = [0, *sorted(chance.randint(0, total) for _ in range(count - 1)), total]
    return list(itertools.pairwise(cuts))


def _tiles(chance: random.Random, whole: Box, count: int) -> list[Box]:
    """Disjoint boxes that fill `whole`, about `count`; not all of them can be made by cuts across the full box."""
    boxes = [whole]
    while len(boxes) < count:
        wide = [box for box in boxes if max(box.shape) > 1]
        if not wide:
            break
        box = chance.choice(wide)
        boxes.remove(box)
        dims = [dim for dim, n in enumerate(box.shape) if n > 2]
        if len(dims) > 1 and chance.random() < 0.3:
            boxes += _pinwheel(chance, box, *chance.sample(dims, 2))
        else:
            dim = chance.choice([dim for dim, n in enumerate(box.shape) if n > 1])
            position = chance.randint(1, box.shape[dim] - 1)
            boxes += [_part(box, {dim: (0, position)}), _part(box, {dim: (position, box.shape[dim])})]
    return boxes


def _pinwheel(chance: random.Random, box: Box, entry: int, other: int) -> list[Box]:
    """Five boxes that no cut across the full box separates."""
    height, width = box.shape[entry], box.shape[other]
    a, b = sorted(chance.sample(range(1, height), 2))
    c, d = sorted(chance.sample(range(1, width), 2))
    places = [
        ((0, a), (0, d)), ((0, b), (d, width)), ((b, height), (c, width)), ((a, height), (0, c)), ((a, b), (c, d)),
    ]
    return [_part(box, {entry: rows, other: columns}) for rows, columns in places]


def _part(box: Box, ranges: dict[int, tuple[int, int]]) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    for dim, (begin, stop) in ranges.items():
        offset[dim] += begin
        shape[dim] = stop - begin
    return Box(tuple(offset), tuple(shape))
