"""The partitions of ZeRO's optimizers: which range of which parameter is in which rank's flat tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
"""The parameters that are flattened together, in order."""


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A range of a parameter's elements in a rank's flat partition. All numbers count elements.

    first     offset of the range in the flattened parameter
    begin     offset of the range in the flat partition
    elements  length of the range
    """

    name: str
    first: int
    begin: int
    elements: int


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One flat tensor of a rank, for an optimizer's group or a part of one.

    group     the group's number
    shapes    shapes of the parameters that are flattened together
    parts     this rank's parts of them
    elements  number of elements, including padding
    """

    group: int
    shapes: Shapes
    parts: tuple[FlatPart, ...]
    elements: int


def parts_of_run(shapes: Shapes, paddings: Sequence[int], low: int, high: int) -> tuple[FlatPart, ...]:
    """The parts that one rank has with stages 1 and 2. These stages flatten all parameters together, and cut them into
    one range for each rank.

    paddings   number of padding elements after each parameter
    low, high  this rank's range, from element `low` to element `high` - 1
    """
    parts, begin = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        elements = math.prod(shape)
        first, last = max(low, begin), min(high, begin + elements)
        if first < last:
            parts.append(FlatPart(name, first - begin, first - low, last - first))
        begin += elements + padding
    return tuple(parts)


def parts_of_each_parameter(shapes: Shapes, rank: int, ranks: int) -> tuple[tuple[FlatPart, ...], int]:
    """The parts that one rank has with stage 3, and their total length. Stage 3 cuts each parameter into equal parts;
    the last part is padded.
    """
    parts, begin = [], 0
    for name, shape in shapes.items():
        elements = math.prod(shape)
        length = -(-elements // ranks)
        ours = min(length, elements - rank * length)
        if ours > 0:
            parts.append(FlatPart(name, rank * length, begin, ours))
        begin += length
    return tuple(parts), begin


def flats_of_this_rank(engine: Any) -> list[FlatTensor] | None:
    """How an engine has partitioned its optimizer on this rank. None if that is not known, or not done by ZeRO alone.
    """
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
    flats = []
    for number, (group, master) in enumerate(zip(groups, masters, strict=True)):
        shapes, length = _shapes(group, names), master.numel()
        low = torch.distributed.get_rank(group=optimizer.real_dp_process_group[number]) * length
        flats.append(FlatTensor(number, shapes, parts_of_run(shapes, paddings[number], low, low + length), length))
    return flats


def _of_stage_3(optimizer: Any, names: Mapping[Any, str]) -> list[FlatTensor]:
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    ranks = torch.distributed.get_world_size(group=optimizer.dp_process_group)
    flats = []
    for number, group in enumerate(optimizer.fp16_groups):
        shapes = _shapes(group, names)
        flats.append(
            FlatTensor(optimizer.sub_group_to_group_id[number], shapes, *parts_of_each_parameter(shapes, rank, ranks))
        )
    return flats


def _shapes(group: Iterable[Any], names: Mapping[Any, str]) -> Shapes:
    return {names[parameter]: tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in group}
