"""Parts of a model that a sharded strategy of Lightning loads: what the checkpoint lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import is_installed
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from flowstone.adapters.dcp import FlowstoneWriter
from flowstone.config import EngineOptions

if not is_installed("lightning"):
    pytest.skip("`make test-integrations` installs lightning", allow_module_level=True)

from flowstone.adapters.lightning.sharded import _load_parts


def trained(*used: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    for name in used:
        model[name](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("strict", [True, False])
def test_slots_that_were_not_saved_are_never_kept(tmp_path: Path, strict: bool) -> None:
    model, optimizer = trained("a")
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer_0"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, storage_writer=FlowstoneWriter(tmp_path / "one"), no_dist=True)
    target, own = trained("a", "b")
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*b\.weight"):
        _load_parts(tmp_path / "one", EngineOptions(), ("model", target), {"optimizer_0": own}, strict=strict)
