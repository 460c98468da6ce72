"""Parts of a model that a sharded strategy of Lightning loads, if the checkpoint lacks some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import is_installed
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneWriter
from flowstone.config import EngineOptions

if not is_installed("lightning"):
    pytest.skip("`make test-integrations` installs lightning", allow_module_level=True)

from flowstone.adapters.lightning.sharded import _load_parts


def made() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    return model, torch.optim.AdamW(model.parameters())


def trained(*used: str) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    model, optimizer = made()
    for name in used:
        model[name](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("used", [(), ("a",), ("b",), ("a", "b")])
def test_an_optimizer_has_the_slots_that_were_saved_and_no_others(tmp_path: Path, used: tuple[str, ...]) -> None:
    """Whether it is new, or goes back: then it has slots of stale steps, or lacks some."""
    model, optimizer = trained("a")
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer_0"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, storage_writer=FlowstoneWriter(tmp_path / "one"), no_dist=True)
    target, own = trained(*used) if used else made()
    _load_parts(tmp_path / "one", EngineOptions(), ("model", target), {"optimizer_0": own}, strict=True)
    assert {name for name, parameter in target.named_parameters() if parameter in own.state} == {"a.weight", "a.bias"}
    for name, parameter in model["a"].named_parameters():
        restored = own.state[target["a"].get_parameter(name)]
        assert all(torch.equal(value, restored[slot]) for slot, value in optimizer.state[parameter].items())


def test_slots_of_no_parameter_are_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = trained("a", "b")
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer_0"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, storage_writer=FlowstoneWriter(tmp_path / "one"), no_dist=True)
    target, _ = made()
    own = torch.optim.AdamW(target["a"].parameters())
    with pytest.raises(fs.MismatchError, match=r"optimizer state of 'b\.(weight|bias)' that"):
        _load_parts(tmp_path / "one", EngineOptions(), ("model", target), {"optimizer_0": own}, strict=True)
