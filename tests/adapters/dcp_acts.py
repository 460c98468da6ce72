"""Functions that ranks run in tests of the DCP adapter: saves and loads only through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import itertools
import os
import resource
import signal
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneStager, FlowstoneWriter

ROWS = 37  # no multiple of any number of ranks


def wholes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.rand(ROWS, 24, generator=generator) for name in ("rows", "columns", "same", "few")} | {
        "few": torch.arange(2.0)
    }


def sharded(zero: bool = False) -> dict[str, Any]:
    """The same tensors on any number of ranks: in rows, in columns, on all, and one with fewer elements than ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "few": Shard(0)}
    return {
        name: distribute_tensor(torch.zeros_like(whole) if zero else whole, mesh, [places[name]])
        for name, whole in wholes().items()
    }


def same(state: dict[str, Any]) -> bool:
    result = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    return all(torch.equal(result[name], whole) for name, whole in wholes().items())


def save_sharded(rank: int, path: str) -> bool:
    state = {"model": sharded(), "step": 7, "all": torch.full((3,), 2.0)}
    dcp.save(state, storage_writer=FlowstoneWriter(path))
    return True


def save_replicas(rank: int, path: str, to_lowest: bool) -> bool:
    """What all ranks hold: DCP's planner leaves each tensor to one of them."""
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest)
    dcp.save(dict(wholes()), storage_writer=FlowstoneWriter(path), planner=planner)
    into = {name: torch.zeros_like(whole) for name, whole in wholes().items()}
    dcp.load(into, storage_reader=FlowstoneReader(path))
    return same(into)


def load_sharded(rank: int, path: str, then: str = "") -> list[object]:
    state = {"model": sharded(zero=True), "step": 0, "all": torch.zeros(3)}
    dcp.load(state, storage_reader=FlowstoneReader(path))
    if then:
        dcp.save(state, storage_writer=FlowstoneWriter(then))
    return [same(state["model"]), state["step"], state["all"].tolist()]


def load_whole(rank: int, path: str) -> bool:
    """Into plain tensors, of what ranks have saved in parts."""
    state = {"model": {name: torch.zeros_like(whole) for name, whole in wholes().items()}}
    dcp.load(state, storage_reader=FlowstoneReader(path))
    return same(state["model"])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 16), 0.1 + step)).square().sum().backward()
        optimizer.step()


def full(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: full(item) for key, item in state.items()}
    if isinstance(state, list):
        return [full(item) for item in state]
    return state.full_tensor() if isinstance(state, DTensor) else copy.deepcopy(state)


def equal(value: Any, other: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(equal(value[key], other[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(equal, value, other))
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def fsdp(rank: int, path: str) -> bool:
    """FSDP2 with AdamW: saved, trained on, loaded into objects made anew, trained on: bit for bit the same."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    train(model, optimizer, 2)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optim": states[1]}, storage_writer=FlowstoneWriter(path))
    train(model, optimizer, 2)
    expected = full(get_state_dict(model, optimizer)[0])

    model, optimizer = made()
    states = get_state_dict(model, optimizer)
    into: dict[str, Any] = {"model": states[0], "optim": states[1]}
    dcp.load(into, storage_reader=FlowstoneReader(path))
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    train(model, optimizer, 2)
    return equal(full(get_state_dict(model, optimizer)[0]), expected)


def cached(rank: int, parent: str) -> list[object]:
    """Three saves by cached plans: values, then a shape change in between."""
    kept = {name: mock.patch.object(SavePlanner, name, {}) for name in vars(SavePlanner) if name.startswith("_cached")}
    for thread in kept.values():
        thread.start()
    writer, collected = FlowstoneWriter(), []
    for step, rows in ((1, 4), (2, 4), (3, 6)):
        state = {"mine": sharded()["rows"], "w": torch.full((rows, 2), float(step)), "step": step}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"{parent}/step-{step}", storage_writer=writer, planner=planner)
        into = {"mine": sharded(zero=True)["rows"], "w": torch.zeros(rows, 2), "step": 0}
        dcp.load(into, checkpoint_id=f"{parent}/step-{step}", storage_reader=FlowstoneReader())
        whole = into["mine"].full_tensor()
        collected.append([into["step"], into["w"].unique().tolist(), torch.equal(whole, wholes()["rows"])])
    return collected


def refuse_one(rank: int, path: str, which: int) -> list[str]:
    """The system refuses one rank its file: what every rank is told."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == which:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    big = distribute_tensor(torch.ones(2, 1 << 19), init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        dcp.save({"big": big}, storage_writer=FlowstoneWriter(path))
    except CheckpointException as error:
        return [f"{key}:{type(failure[0]).__name__}:{failure[0]}" for key, failure in error.failures.items()]
    return []


class DiesAt(dcp.DefaultSavePlanner):
    """Kills its process when it is asked for the first tensor; the others are held up until they are killed."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def lookup_object(self, index: Any) -> Any:
        if dist.get_rank() == self.which:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().lookup_object(index)


def die_while_saving(rank: int, path: str, which: int) -> None:
    state = {"model": {name: tensor.zero_() for name, tensor in sharded().items()}, "step": 8, "all": torch.zeros(3)}
    Path(f"{path}.began-{rank}").touch()
    dcp.save(state, storage_writer=FlowstoneWriter(path), planner=DiesAt(which))


def differ(rank: int, store: str) -> str:
    """Each rank is given another step of a store: it is told, and nothing is loaded."""
    state = {"x": torch.zeros(2)}
    try:
        dcp.load(state, storage_reader=FlowstoneReader(f"{store}/step-{rank:08d}"))
    except CheckpointException as error:
        return " ".join(str(failure[0]) for failure in error.failures.values())
    return "loaded"


def opened(rank: int, path: str) -> int:
    return fs.open(path).manifest.ranks


def save_async(rank: int, parent: str, kind: str) -> list[bool]:
    """Each state is overwritten as soon as async_save has returned."""
    writer, collected = FlowstoneWriter(), []
    kinds = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)  # which torch 2.6 has not
    chosen = {"async_checkpointer_type": kinds(kind)} if kinds else {}
    for step in (1, 2, 3):
        state = {"model": sharded(), "step": step}
        saved: Any = dcp.async_save(
            state, checkpoint_id=f"{parent}/step-{step}", storage_writer=writer, **chosen
        )
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        saved.result()
        into = {"model": sharded(zero=True), "step": 0}
        dcp.load(into, storage_reader=FlowstoneReader(f"{parent}/step-{step}"))
        collected.append(same(into["model"]) and into["step"] == step)
    return collected


def fail_async(rank: int, path: str) -> str:
    os.mkdir(path)
    Path(path, "mine.txt").touch()
    saved: Any = dcp.async_save({"x": torch.ones(2)}, storage_writer=FlowstoneWriter(path))
    error = saved.exception()
    kinds = {base.__name__ for failure in error.failures.values() for base in type(failure[0]).__mro__}
    return f"{sorted(kinds)} {error}"


class TellsMaps(dcp.DefaultSavePlanner):
    """Writes down what memory its process has mapped when the plan is made."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def create_local_plan(self) -> Any:
        Path(f"{self.path}/maps-{dist.get_rank()}").write_text(Path("/proc/self/maps").read_text())
        return super().create_local_plan()


def maps_of_writer(rank: int, path: str) -> list[bool]:
    state = {"model": sharded(), "plain": torch.arange(1000.0)}
    saved: Any = dcp.async_save(
        state, checkpoint_id=f"{path}/step-1", storage_writer=FlowstoneWriter(), planner=TellsMaps(path),
        async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
    )
    saved.result()
    into = {"model": sharded(zero=True), "plain": torch.zeros(1000)}
    dcp.load(into, storage_reader=FlowstoneReader(f"{path}/step-1"))
    text = Path(f"{path}/maps-{rank}").read_text()
    is_same = same(into["model"]) and torch.equal(into["plain"], state["plain"])
    # The one that torch may have moved is the device mesh's own, of the ranks in it.
    return [is_same, "flowstone-staged" in text, text.count("/torch_") <= 1]


def staged_nothing(rank: int) -> list[int]:
    """What a rank stages of a tensor with fewer rows than ranks."""
    tensor = distribute_tensor(torch.ones(1, 3), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    staged: Any = FlowstoneStager().stage({"x": tensor})
    return list(staged["x"].to_local().shape)


def staged_mesh(rank: int) -> bool:
    state = {"model": sharded()}
    staged: Any = FlowstoneStager().stage(state)
    return all(tensor.device_mesh is state["model"][name].device_mesh for name, tensor in staged["model"].items())


def save_in_background(rank: int, path: str) -> list[object]:
    stager, state = FlowstoneStager(in_background=True), {"x": torch.ones(2), "step": 4}
    both: Any = dcp.async_save(state, storage_writer=FlowstoneWriter(path), async_stager=stager)
    both.staging_completion.result()
    state["x"].zero_()
    both.upload_completion.result()
    stager.close()
    into = {"x": torch.zeros(2), "step": 0}
    dcp.load(into, storage_reader=FlowstoneReader(path))
    return [into["step"], into["x"].tolist()]


def fsdp_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def save_by_checkpointer(rank: int, store: str) -> None:
    model, optimizer = fsdp_net()
    train(model, optimizer, 2)
    with fs.Checkpointer(store) as ckpt:
        ckpt.save(2, {"model": model, "optim": optimizer}).committed.result()
    whole = full(list(get_state_dict(model, optimizer)))
    if rank == 0:
        torch.save(whole, f"{store}/whole.pt")


def load_of_checkpointer(rank: int, path: str, whole: str) -> bool:
    model, optimizer = fsdp_net()
    states = get_state_dict(model, optimizer)
    into: dict[str, Any] = {"model": states[0], "optim": states[1]}
    dcp.load(into, storage_reader=FlowstoneReader(path))
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    return equal(full(list(get_state_dict(model, optimizer))), torch.load(whole))


def _sharding(name: str) -> ShardingSpec:
    """How rows, or columns, of a matrix of 10 x 20 lie on two ranks."""
    if name in ("rows", "columns"):
        return ChunkShardingSpec(dim=int(name == "columns"), placements=["rank:0/cpu", "rank:1/cpu"])
    if name == "turns":
        return ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in (0, 1, 1, 0)])
    blocks = {"uneven": ((2, 0), (1, 1), (3, 0), (3, 1), (1, 0)), "other": ((8, 1), (2, 0))}[name]
    begins = [sum(rows for rows, _ in blocks[:index]) for index in range(len(blocks))]
    return EnumerableShardingSpec([
        ShardMetadata(shard_offsets=[begin, 0], shard_sizes=[rows, 20], placement=f"rank:{rank}/cpu")
        for begin, (rows, rank) in zip(begins, blocks, strict=True)
    ])


def reshard(rank: int, path: str, names: list[str]) -> list[bool]:
    """ShardedTensors saved by each sharding and loaded into each: the same path again and again. Each second save is
    one of a staged copy, whose original changes before it."""
    equal, stager = [], FlowstoneStager()
    for number, (saved, loaded) in enumerate(itertools.product(names, names)):
        state = {"sharded": sharded_tensor.rand(_sharding(saved), 10, 20), "number": torch.tensor(number), "blob": b"b"}
        into = {"sharded": sharded_tensor.zeros(_sharding(loaded), 10, 20), "number": torch.tensor(-1), "blob": b""}
        saved_state: dict[str, Any] = state
        if number % 2:
            saved_state = cast("dict[str, Any]", stager.stage(state))
            kept = [shard.tensor.clone() for shard in state["sharded"].local_shards()]
            for shard in state["sharded"].local_shards():
                shard.tensor.zero_()
        dcp.save(saved_state, storage_writer=FlowstoneWriter(path))
        if number % 2:
            for shard, tensor in zip(state["sharded"].local_shards(), kept, strict=True):
                shard.tensor.copy_(tensor)
        dcp.load(into, storage_reader=FlowstoneReader(path))
        whole = [torch.zeros(10, 20) if rank == 0 else None for _ in range(2)]
        state["sharded"].gather(out=whole[0])
        into["sharded"].gather(out=whole[1])
        there = rank > 0 or torch.equal(whole[0], whole[1])
        equal.append(there and int(into["number"]) == number and into["blob"] == b"b")
    return equal
