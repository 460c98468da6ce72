"""Shards: the boxes (regions) of a global tensor that one rank's local tensor contains.

The local part of a DTensor may be several boxes. If a dimension is split twice, in another order than that of the mesh
(`_StridedShard`: FSDP over tensor parallelism), contiguous local memory contains several regions of the tensor. A range
of a flattened tensor (FSDP1, ZeRO) may also be several boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.imported import class_if_imported
from flowstone.state.records import Shard
from flowstone.table.box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of one dimension, disjoint, in the order of the local tensor."""


class DimensionSplit(msgspec.Struct, frozen=True):
    """The split of one tensor dimension over one mesh dimension: into `parts` parts, as by torch.chunk. This rank has
    part number `mine`.

    factor  the dimension is first divided into this many ranges, and each range is split; this rank has a part of each
    """

    parts: int
    mine: int
    factor: int = 1


@lru_cache(maxsize=4096)
def runs_of(length: int, splits: tuple[DimensionSplit, ...]) -> Runs:
    """The ranges of a dimension of `length` that this rank has after all splits."""
    runs: Runs = ((0, length),)
    for split in splits:
        held = sum(stop - begin for begin, stop in runs)
        cut = [part for whole in _chunks(0, held, split.factor) for part in _chunk(whole, split.parts, split.mine)]
        runs = tuple(run for begin, stop in cut for run in _slice(runs, begin, stop))
    return _joined(runs)


def boxes_of(shape: Sequence[int], splits: Sequence[tuple[DimensionSplit, ...]]) -> Iterator[tuple[Box, Box]]:
    """The boxes of a tensor of `shape` that this rank has, each with its box in the local tensor, in local order.

    splits  the splits of each dimension
    """
    runs = [runs_of(length, of) for length, of in zip(shape, splits, strict=True)]
    starts = [list(itertools.accumulate((stop - begin for begin, stop in of), initial=0)) for of in runs]
    for numbers in itertools.product(*(range(len(of)) for of in runs)):
        chosen = [of[i] for of, i in zip(runs, numbers, strict=True)]
        lengths = tuple(stop - begin for begin, stop in chosen)
        local = tuple(of[i] for of, i in zip(starts, numbers, strict=True))
        yield Box(tuple(begin for begin, _ in chosen), lengths), Box(local, lengths)


def flat_boxes(shape: Sequence[int], begin: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Divide the elements [begin, stop) of a row-major tensor into boxes. Yields each box, with the position of its
    first element in the range.

    The boxes are in order, each is dense, and there are at most 2 x ndim - 1.
    """
    if not 0 <= begin <= stop <= math.prod(shape):
        raise ValueError(f"elements {begin}..{stop} do not lie in a tensor of shape {tuple(shape)}")
    start = begin
    while start < stop:
        box = _longest(shape, start, stop)
        yield box, start - begin
        start += box.elements


def _longest(shape: Sequence[int], start: int, stop: int) -> Box:
    """The largest dense box that begins at element `start` and does not pass `stop`."""
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = [start // inner[dim] % shape[dim] for dim in range(len(shape))]
    for dim in range(len(shape)):
        rest = (stop - start) // inner[dim]  # how many full rows of this dimension remain
        if rest and not any(offset[dim + 1 :]):
            count = min(rest, shape[dim] - offset[dim])
            return Box(tuple(offset), (*(1,) * dim, count, *shape[dim + 1 :]))
    return Box(tuple(offset), (1,) * len(shape))


def _chunks(begin: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """The ranges of torch.chunk: of equal size, except the last; there may be fewer than `parts`."""
    size = -(-(stop - begin) // parts)
    while begin < stop:
        yield begin, min(begin + size, stop)
        begin += size


def _chunk(whole: tuple[int, int], parts: int, number: int) -> list[tuple[int, int]]:
    """The range of chunk `number` of `whole`, as torch.chunk divides it; empty if there are fewer chunks."""
    return list(itertools.islice(_chunks(*whole, parts), number, number + 1))


def _slice(runs: Runs, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of the elements [begin, stop), counted in the concatenation of `runs`."""
    before = 0
    for low, high in runs:
        first, last = max(begin - before, 0), min(stop - before, high - low)
        if first < last:
            yield low + first, low + last
        before += high - low


def _joined(runs: Runs) -> Runs:
    """The same ranges, with adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for begin, stop in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((begin, stop))
    return tuple(joined)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, and not of a subclass, which may give its placements another meaning."""
    return type(value) is class_if_imported("torch.distributed.tensor", "DTensor")


def shards_of(tensor: DTensor, name: str) -> list[Shard]:
    """The boxes of a DTensor that this rank holds; none if the rank is not in the mesh, or its part is empty.

    An exception: of a DTensor without elements, each rank in the mesh has one empty box.

    raises  UnsupportedStateError for a placement that is neither shard nor replica (Partial), and if the local tensor
            does not fit the placements
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    splits: list[list[DimensionSplit]] = [[] for _ in tensor.shape]
    for placement, parts, mine in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            splits[placement.dim].append(DimensionSplit(parts, mine, factor))
        elif not isinstance(placement, Replicate):
            raise UnsupportedStateError(
                f"{name!r} is a DTensor with the placements {tensor.placements}, but {placement} is neither Shard nor "
                "Replicate", next="redistribute() it before it becomes part of the state",
            )
    local = _local(tensor)
    shape = tuple(tensor.shape)
    boxes = list(boxes_of(shape, [tuple(of) for of in splits]))
    runs = [runs_of(length, tuple(of)) for length, of in zip(shape, splits, strict=True)]
    held = tuple(sum(stop - begin for begin, stop in of) for of in runs)
    if held != tuple(local.shape):
        raise UnsupportedStateError(
            f"the local tensor of {name!r} does not match its placements {tensor.placements}",
            expected=f"shape {held}", found=f"shape {tuple(local.shape)}",
            next="make DTensors with distribute_tensor(), or give from_local() the global shape",
        )
    if not math.prod(shape):
        none = Box((0,) * len(shape), held)
        return [_shard(local, none, none, shape)]
    return [_shard(local, whole, inside, shape) for whole, inside in boxes if whole.elements]


def _local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # set if a collective still fills the tensor
    return wait() if wait is not None else local


def _shard(local: torch.Tensor, whole: Box, inside: Box, shape: tuple[int, ...]) -> Shard:
    part = local
    for dim, (offset, length) in enumerate(zip(inside.offset, inside.shape, strict=True)):
        part = part.narrow(dim, offset, length) if length != local.shape[dim] else part
    return Shard(part, shape, whole.offset)
