"""Trainings that save every step, small enough for hundreds of steps, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import flowstone as fs
from flowstone.events.phases import Event

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


class Noisy(torch.optim.SGD):
    """Draws from torch's generator in each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Training:
    """A network with dropout and running statistics, with a scheduler, on random inputs.

    keeps_gradients  zero_grad(set_to_none=False): the memory of gradients is reused
    skips            steps that are not made, as with a GradScaler
    """

    def __init__(
        self, make: Make = adamw, *, seed: int = 0, keeps_gradients: bool = False, skips: tuple[int, ...] = (),
        width: int = 160,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.ReLU(),
            torch.nn.Linear(width, width), torch.nn.Linear(width, 3),
        )
        self.optimizer = make(list(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.inputs = torch.Generator().manual_seed(seed + 1)
        self.keeps_gradients, self.skips = keeps_gradients, skips
        self.losses: list[float] = []

    def state(self, step: int = 0) -> dict[str, object]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "inputs": self.inputs,
            "losses": self.losses, "rng": fs.rng(), "step": step,
        }

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        inputs = torch.randn(8, 40, generator=self.inputs)
        loss = self.model(inputs).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if step not in self.skips:
            self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())


def run(training: Training, root: Path, first: int, last: int, **options: object) -> list[Event]:
    """Save each of these steps. Returns the events."""
    events: list[Event] = []
    with fs.Checkpointer(root, every_step=True, on_event=events.append, **options) as checkpointer:  # type: ignore[arg-type]
        for step in range(first, last + 1):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    return events


def bits(training: Training) -> Mapping[str, object]:
    """The complete state of a training that continues from a checkpoint, for comparison."""
    slots = [
        value.clone() if isinstance(value, torch.Tensor) else value
        for parameter in training.model.parameters() for value in training.optimizer.state[parameter].values()
    ]
    return {
        "model": {name: value.clone() for name, value in training.model.state_dict().items()}, "slots": slots,
        "options": [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups],
        "scheduler": training.scheduler.state_dict(), "inputs": training.inputs.get_state(),
        "losses": list(training.losses), "rng": torch.get_rng_state(),
    }


def same(left: object, other: object) -> bool:
    if isinstance(left, Mapping):
        return isinstance(other, Mapping) and left.keys() == other.keys() and all(same(left[k], other[k]) for k in left)
    if isinstance(left, list):
        return isinstance(other, list) and len(left) == len(other) and all(map(same, left, other))
    if isinstance(left, torch.Tensor):
        return isinstance(other, torch.Tensor) and left.dtype == other.dtype and bool(
            torch.equal(left.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        )
    return left == other


def steps_of(events: list[fs.Event], kind: type[fs.Event]) -> list[int]:
    """The steps of the events of one kind."""
    return [event.step for event in events if isinstance(event, kind)]
