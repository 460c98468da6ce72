"""Partitions of ZeRO for another number of ranks, cut without DeepSpeed: the data of one rank is read by others."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs
from flowstone.adapters.deepspeed.partitions import FlatTensor, Shapes, parts_of_each_parameter, parts_of_run
from flowstone.adapters.deepspeed.repartition import SavedPartitions, frozen_fragment

GROUPS: list[Shapes] = [{"a": (7, 3), "b": (5,), "c": (2, 2, 2)}, {"d": (1,), "e": (3,)}]
SLOTS = ("", "exp_avg", "exp_avg_sq")


def values() -> dict[str, dict[str, torch.Tensor]]:
    """Each slot of each parameter, flattened: no two elements are the same."""
    noise = torch.Generator().manual_seed(5)
    return {
        name: {slot: torch.randn(math.prod(shape), generator=noise) for slot in SLOTS}
        for group in GROUPS for name, shape in group.items()
    }


def in_order(groups: list[Shapes], seed: int) -> list[Shapes]:
    """The same groups, with parameters in an order of their own."""
    drawn = random.Random(seed)
    return [dict(drawn.sample(list(group.items()), len(group))) for group in groups]


def flats_of(stage: int, groups: list[Shapes], rank: int, ranks: int, padding: int = 0) -> list[FlatTensor]:
    """How a rank has cut the groups; stage 3 has a flat tensor for each two parameters."""
    flats = []
    for number, group in enumerate(groups):
        if stage == 3:
            names = list(group)
            for first in range(0, len(names), 2):
                shapes = {name: group[name] for name in names[first : first + 2]}
                flats.append(FlatTensor(number, shapes, *parts_of_each_parameter(shapes, rank, ranks)))
            continue
        elements = sum(math.prod(shape) + padding for shape in group.values())
        length = 2 * -(-elements // (2 * ranks))
        parts = parts_of_run(group, [padding] * len(group), rank * length, (rank + 1) * length)
        flats.append(FlatTensor(number, group, parts, length))
    return flats


def state_of(
    stage: int, flats: list[FlatTensor], whole: dict[str, dict[str, torch.Tensor]], padding: int
) -> dict[str, Any]:
    """What DeepSpeed has of a rank under `optimizer_state_dict`. Its master weights lack what pads the end."""
    slots: list[dict[str, torch.Tensor]] = []
    for flat in flats:
        slots.append({slot: torch.zeros(flat.elements) for slot in SLOTS})
        for part in flat.parts:
            for slot, made in slots[-1].items():
                run = whole[part.name][slot][part.first : part.first + part.elements]
                made[part.begin : part.begin + part.elements] = run
    masters = [slot.pop("") for slot in slots]
    members = [[number for number, flat in enumerate(flats) if flat.group == group] for group in range(len(GROUPS))]
    base = {
        "state": {number: {"step": torch.tensor(3.0), **slot} for number, slot in enumerate(slots)},
        "param_groups": [{"lr": 0.1 + number, "params": own} for number, own in enumerate(members)],
    }
    if stage == 3:
        return {"overflow": False, "optimizer_state_dict": base, "fp32_flat_groups": masters}
    ends = [max((part.begin + part.elements for part in flat.parts), default=0) for flat in flats]
    is_last = [end < flat.elements and padding == 0 for end, flat in zip(ends, flats, strict=True)]
    return {
        "overflow": False, "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            master[:end] if last else master for master, end, last in zip(masters, ends, is_last, strict=True)
        ],
        "param_alignment_paddings": [[padding] * len(group) for group in GROUPS],
    }


def saved(
    folder: Path, stage: int, ranks: int, groups: list[Shapes], padding: int = 0, **changed: Any
) -> SavedPartitions:
    cut = [flats_of(stage, groups, rank, ranks, padding) for rank in range(ranks)]
    states = [state_of(stage, flats, values(), padding) for flats in cut]
    for path, value in changed.items():
        place, last = states[-1], path.split("__")
        for key in last[:-1]:
            place = place[int(key) if key.isdigit() else key]
        place[last[-1]] = value
    with fs.Checkpointer(folder) as ckpt:
        ckpt.save(1, {"optim": states})
    checkpoint = fs.open(folder)
    stored: Any = checkpoint.objects["optim"]
    return SavedPartitions(checkpoint, stored, [flat.shapes for flat in flats_of(stage, groups, 0, ranks)])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (5, 4), (4, 9)])
def test_any_number_of_ranks_gets_what_it_would_have_had(tmp_path: Path, stage: int, before: int, after: int) -> None:
    padding = 1 if stage == 2 and before == 3 else 0
    partitions = saved(tmp_path, stage, before, in_order(GROUPS, before), padding)
    for rank in range(after):
        flats = flats_of(stage, in_order(GROUPS, 10 + after), rank, after)
        given, expected = partitions.state_for(flats, [[0]]), state_of(3, flats, values(), 0)
        base = given["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        masters = given["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        assert len(masters) == len(flats)
        for number, master in enumerate(masters):
            assert torch.equal(master, expected["fp32_flat_groups"][number])
            actual, whole = base["state"][number], expected["optimizer_state_dict"]["state"][number]
            assert actual.keys() == whole.keys()
            assert all(torch.equal(actual[slot], whole[slot]) for slot in whole)
        assert base["param_groups"] == expected["optimizer_state_dict"]["param_groups"]
        assert given["overflow"] is False


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    partitions = saved(tmp_path, 2, 2, GROUPS)
    other = [{**GROUPS[0], "f": (4,)}, GROUPS[1]]
    with pytest.raises(fs.StateError, match=r"1 parameters differ, 'f' first[\s\S]*saved +absent"):
        partitions.state_for(flats_of(2, other, 0, 1), [[0]])
    with pytest.raises(fs.StateError, match=r"'d' first[\s\S]*in group 1, shape \(1,\)"):
        partitions.state_for(flats_of(2, [{**GROUPS[0], "d": (1,)}, {"e": (3,)}], 0, 1), [[0]])


def test_partitions_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    state = "base_optimizer_state__state__0__"
    of_other_steps = saved(tmp_path / "a", 2, 2, GROUPS, **{f"{state}step": torch.tensor(4.0)})
    with pytest.raises(fs.DamagedError, match="'step' of the optimizer differs"):
        of_other_steps.state_for(flats_of(2, GROUPS, 0, 1), [[0]])
    too_short = saved(tmp_path / "b", 2, 2, GROUPS, **{f"{state}exp_avg": torch.zeros(2)})
    with pytest.raises(fs.DamagedError, match="is not flat, or is too short"):
        too_short.state_for(flats_of(2, GROUPS, 0, 1), [[0]])
    lost = saved(tmp_path / "c", 2, 2, GROUPS, single_partition_of_fp32_groups=[torch.zeros(3), torch.zeros(2)])
    with pytest.raises(fs.DamagedError, match="elements of 'b'"):
        lost.state_for(flats_of(2, GROUPS, 0, 1), [[0]])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 5)])
def test_frozen_parameters_of_stage_3_are_cut_anew(tmp_path: Path, before: int, after: int) -> None:
    whole = torch.arange(1.0, 8)
    length = -(-7 // before)
    padded = torch.cat([whole, torch.zeros(length * before - 7)])
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"frozen": list(padded.split(length))})
    checkpoint = fs.open(tmp_path)
    stored: Any = checkpoint.objects["frozen"]
    actual = [frozen_fragment(checkpoint, stored, (7,), rank, after) for rank in range(after)]
    assert {len(entry) for entry in actual} == {-(-7 // after)}
    assert torch.equal(torch.cat(actual)[:7], whole)
    assert not torch.cat(actual)[7:].any()
