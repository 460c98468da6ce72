"""A checkpoint of a Checkpointer loads through DCP, under the names that DCP uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import run
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader

ACTS = "adapters.dcp_acts"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    rest = [*model[1].parameters(), *model[2].parameters()]
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1 * seed}, {"params": rest}])
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2 + seed)


def same(value: Any, other: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else bool(value == other)


def saved(path: Path, prefix: str = "") -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer, scheduler = made(1)
    inner: dict[str, object] = {"model": model, "optim": optimizer}
    state: dict[str, object] = {"app": inner} if prefix else inner
    state |= {
        "scheduler": scheduler, "step": 7, "rng": fs.rng(), "extra": {"lists": [1, [torch.ones(2), {"k": 3}]]},
        "array": np.arange(3),
    }
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(7, state).committed.result()
    return model, optimizer, scheduler


@pytest.mark.parametrize("flat", [False, True])
def test_models_and_optimizers_load_through_get_state_dict(flat: bool, tmp_path: Path) -> None:
    model, optimizer, scheduler = saved(tmp_path)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    other, into, steps = made(2)
    states = get_state_dict(other, into, options=options)
    state: dict[str, Any] = {
        "model": states[0], "optim": states[1], "scheduler": steps, "step": 0, "array": None,
        "extra": {"lists": [0, [torch.zeros(2), {"k": 0}]]},
    }
    dcp.load(state, storage_reader=FlowstoneReader(tmp_path / "step-00000007"))
    set_state_dict(other, into, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert same(get_state_dict(other, into, options=options), expected)
    assert same(steps.state_dict(), scheduler.state_dict())
    assert state["step"] == 7
    assert state["array"].tolist() == [0, 1, 2]
    assert same(state["extra"], {"lists": [1, [torch.ones(2), {"k": 3}]]})


def test_an_application_with_both_inside_loads(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path, "app")
    other, into, _ = made(2)
    states = get_state_dict(other, into)
    state: dict[str, Any] = {"app": {"model": states[0], "optim": states[1]}}
    dcp.load(state, storage_reader=FlowstoneReader(tmp_path))  # of a store, its newest
    assert same(state["app"]["model"], model.state_dict())
    assert same(state["app"]["optim"]["state"], get_optimizer_state_dict(model, optimizer)["state"])


def test_a_state_is_made_from_what_is_stored(tmp_path: Path) -> None:
    model, *_ = saved(tmp_path)
    loaded = state_dict_loader._load_state_dict_from_keys({"model", "step"}, storage_reader=FlowstoneReader(tmp_path))
    assert same(loaded, {"model": dict(model.state_dict()), "step": 7})


def test_tied_weights_load_under_both_names(tmp_path: Path) -> None:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.ModuleList([first, second])}).committed.result()
    into = {"model": {f"{n}.{name}": torch.zeros_like(p) for n in (0, 1) for name, p in first.named_parameters()}}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path))
    assert torch.equal(into["model"]["0.weight"], first.weight)
    assert torch.equal(into["model"]["1.weight"], first.weight)


@pytest.mark.parametrize("needs", ["fsdp2_on_cpu"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_fsdp_states_of_a_checkpointer_load_on_fewer_ranks(tmp_path: Path) -> None:
    run(3, ACTS, "save_by_checkpointer", str(tmp_path))
    paths = str(tmp_path / "step-00000002"), str(tmp_path / "whole.pt")
    assert run(2, ACTS, "load_of_checkpointer", *paths) == [True] * 2
