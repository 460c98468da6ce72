"""The partitions of ZeRO's optimizers: which elements of which parameter lie where, on each of any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
"""The parameters that are flattened together, in the order in which they lie there."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a parameter's elements.

    first     the first of them, in the flattened parameter
    begin     where that lies in the flat partition
    elements  how many
    """

    name: str
    first: int
    begin: int
    elements: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat tensor of a rank: of an optimizer's group, or of a part of a group.

    group     the group's number
    shapes    of the parameters that are flattened together
    parts     what this rank has of them
    elements  with padding
    """

    group: int
    shapes: Shapes
    parts: tuple[Part, ...]
    elements: int


def of_a_run(shapes: Shapes, paddings: Sequence[int], low: int, high: int) -> tuple[Part, ...]:
    """Stages 1 and 2 flatten all parameters, one behind the other, and cut that into a run for each rank.

    paddings   elements behind each parameter that are none
    low, high  the run
    """
    parts, begin = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        elements = math.prod(shape)
        first, last = max(low, begin), min(high, begin + elements)
        if first < last:
            parts.append(Part(name, first - begin, first - low, last - first))
        begin += elements + padding
    return tuple(parts)


def of_each(shapes: Shapes, rank: int, ranks: int) -> tuple[tuple[Part, ...], int]:
    """Stage 3 cuts each parameter by itself, into equal parts, the last of them padded: parts, and their length."""
    parts, begin = [], 0
    for name, shape in shapes.items():
        elements = math.prod(shape)
        length = -(-elements // ranks)
        ours = min(length, elements - rank * length)
        if ours > 0:
            parts.append(Part(name, rank * length, begin, ours))
        begin += length
    return tuple(parts), begin


def of_this_rank(engine: Any) -> list[Flat] | None:
    """How an engine of DeepSpeed has partitioned its optimizer; None where that is not known, or not ZeRO alone."""
    optimizer = engine.optimizer
    if engine.mp_world_size != 1 or engine.has_moe_layers or engine.zero_elastic_checkpoint():
        return None
    if engine.zero_optimization_stage() not in (1, 2, 3):
        return None
    names = optimizer.param_names
    if engine.zero_optimization_stage() == 3:
        return _of_stage_3(optimizer, names)
    if hasattr(optimizer, "round_robin_bit16_groups"):
        groups, paddings = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_padding
        masters = optimizer.single_partition_of_fp32_groups
    elif hasattr(optimizer, "fp32_groups_flat_partition"):
        groups, masters = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        paddings = [[0] * len(group) for group in groups]
    else:
        return None
    found = []
    for number, (group, master) in enumerate(zip(groups, masters, strict=True)):
        shapes, length = _shapes(group, names), master.numel()
        low = torch.distributed.get_rank(group=optimizer.real_dp_process_group[number]) * length
        found.append(Flat(number, shapes, of_a_run(shapes, paddings[number], low, low + length), length))
    return found


def _of_stage_3(optimizer: Any, names: Mapping[Any, str]) -> list[Flat]:
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    ranks = torch.distributed.get_world_size(group=optimizer.dp_process_group)
    found = []
    for number, group in enumerate(optimizer.fp16_groups):
        shapes = _shapes(group, names)
        found.append(Flat(optimizer.sub_group_to_group_id[number], shapes, *of_each(shapes, rank, ranks)))
    return found


def _shapes(group: Iterable[Any], names: Mapping[Any, str]) -> Shapes:
    return {names[one]: tuple(getattr(one, "ds_shape", one.shape)) for one in group}
