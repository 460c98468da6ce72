"""The state of one rank in a hostile job: sections with every kind of layout over ranks, and their parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import flowstone as fs
from hostile.states import LAZY_FROM_BYTES, OPTIMIZERS

WIDTH = 160  # its layer has 100 KiB, which is captured lazily if it is not sharded
TALL = 1283  # rows, divisible by no number of ranks
STAGES = 5
STEPPING = ("adamw", "adamw-foreach", "adamw-fused", "amsgrad", "sgd", "rmsprop")  # slots can have any layout
Holding = Literal["part", "replica", "buffer"]
"""The role of a tensor on a rank: a part that no other rank has, a replica, or a value that may differ."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the tensor called `name` that this rank holds: a box, or a range of its elements.

    local  its memory, a plain tensor
    """

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    holding: Holding
    begin: int | None = None  # first element, if it is not a box


class Net(nn.Module):
    """Layers that are lazy, one that is not, and statistics of each rank's own batches."""

    def __init__(self, *, large: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 4000 if large else WIDTH), nn.Linear(WIDTH, 8))
        self.norm = nn.BatchNorm1d(WIDTH)


class Tall(nn.Module):
    """Long enough that a part on each of four ranks is lazy."""

    def __init__(self, *, large: bool) -> None:
        super().__init__()
        self.tall = nn.Linear(720 if large else 96, TALL)
        self.small = nn.Linear(WIDTH, 7)


class Loader:
    """A loader that records the batches that it has returned on this rank."""

    def __init__(self, rank: int) -> None:
        self.left = [rank, 1]

    def state_dict(self) -> dict[str, object]:
        return {"left": list(self.left)}

    def load_state_dict(self, stored: dict[str, list[int]]) -> None:
        self.left = list(stored["left"])


class Job:
    """One rank's part of the state. The same `kinds` and `optimizer` make the same state on any number of ranks.

    large  each rank has to write more than one request, so that some data stays uncaptured for a while
    """

    def __init__(self, kinds: Sequence[str], optimizer: str, seed: int, *, large: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.state: dict[str, Any] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.sources: list[Callable[[], Iterator[Part]]] = []
        self.kind, self.large, self.steps = optimizer, large, 0
        for kind in kinds:
            torch.manual_seed(seed)
            MAKERS[kind](self)
        self.state["note"] = {"kinds": list(kinds), "steps": 0}

    def parts(self) -> list[Part]:
        """All parts that a checkpoint of all ranks takes from this one."""
        return [part for source in self.sources for part in source()]

    def lazy(self, *, replicas: bool = True) -> list[torch.Tensor]:
        """The tensors that are captured after `save` returns; without `replicas`, only those on no other rank."""
        return [
            part.local for part in self.parts()
            if part.local.nbytes >= LAZY_FROM_BYTES and part.holding != "buffer" and part.name.split(".")[0] != "plain"
            and (replicas or part.holding == "part")
        ]

    @torch.no_grad()
    def step(self) -> None:
        """A step of every optimizer. Replicas stay equal; statistics differ between ranks."""
        self.steps += 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.full_like(parameter, math.sin(self.steps))
            optimizer.step()
            optimizer.zero_grad()
        for part in self.parts():
            if part.holding == "buffer" and part.local.is_floating_point():
                part.local.add_(0.01 * (self.rank + 1))
        self.state["note"]["steps"] = self.steps

    @torch.no_grad()
    def make_alike(self) -> None:
        """Replicas get the values of the lowest rank that has all of them; a collective."""
        for part in self.parts():
            if part.holding == "replica" and part.name.split(".")[0] in EVERYWHERE:
                dist.broadcast(part.local, 0)
        counts = torch.tensor([self.steps])
        dist.broadcast(counts, 0)
        self.steps = self.state["note"]["steps"] = int(counts)

    def optimize(self, section: str, module: nn.Module | Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else list(module)
        optimizer = OPTIMIZERS[self.kind](parameters)
        self.optimizers.append(optimizer)
        if section:
            self.state[section] = optimizer
        return optimizer


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Created once in a process, because each creates groups that stay."""
    return init_device_mesh("cpu", shape)


def two_dimensions(size: int) -> tuple[int, int] | None:
    return (2, size // 2) if size > 2 and size % 2 == 0 else None


def held(name: str, tensor: torch.Tensor, holding: Holding) -> Part:
    """The part of a tensor under its name; a DTensor knows its part."""
    if not isinstance(tensor, DTensor):
        return Part(name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim, holding)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor._local_tensor.detach()
    assert tuple(local.shape) == tuple(shape)
    whole = all(placement.is_replicate() for placement in tensor.placements)
    shared = whole or any(placement.is_replicate() for placement in tensor.placements)
    return Part(name, local, tuple(tensor.shape), tuple(offset), "replica" if shared else "part")


def of_module(path: str, module: nn.Module, holding: Holding) -> Iterator[Part]:
    buffers = {name for name, _ in module.named_buffers()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        yield held(f"{path}.{name}", tensor, "buffer" if name in buffers and holding == "replica" else holding)


def of_optimizer(
    path: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], holding: Holding
) -> Iterator[Part]:
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                number = "replica" if value.ndim == 0 and holding == "part" and "@" not in path else holding
                yield held(f"{path}.state.{names[id(parameter)]}.{slot}", value, number)


def names_of(path: str, module: nn.Module) -> dict[int, str]:
    return {id(parameter): f"{path}.{name}" for name, parameter in module.named_parameters()}


def _trained(job: Job, section: str, module: nn.Module, holding: Holding) -> None:
    """A module and its optimizer, both in the state."""
    job.state[section] = module
    optimizer = job.optimize(f"{section}_optimizer", module)
    job.sources.append(lambda: of_module(section, module, holding))
    job.sources.append(lambda: of_optimizer(f"{section}_optimizer", optimizer, names_of(section, module), holding))


def _whole(job: Job) -> None:
    """Equal on all ranks, like under DDP, except for statistics."""
    _trained(job, "whole", Net(large=job.large), "replica")


def _fsdp(job: Job) -> None:
    """Sharded by FSDP2."""
    module = Tall(large=job.large)
    mesh = mesh_of(job.size)
    fully_shard(module.tall, mesh=mesh)
    fully_shard(module, mesh=mesh)
    _trained(job, "fsdp", module, "part")


def _mesh(job: Job) -> None:
    """DTensors sharded by columns, or in two dimensions: by rows, and replicated."""
    module = Tall(large=job.large)
    shape = two_dimensions(job.size)
    mesh = mesh_of(*(shape or (job.size,)))
    placements: list[Placement] = [Replicate(), Shard(0)] if shape else [Shard(0)]
    for layer in (module.tall, module.small):
        _distribute(layer, mesh, placements)
    _trained(job, "mesh", module, "part")


def _distribute(layer: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def _flat(job: Job) -> None:
    """A flat tensor of which each rank has a range of elements, also of the slots: ZeRO."""
    rows = 2000 if job.large else 211
    members = [("first", (rows, 300)), ("second", (999,)), ("third", (rows, 221))]
    count = sum(math.prod(shape) for _, shape in members)
    each = -(-count // job.size)
    begin, end = min(job.rank * each, count), min((job.rank + 1) * each, count)
    parameter = nn.Parameter(torch.randn(count)[begin:end].clone())
    optimizer = job.optimize("flat_optimizer", [parameter])
    job.state["flat"] = {"body": fs.Flat(parameter, members, begin)}

    def cut(prefix: str, suffix: str, buffer: torch.Tensor) -> Iterator[Part]:
        first = 0
        for name, shape in members:
            low, high = max(begin, first), min(end, first + math.prod(shape))
            if low < high:
                full = f"{prefix}flat.body.{name}{suffix}"
                if buffer.ndim == 0:
                    yield Part(full, buffer.detach(), (), (), "replica")
                else:
                    yield Part(full, buffer.detach()[low - begin : high - begin], shape, (), "part", low - first)
            first += math.prod(shape)

    def every() -> Iterator[Part]:
        yield from cut("", "", parameter)
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield from cut("flat_optimizer.state.", f".{slot}", value)

    job.sources.append(every)


def _shards(job: Job) -> None:
    """Parts of tensors that are declared by hand, without an optimizer."""
    rows = [rank * TALL // job.size for rank in range(job.size + 1)]
    begin, end = rows[job.rank], rows[job.rank + 1]
    local = torch.randn(TALL, 70)[begin:end].clone()
    job.state["shards"] = {"table": fs.Shard(local, (TALL, 70), (begin, 0))}
    job.sources.append(lambda: iter([Part("shards.table", local, (TALL, 70), (begin, 0), "part")]))


def _own(job: Job) -> None:
    """A separate model, optimizer and loader on each rank."""
    torch.manual_seed(100 + job.rank)
    module, path = Net(large=job.large), f"own@{job.rank}"
    optimizer = job.optimize("", module)
    loader = Loader(job.rank)
    job.state["own"] = fs.PerRank({"model": module, "optimizer": optimizer, "loader": loader})
    job.sources.append(lambda: of_module(f"{path}.model", module, "part"))
    job.sources.append(lambda: of_optimizer(f"{path}.optimizer", optimizer, names_of("own.model", module), "part"))


def _stages(job: Job) -> None:
    """Layers under their global numbers, each on one rank."""
    layers = {f"{number}": nn.Linear(WIDTH, 2500 if job.large else WIDTH) for number in range(STAGES)}
    mine = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) % job.size == job.rank})
    _trained(job, "stages", mine, "part")


def _views(job: Job) -> None:
    """Shards of two tensors with different types that are views of the same memory."""
    rows = 240 // job.size
    flat, shape, offset = torch.randn(rows * 100), (240, 100), (rows * job.rank, 0)
    shards = {"rows": flat.view(rows, 100), "bits": flat.view(torch.int32).view(rows, 100)}
    job.state["views"] = {name: fs.Shard(view, shape, offset) for name, view in shards.items()}
    job.sources.append(lambda: (Part(f"views.{name}", view, shape, offset, "part") for name, view in shards.items()))


def _plain(job: Job) -> None:
    """Tensors that no optimizer steps, equal on all ranks."""
    table = torch.randn(30_000)
    job.state["plain"] = {"table": table, "words": ["the", "same"]}
    job.sources.append(lambda: iter([held("plain.table", table, "replica")]))


def _rng(job: Job) -> None:
    """Generators, which change by themselves."""
    job.state["rng"] = fs.rng()


MAKERS: Mapping[str, Callable[[Job], None]] = {
    "whole": _whole, "fsdp": _fsdp, "mesh": _mesh, "flat": _flat, "shards": _shards, "own": _own, "stages": _stages,
    "views": _views, "plain": _plain, "rng": _rng,
}
EVERYWHERE = frozenset({"whole", "whole_optimizer", "plain"})  # sections that every rank has in full
TRAINED = ("whole", "fsdp", "mesh", "flat", "own", "stages")
BESIDE = ("shards", "plain", "rng", "views")
