"""FSDP2 while its modules hold gathered parameters: an optimizer's parameters have the same names."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flowstone as fs
from flowstone.torch.fsdp2 import with_shards


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


def evaluate(model: nn.Module, width: int = 64) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, width))
    model.train()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "gathered"


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param.to_local().detach().clone() for param in optimizer.param_groups[0]["params"]]


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
def test_parts_of_a_gathered_module_are_saved_and_loaded_as_sections_of_their_own(store: Path) -> None:
    model, optimizer = make(inner=False)
    state: dict[str, object] = {"optimizer": optimizer, "first": model[0], "second": model[1]}
    evaluate(model)
    expected = held(optimizer)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "it still is as the evaluation left it"
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.to_local().detach().fill_(math.nan)
        evaluate(model)
        checkpointer.load(state)
    assert all(map(torch.equal, held(optimizer), expected))
    assert model(torch.ones(2, 64)).isfinite().all(), "the next forward gathers what was loaded"


class Tied(nn.Module):
    """A layer whose weight is used under two names, and a pass that can be made to wait in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.two.weight = self.one.weight
        self.is_inside, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        self.is_inside.set()
        assert self.may_end.wait(60)
        out: torch.Tensor = self.two(x)
        return out


def tied(*, reshard: bool) -> tuple[Tied, nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner, mesh = Tied(), init_device_mesh("cpu", (1,))
    model = nn.Sequential(inner, nn.BatchNorm1d(32))
    fully_shard(inner, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return inner, model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 64).view(2, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.usefixtures("group")
def test_a_save_on_another_thread_leaves_the_forward_pass_alone_that_is_under_way(store: Path, reshard: bool) -> None:
    expected = held(tied(reshard=reshard)[2])
    inner, model, optimizer = tied(reshard=reshard)
    reference = tied(reshard=reshard)
    train(*reference[1:])
    failures: list[Exception] = []

    def run() -> None:
        try:
            train(model, optimizer)
        except Exception as error:
            failures.append(error)

    state = {"model": model, "optimizer": optimizer}
    with fs.Checkpointer(store) as checkpointer:
        inner.is_inside.clear()
        inner.may_end.clear()
        training = threading.Thread(target=run)
        training.start()
        assert inner.is_inside.wait(60)
        save = checkpointer.save(1, state)
        inner.may_end.set()
        training.join()
        assert not failures
        assert all(map(torch.equal, held(optimizer), held(reference[2]))), "the step is as without the save"
        save.committed.result()
        checkpointer.load(state)
        assert all(map(torch.equal, held(optimizer), expected)), "what was saved is from before the step"


@pytest.mark.usefixtures("group")
def test_torchs_own_state_dicts_can_be_had_of_the_shards_while_the_module_is_gathered() -> None:
    _, model, optimizer = tied(reshard=False)
    evaluate(model, width=32)
    shards = with_shards(model)
    loaded = get_model_state_dict(shards)
    slots = get_optimizer_state_dict(shards, optimizer)["state"]
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing has changed"
    assert loaded.keys() == model.state_dict().keys()
    assert isinstance(loaded["0.one.weight"], DTensor)
    assert loaded["0.one.weight"].to_local().data_ptr() == loaded["0.two.weight"].to_local().data_ptr()
    own = next(iter(optimizer.state.values()))["exp_avg"]
    assert torch.equal(slots["0.one.weight"]["exp_avg"].to_local(), own.to_local())


def test_a_module_that_fsdp2_does_not_manage_is_itself() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert with_shards(plain) is plain
