"""Shards: which boxes of a global tensor one rank's local tensor holds.

A DTensor is a list of boxes, not one: if a dimension is split twice, in another order than the mesh's
(`_StridedShard`: FSDP over tensor parallelism), one block of local memory is several regions of the tensor. So is a
range of a flattened tensor (FSDP1, ZeRO).
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
from flowstone.state.imported import imported
from flowstone.state.records import Shard
from flowstone.table.box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of one dimension, disjoint, in the order of the local tensor."""


class Split(msgspec.Struct, frozen=True):
    """The split of one dimension over one mesh dimension: into `parts`, as torch.chunk does; this rank has `mine`.

    factor  the dimension is first divided into that many, and each of them is split: this rank has its part of each
    """

    parts: int
    mine: int
    factor: int = 1


@lru_cache(maxsize=4096)
def runs_of(length: int, splits: tuple[Split, ...]) -> Runs:
    """The ranges left of a dimension of `length` after all splits."""
    runs: Runs = ((0, length),)
    for split in splits:
        held = sum(stop - begin for begin, stop in runs)
        cut = [part for whole in _chunks(0, held, split.factor) for part in _chunk(whole, split.parts, split.mine)]
        runs = tuple(run for begin, stop in cut for run in _slice(runs, begin, stop))
    return _joined(runs)


def boxes_of(shape: Sequence[int], splits: Sequence[tuple[Split, ...]]) -> Iterator[tuple[Box, Box]]:
    """The regions of a tensor of `shape` that this rank holds, with their places in the local tensor, in local order.

    splits  for each dimension
    """
    runs = [runs_of(length, of) for length, of in zip(shape, splits, strict=True)]
    starts = [list(itertools.accumulate((stop - begin for begin, stop in of), initial=0)) for of in runs]
    for at in itertools.product(*(range(len(of)) for of in runs)):
        chosen = [of[i] for of, i in zip(runs, at, strict=True)]
        lengths = tuple(stop - begin for begin, stop in chosen)
        local = tuple(of[i] for of, i in zip(starts, at, strict=True))
        yield Box(tuple(begin for begin, _ in chosen), lengths), Box(local, lengths)


def flat_boxes(shape: Sequence[int], begin: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Elements [begin, stop) of a row-major tensor as boxes, each with its first element's position in the range.

    In order; each is dense; at most 2 x ndim - 1 of them.
    """
    if not 0 <= begin <= stop <= math.prod(shape):
        raise ValueError(f"elements {begin}..{stop} do not lie in a tensor of shape {tuple(shape)}")
    at = begin
    while at < stop:
        box = _longest(shape, at, stop)
        yield box, at - begin
        at += box.elements


def _longest(shape: Sequence[int], at: int, stop: int) -> Box:
    """The largest dense box that begins at element `at` and does not pass `stop`."""
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = [at // inner[dim] % shape[dim] for dim in range(len(shape))]
    for dim in range(len(shape)):
        rest = (stop - at) // inner[dim]  # whole rows of this dimension that remain
        if rest and not any(offset[dim + 1 :]):
            count = min(rest, shape[dim] - offset[dim])
            return Box(tuple(offset), (*(1,) * dim, count, *shape[dim + 1 :]))
    return Box(tuple(offset), (1,) * len(shape))


def _chunks(begin: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """The ranges of torch.chunk: all of one size, except the last; there may be fewer than `parts`."""
    size = -(-(stop - begin) // parts)
    while begin < stop:
        yield begin, min(begin + size, stop)
        begin += size


def _chunk(whole: tuple[int, int], parts: int, number: int) -> list[tuple[int, int]]:
    """The chunk of that number; empty if there are fewer."""
    return list(itertools.islice(_chunks(*whole, parts), number, number + 1))


def _slice(runs: Runs, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements [begin, stop) of the concatenated ranges."""
    before = 0
    for low, high in runs:
        first, last = max(begin - before, 0), min(stop - before, high - low)
        if first < last:
            yield low + first, low + last
        before += high - low


def _joined(runs: Runs) -> Runs:
    """The same elements, with adjacent ranges merged."""
    joined: list[tuple[int, int]] = []
    for begin, stop in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((begin, stop))
    return tuple(joined)


def is_dtensor(value: object) -> bool:
    """Whether a value is exactly a DTensor; a subclass may give its placements another meaning."""
    return type(value) is imported("torch.distributed.tensor", "DTensor")


def shards_of(tensor: DTensor, name: str) -> list[Shard]:
    """The boxes of a DTensor that this rank holds; none if the rank is not in the mesh, or its part is empty.

    A tensor without elements still has a box: each rank in its mesh holds an empty one.

    raises  UnsupportedStateError for a placement that is neither shard nor replica (Partial), and if the local tensor
            does not fit the placements
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    splits: list[list[Split]] = [[] for _ in tensor.shape]
    for placement, parts, mine in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            splits[placement.dim].append(Split(parts, mine, factor))
        elif not isinstance(placement, Replicate):
            raise UnsupportedStateError(
                f"{name!r} is a DTensor placed {tensor.placements}: {placement} is neither shard nor replica",
                next="redistribute() it before it becomes part of the state",
            )
    local = _local(tensor)
    shape = tuple(tensor.shape)
    found = list(boxes_of(shape, [tuple(of) for of in splits]))
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
    return [_shard(local, whole, inside, shape) for whole, inside in found if whole.elements]


def _local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # of a tensor that a collective has yet to fill
    return wait() if wait is not None else local


def _shard(local: torch.Tensor, whole: Box, inside: Box, shape: tuple[int, ...]) -> Shard:
    part = local
    for dim, (offset, length) in enumerate(zip(inside.offset, inside.shape, strict=True)):
        part = part.narrow(dim, offset, length) if length != local.shape[dim] else part
    return Shard(part, shape, whole.offset)
