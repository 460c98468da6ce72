"""States that hostile loops train: models of several shapes, every kind of optimizer, and additional state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import flowstone as fs

WIDTH = 192  # its layer has 144 KiB, or 72 in 16 bits: both are captured lazily
ROWS = 400
LAZY_FROM_BYTES = 64 * 1024


class Net(nn.Module):
    """An embedding, layers of equal width, a wide pair, a norm with buffers, and a head that may be tied."""

    def __init__(self, chance: Random, *, contiguous: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(chance.randint(2, 4))])
        wide = 8 * WIDTH if chance.random() < 0.3 else 2 * WIDTH  # the former has more than one chunk
        self.wide = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if chance.random() < 0.3:
            self.head.weight = self.embedding.weight
        if chance.random() < 0.3 and not contiguous:
            strided = torch.empty(WIDTH, WIDTH).t().copy_(self.body[0].weight.detach())
            self.body[0].weight = nn.Parameter(strided.t().contiguous().t())
        self.register_buffer("table", torch.rand(LAZY_FROM_BYTES // 4))
        self.recompute = False  # gradient checkpointing

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers).float().mean(1)
        for layer in self.body:
            x = x + (checkpoint(_through, layer, x, use_reentrant=False) if self.recompute else _through(layer, x))
        x = self.norm(x + self.wide(x))
        return cast("torch.Tensor", self.head(x))


def _through(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer(x.to(next(layer.parameters()).dtype))).float()


class ScheduleFree(torch.optim.Optimizer):
    """Like schedule-free optimizers: weights are swapped in place between training and evaluation."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "training": True})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] == training:
                continue
            group["training"] = training
            for parameter in group["params"]:
                slots = self.state[parameter]
                if "z" in slots:
                    parameter.lerp_(slots["z"], 1 - group["beta"] if training else 1 - 1 / group["beta"])

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._move(True)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                slots = self.state[parameter]
                if "z" not in slots:
                    slots["z"] = parameter.detach().clone()
                slots["z"].sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(slots["z"], 0.1)


class Accelerated:
    """Wraps an optimizer without being one, like `accelerate`, so it supports no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(stored)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def train(self) -> None: ...


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that contains another one, and a generator: its state_dict() has both, as objects."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.held = {"generator": torch.Generator().manual_seed(3), "drawn": [0.0]}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch > 1:
            self.after.step()
        self.held["drawn"] = torch.rand(2, generator=self.generator).tolist()

    @property
    def generator(self) -> torch.Generator:
        return cast("torch.Generator", self.held["generator"])

    def values(self) -> tuple[object, ...]:
        return self.last_epoch, self.after.last_epoch, self.held["drawn"], self.generator.get_state().tolist()


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "schedule-free": ScheduleFree,
}


def views_of(model: Net, *, contiguous: bool) -> dict[str, torch.Tensor]:
    """Views of a weight, of a buffer, and of memory without another name."""
    weight = model.embedding.weight.detach()
    views = {"all": weight.view(-1), "rows": weight[3:90], "bytes": model.table.view(torch.uint8)[100:7001]}
    if not contiguous:
        views |= {"turned": weight.t(), "expanded": torch.rand(5).expand(300, 5)}
    return views


@dataclass(slots=True, eq=False)
class Job:
    """The state of a loop. `optimizers` are those that step; everything in `state` is saved."""

    model: Net
    optimizers: list[torch.optim.Optimizer]
    state: dict[str, Any]
    kind: str
    average: AveragedModel | None = None
    numbers: int = 0  # number of batches so far

    def batch(self) -> torch.Tensor:
        self.numbers += 1
        position = torch.arange(48).view(6, 8) * (self.numbers * 2 + 1)
        return position % ROWS

    def backward(self) -> None:
        out = self.model(self.batch())
        (out.float().square().mean() + out.float().sum() * 1e-3).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def large(self) -> list[nn.Parameter]:
        """Parameters that are long enough to be captured lazily."""
        return [p for p in self.model.parameters() if p.nbytes >= LAZY_FROM_BYTES]

    def slots(self) -> list[torch.Tensor]:
        """The optimizers' tensors that are long enough."""
        held = (slots for optimizer in self.optimizers for slots in optimizer.state.values())
        every = (value for slots in held for value in slots.values())
        return [value for value in every if isinstance(value, torch.Tensor) and value.nbytes >= LAZY_FROM_BYTES]

    def lazy(self) -> list[torch.Tensor]:
        return [*self.large(), *self.slots()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that a checkpoint contains, once."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for optimizer in self.optimizers:
            for slots in optimizer.state.values():
                yield from (value for value in slots.values() if isinstance(value, torch.Tensor))
        if self.average is not None:
            yield from self.average.parameters()
            yield from self.average.buffers()
        yield from (value for value in self.state.values() if isinstance(value, torch.Tensor))


def optimize(job: Job) -> None:
    """Create new optimizers of the job's kind for all present parameters of its model, and put them into its state."""
    make = OPTIMIZERS[job.kind.removesuffix("-two")]
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    for section in [section for section in job.state if section.startswith("optimizer")]:
        del job.state[section]
    halves = [parameters[::2], parameters[1::2]] if job.kind.endswith("-two") else [parameters]
    job.optimizers = [make(half) for half in halves]
    for number, optimizer in enumerate(job.optimizers):
        job.state["optimizer" + str(number or "")] = optimizer


def make_job(chance: Random, *, kind: str, extras: Sequence[str], contiguous: bool = False) -> Job:
    """A job that has been trained for one step. `contiguous`: all tensors that are captured late are contiguous."""
    torch.manual_seed(chance.randrange(1 << 30))
    job = Job(Net(chance, contiguous=contiguous), [], {}, kind)
    if chance.random() < 0.7:
        job.state["model"] = job.model
        optimize(job)
    else:  # the optimizer is first in the state
        optimize(job)
        job.state["model"] = job.model
    for extra in extras:
        _add(job, extra, contiguous=contiguous)
    job.backward()
    job.step()
    job.zero_grad()
    return job


def _add(job: Job, extra: str, *, contiguous: bool) -> None:
    if extra == "average":
        job.average = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        job.state["average"] = job.average
    elif extra == "scheduler":
        job.state["scheduler"] = torch.optim.lr_scheduler.StepLR(job.optimizers[0], 2)
    elif extra == "plain":
        job.state["plain"] = torch.rand(40_000)
        job.state["more"] = {"rows": [torch.rand(3), np.arange(30_000.0)], "note": "as it was"}
    elif extra == "array":
        job.state["array"] = np.random.default_rng(job.numbers).random(30_000)
    elif extra == "views":
        job.state["views"] = views_of(job.model, contiguous=contiguous)
    elif extra == "nested":
        job.state["nested"] = Warmup(job.optimizers[0])
    elif extra == "rng":
        job.state["rng"] = fs.rng()
    elif extra == "wrapped":
        for section in [section for section in job.state if section.startswith("optimizer")]:
            job.state[section] = Accelerated(job.state[section])
