"""Loops as users write them, with every step saved: a load restores the state of the step bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flowstone as fs
from journaled import same, steps_of

LAST = 8
OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)


class Loop:
    """A network and its optimizer. `state`: what is saved; `train_step`: makes a step."""

    def __init__(self, seed: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(40, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 3))
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2) if make is None else make(parameters)
        self.more: dict[str, object] = {}

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, **self.more}

    def backward(self) -> None:
        self.model(torch.randn(8, 40)).square().mean().backward()

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def bits(self) -> Mapping[str, object]:
        slots = [
            value for group in self.optimizer.param_groups for param in group["params"]
            for value in self.optimizer.state[param].values()
        ]
        return {"model": dict(self.model.state_dict()), "slots": slots}


def saved(root: Path, loop: Loop) -> tuple[list[int], list[int]]:
    """Which steps were saved whole, and which could not be journaled."""
    events: list[fs.Event] = []
    with fs.Checkpointer(root, every_step=True, on_event=events.append) as checkpointer:
        for step in range(1, LAST + 1):
            loop.train_step(step)
            checkpointer.save(step, loop.state())
    return steps_of(events, fs.Committed), steps_of(events, fs.NotJournaled)


def check(root: Path, loop: Loop, again: Loop) -> None:
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(again.state())
    assert report.step == LAST
    assert report.replay is None or (report.replay.reason, report.replay.exactness) == ("", "exact")
    assert same(again.bits(), loop.bits())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_each_of_torchs_optimizers_are_replayed(tmp_path: Path, name: str) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=1e-3)

    loop = Loop(0, make)
    assert saved(tmp_path, loop) == ([1], [])
    check(tmp_path, loop, Loop(1, make))


class Scaled(Loop):
    """With a GradScaler, whose gradients are infinite in two steps; every other step unscales and clips them."""

    def __init__(self, seed: int, *, fused: bool) -> None:
        super().__init__(seed, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.more = {"scaler": self.scaler}

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 40)).square().mean()
        self.scaler.scale(loss * float("inf") if step in (3, 6) else loss).backward()
        if step % 2:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_grad_scaler_does_to_steps_is_replayed(tmp_path: Path, fused: bool) -> None:
    loop, again = Scaled(0, fused=fused), Scaled(1, fused=fused)
    assert saved(tmp_path, loop) == ([1], [])
    check(tmp_path, loop, again)
    assert again.scaler.state_dict() == loop.scaler.state_dict()


class Accumulating(Loop):
    """Saves after each backward pass, and steps after every third."""

    def train_step(self, step: int) -> None:
        self.backward()
        if step % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_saves_between_the_steps_of_an_accumulation_are_those_of_the_step_before(tmp_path: Path) -> None:
    loop = Accumulating(0)
    assert saved(tmp_path, loop) == ([1, 3], [3]), "the first step makes the optimizer's state"
    check(tmp_path, loop, Accumulating(1))


class Growing(Loop):
    """A part of the network is trained from step 4 on."""

    def __init__(self, seed: int, *, begins: int = 4) -> None:
        super().__init__(seed, lambda parameters: torch.optim.AdamW(parameters[:4], lr=1e-2))
        self.begins = begins
        if not begins:
            self.grow()

    def grow(self) -> None:
        self.optimizer.add_param_group({"params": list(self.model[4].parameters()), "lr": 0.5})

    def train_step(self, step: int) -> None:
        if step == self.begins:
            self.grow()
        super().train_step(step)


def test_a_group_that_is_added_is_saved_whole_once(tmp_path: Path) -> None:
    loop = Growing(0)
    assert saved(tmp_path, loop) == ([1, 4], [4])
    check(tmp_path, loop, Growing(1, begins=0))


class Replacing(Loop):
    """Another optimizer takes over in the middle."""

    def train_step(self, step: int) -> None:
        if step == 4:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        super().train_step(step)


def test_an_optimizer_in_the_place_of_another_is_saved_whole_once(tmp_path: Path) -> None:
    loop = Replacing(0)
    assert saved(tmp_path, loop) == ([1, 4], [4])
    check(tmp_path, loop, Loop(1, lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)))


class Drawing(Loop):
    """Draws from every kind of generator that a state can have."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model.insert(1, nn.Dropout(0.3))
        self.inputs, self.numbers = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self.more = {"inputs": self.inputs, "numbers": self.numbers, "rng": fs.rng()}

    def draw(self) -> list[float]:
        return [
            torch.rand((), generator=self.inputs).item(), float(self.numbers.random()), torch.rand(()).item(),
            float(np.random.rand()),
        ]

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randn(8, 40, generator=self.inputs)).square().mean() * sum(self.draw())).backward()
        self.optimizer.step()


def test_generators_go_on_from_the_newest_step(tmp_path: Path) -> None:
    loop = Drawing(0)
    assert saved(tmp_path, loop) == ([1], [])
    expected = loop.draw()
    again = Drawing(1)
    check(tmp_path, loop, again)
    assert again.draw() == expected


def test_steps_after_a_rewind_behind_the_loaded_step_are_journaled(tmp_path: Path) -> None:
    """They were all saved in full: the checkpoint that was loaded counted as removed, after each save anew."""
    loop = Loop(3)
    with fs.Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in (40, 50):
            loop.train_step(step)
            checkpointer.save(step, loop.state())
    events: list[fs.Event] = []
    with fs.Checkpointer(tmp_path, every_step=True, on_event=events.append) as checkpointer:
        assert checkpointer.load(loop.state()).step == 50
        checkpointer.rewind(40)
        for step in range(41, 46):
            loop.train_step(step)
            checkpointer.save(step, loop.state())
    assert (steps_of(events, fs.Committed), steps_of(events, fs.Journaled)) == ([41], [42, 43, 44, 45])
    again = Loop(4)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        assert checkpointer.load(again.state()).step == 45
    assert same(again.model.state_dict(), loop.model.state_dict())
