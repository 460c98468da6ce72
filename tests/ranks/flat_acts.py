"""Functions of the test of layouts: real training, in jobs of 3, 2 and 1 ranks in the same processes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from acts import opened, save_steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import flowstone as fs

SIZES = (3, 2, 1)
KINDS = ("plain", "zero", "fsdp2", "flat", "original")
SAVES = {(kind, size): i for i, (size, kind) in enumerate(itertools.product(SIZES, KINDS), 1)}  # and their steps
STRATEGIES = {"flat": ShardingStrategy.FULL_SHARD, "original": ShardingStrategy.SHARD_GRAD_OP}
COLLECTIVES = [
    name for name in dir(dist.distributed_c10d) if name.startswith(
        ("all_", "reduce_scatter", "broadcast", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv")
    )
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(6, 11)
        self.conv = nn.Conv1d(1, 3, 3)
        self.last = nn.Sequential(nn.Linear(27, 5), nn.Linear(5, 2, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.conv(self.first(x).unsqueeze(1)).flatten(1)) * self.scale
        return out


class Training:
    """A model of one kind with its optimizer, and what it holds in all, by name."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind, net = kind, Net()
        make: Any = torch.optim.Adam
        self.model: nn.Module = net
        if kind in ("flat", "original"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that one rank needs no sharding
                self.model = FullyShardedDataParallel(
                    net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=kind == "original",
                    device_id=torch.device("cpu"), sharding_strategy=STRATEGIES[kind],
                )
        elif kind == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(net.last, mesh=mesh)
            fully_shard(net, mesh=mesh)
        elif kind == "zero":
            self.model = DistributedDataParallel(net)
            make = lambda parameters, lr: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)  # noqa: E731
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=0.01 * seed)
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}

    def forward(self) -> torch.Tensor:
        """Without a backward, that leaves behind what has been gathered."""
        loss: torch.Tensor = self.model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
        return loss

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor, whole, as torch itself gathers it."""
        if self.kind in ("flat", "original"):
            return self._unflattened()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named = [(name.removeprefix("module."), parameter) for name, parameter in self.model.named_parameters()]
        parameters = {name: tensor.detach() for name, tensor in named}
        owner = getattr(self.optimizer, "optim", self.optimizer)
        slots = {name: dict(owner.state[item]) for name, item in named if item in owner.state}
        if owner is not self.optimizer:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, slots)
            slots = {name: of for part in parts for name, of in part.items()}
        result = {f"model.{name}": parameter for name, parameter in parameters.items()}
        result |= {
            f"optimizer.state.model.{name}.{slot}": value for name, of in slots.items() for slot, value in of.items()
        }
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in result.items()}

    def _unflattened(self) -> dict[str, torch.Tensor]:
        """Of FSDP1: each slot is put where the parameters are, for a moment, and gathered as these are.

        Its own optim_state_dict() cannot be asked: with original parameters, exp_avg is what exp_avg_sq was.
        """
        result = {}
        own = [(parameter.data, self.optimizer.state.get(parameter, {})) for parameter in self.model.parameters()]
        before = [data.clone() for data, _ in own]
        for slot in (None, "exp_avg", "exp_avg_sq"):
            for data, slots in own:
                data.copy_(slots.get(slot, data))
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
                for key, parameter in self.model.named_parameters():
                    name = "model." + key.replace("_fsdp_wrapped_module.", "")
                    result[name if slot is None else f"optimizer.state.{name}.{slot}"] = parameter.detach().clone()
        for (data, _), was in zip(own, before, strict=True):
            data.copy_(was)
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, [float(slots["step"]) for _, slots in own if slots])
        (number,) = {item for of in steps for item in of}
        names = [name for name in result if name.startswith("model.")]
        return result | {f"optimizer.state.{name}.step": torch.tensor(number) for name in names}


@contextmanager
def no_collectives() -> Iterator[None]:
    """Reports any communication that bypasses the store, on any thread."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func.namespace not in ("c10d", "_c10d_functional"), func
            return func(*args, **kwargs or {})

    refuse = {name: mock.Mock(side_effect=AssertionError(f"{name} was called")) for name in COLLECTIVES}
    public = {name: of for name, of in refuse.items() if hasattr(dist, name)}
    with mock.patch.multiple(dist.distributed_c10d, **refuse), mock.patch.multiple(dist, **public), Watch():
        yield
    assert not any(of.called for of in refuse.values())


def every_layout(rank: int, path: str) -> int:
    """Save every kind on any number of ranks, load each of those into every kind on any number of ranks; how many."""
    store = dist.distributed_c10d._get_default_store()
    for how in ("flat", "original"):
        save_steps(rank, f"{path}-{how}", how, 2)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        mixed_precision(f"{path}-{strategy}", ShardingStrategy[strategy])
    dist.destroy_process_group()
    done = 0
    for number, size in enumerate((*SIZES, *SIZES)):
        if rank >= size:
            continue
        with job_of(store, number, rank, size), opened(path) as checkpointer:
            for kind in KINDS:
                if number < len(SIZES):
                    save_one(checkpointer, kind, size, f"{path}-")
                else:
                    done += load_all(checkpointer, kind, f"{path}-")
    return done


@contextmanager
def job_of(store: Any, number: int, rank: int, size: int) -> Iterator[None]:
    """A job of the first `size` processes, over the store of them all."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"job {number}", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()


def mixed_precision(path: str, strategy: ShardingStrategy) -> None:
    """What is computed in bfloat16 is saved as float32, buffers too; a load is seen by the very next forward."""
    torch.manual_seed(0)
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    )
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), device_id=torch.device("cpu"),
        mixed_precision=precision, sharding_strategy=strategy, use_orig_params=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    x = torch.linspace(-1, 1, 24).view(4, 6)

    def train() -> None:
        model.train()(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with opened(path) as checkpointer:
        train()
        model(x)
        checkpointer.save(1, state).committed.result(60)
        right = model.eval()(x).detach().clone()
        train()
        assert not torch.equal(model.eval()(x), right)
        checkpointer.load(state)
        assert torch.equal(model(x), right), strategy
        train()
    tensors = fs.open(path).tensors
    assert {tensors[name].dtype for name in tensors if "batches" not in name} == {"float32"}


def save_one(checkpointer: fs.Checkpointer, kind: str, size: int, beside: str) -> None:
    step = SAVES[kind, size]
    training = Training(kind, seed=step)
    training.step()
    training.step()
    whole = training.whole()
    training.forward()
    with no_collectives():
        checkpointer.save(step, training.state).committed.result(60)
    losses = [training.step(), training.step()]
    if dist.get_rank() == 0:
        torch.save((whole, losses), f"{beside}{step}.pt")


def load_all(checkpointer: fs.Checkpointer, kind: str, beside: str) -> int:
    training = Training(kind, seed=99)
    few = {"zero", "plain"}  # a zero optimizer meets only these: its state is whole
    sources = [step for (source, _), step in SAVES.items() if "zero" not in (kind, source) or {kind, source} <= few]
    for step in sources:
        training.forward()
        with no_collectives():
            checkpointer.load(training.state, step=step)
        right, losses = torch.load(f"{beside}{step}.pt")
        loss = training.forward()
        torch.testing.assert_close(float(loss.detach()), losses[0], rtol=1e-5, atol=0)
        loss.backward()
        whole = training.whole()
        assert whole.keys() == right.keys(), whole.keys() ^ right.keys()
        for name, tensor in right.items():
            assert torch.equal(tensor, whole[name]), (kind, step, name)
        torch.testing.assert_close([training.step(), training.step()], losses, rtol=1e-5, atol=0)
    return len(sources)


def noted(name: str) -> dict[str, object]:
    """Slots of the parameter of that name that are no tensors."""
    return {"scale": 0.1 * len(name), "mode": f"as {name}", "seen": [len(name), None, (2.5, "x")], "big": 1 << 80}


def slots_by_name(training: Training) -> dict[str, dict[Any, Any]]:
    """By name, the slots of the parameters of which this rank has something to keep."""
    owner = getattr(training.optimizer, "optim", training.optimizer)
    named = [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in training.model.named_parameters()]
    return {
        name.removeprefix("module."): owner.state[part] for name, part in named if part.numel() and part in owner.state
    }


def slots_without_tensors(rank: int, path: str) -> dict[str, list[str]]:
    """Two ranks save slots that are no tensors, each for what it keeps; one and three ranks load them."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    kinds = ("original", "zero")
    loads = [(kind, into) for kind in kinds for into in (kind, "plain")]
    tensors: dict[str, list[str]] = {}
    for number, size in enumerate((2, 1, 3)):
        if rank >= size:
            continue
        with job_of(store, number, rank, size), opened(path) as checkpointer:
            for step, kind in enumerate(kinds if number == 0 else (), 1):
                training = Training(kind, seed=step)
                training.step()
                for name, slots in slots_by_name(training).items():
                    slots.update(noted(name))
                checkpointer.save(step, training.state).committed.result(60)
            for again, (kind, into) in enumerate(loads if number else (), 10 * number):
                training = Training(into, seed=99)
                for parameter in training.model.parameters() if into == "original" else ():
                    training.optimizer.state[parameter] = {"mode": "made with the optimizer, also where nothing lies"}
                checkpointer.load(training.state, step=1 + kinds.index(kind))
                slots_of = slots_by_name(training)
                for name, slots in slots_of.items():
                    plain = {slot: value for slot, value in slots.items() if not isinstance(value, torch.Tensor)}
                    assert plain == noted(name), (kind, into, size, name, plain)
                    assert slots.keys() == {*noted(name), "step", "exp_avg", "exp_avg_sq"}
                training.step()
                checkpointer.save(again, training.state).committed.result(60)
                checkpointer.load(training.state, step=again)
                tensors[f"{kind} {into} {size}"] = sorted(slots_of)
    return tensors
