"""FSDP2 with shards and optimizer state in a device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import flowstone as fs
from flowstone.config import MIB
from simulated_device import SimulatedDevice, visible_device


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with visible_device(SimulatedDevice(64 * MIB)) as device:
            yield device
    finally:
        dist.destroy_process_group()


def training(far: SimulatedDevice, seed: int) -> dict[str, object]:
    """A model whose layers are gathered one by one, and an AdamW; both have stepped once."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            for param in group.fsdp_params:
                shard = far.tensor(param._sharded_param_data)
                param._sharded_param_data = shard
                param.sharded_param._local_tensor.data = shard.view(param.sharded_param._local_tensor.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "step": seed}
    step(state)
    for slots in optimizer.state.values():
        for slot in slots.values():
            if isinstance(slot, DTensor):
                slot._local_tensor.data = far.tensor(slot._local_tensor)
    return state


def step(state: dict[str, object]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model(torch.ones(4, 256)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def own(state: dict[str, object]) -> list[torch.Tensor]:
    optimizer = state["optimizer"]
    slots = [slot for of in optimizer.state.values() for slot in of.values()]
    return [p._local_tensor if isinstance(p, DTensor) else p for p in (*state["model"].parameters(), *slots)]


def test_shards_of_fsdp_are_captured_beside_training_and_come_back(far: SimulatedDevice, tmp_path: Path) -> None:
    state = training(far, 1)
    assert sum(far.holds(tensor) for tensor in own(state)) == 12, "weights and biases, and two slots of each"
    with fs.Checkpointer(tmp_path / "run", budget_bytes=32 * MIB) as checkpointer:
        saves, kept = [], []
        for number in (1, 2, 3):
            kept.append([tensor.clone() for tensor in own(state)])
            saves.append(checkpointer.save(number, state))
            step(state)  # gathers and reshards, and waits for the capture before it steps
        for save in saves:
            save.committed.result(60)
        other = training(far, 2)
        for number in (1, 2, 3):
            assert checkpointer.load(other, step=number).step == number
            assert all(map(torch.equal, own(other), kept[number - 1]))
        step(other)
        assert all(map(torch.equal, own(other), own(state))), "and training goes on from there alike"
    assert far.native.copies > 0
