"""FSDP2 at moments when its modules hold gathered parameters: an optimizer's are named all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flowstone as fs


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(*, inner: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A module that stays gathered after a forward, and its optimizer after one step."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 8))
    for layer in model if inner else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 64))
    model.train()
    assert not any(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters()), "gathered"


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one.to_local().detach().clone() for one in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("order", [("optimizer", "model"), ("model", "optimizer")])
@pytest.mark.usefixtures("group")
def test_after_an_evaluation_the_optimizer_may_come_before_the_model(
    store: Path, order: tuple[str, str], inner: bool
) -> None:
    model, optimizer = make(inner=inner)
    whole = {"model": model, "optimizer": optimizer}
    state = {name: whole[name] for name in order}
    evaluate(model)
    expected = held(optimizer)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        names = {f"optimizer.state.model.{name}.exp_avg" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
        assert names <= set(fs.open(store).tensors)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.to_local().detach().fill_(math.nan)
        evaluate(model)
        checkpointer.load(state)
    assert all(map(torch.equal, held(optimizer), expected))
    assert model(torch.ones(2, 64)).isfinite().all(), "the next forward gathers what was loaded"


@pytest.mark.usefixtures("group")
def test_a_part_of_a_gathered_module_is_told_to_be_put_back(store: Path) -> None:
    model, optimizer = make(inner=False)
    evaluate(model)
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.UnsupportedStateError, match="has no name") as caught:
        checkpointer.save(1, {"optimizer": optimizer, "first": model[0]})
    assert "call reshard() on the whole module" in str(caught.value.facts["next"])
