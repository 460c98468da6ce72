"""A training loop on the device: parameters in many tensors, their AdamW, and matrix products instead of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

import flowstone as fs
from bench.gpu.accelerator import Accelerator
from bench.gpu.options import Options
from flowstone.events import phases as events


@dataclass
class Told:
    """A Checkpointer's events, by step of the save."""

    seen: list[events.Event] = field(default_factory=list)

    def fences_s(self) -> float:
        return sum(event.waited_s for event in self.seen if isinstance(event, events.Fenced))

    def failed(self) -> int:
        """The number of failed saves."""
        return sum(isinstance(event, events.SaveFailed) for event in self.seen)

    def captured(self, step: int) -> events.Captured:
        return next(event for event in self.seen if isinstance(event, events.Captured) and event.step == step)

    def committed(self, step: int) -> events.Committed:
        return next(event for event in self.seen if isinstance(event, events.Committed) and event.step == step)


class Loop:
    """A state of `options.tensors` tensors and `state_bytes` on the device; each step changes all of it."""

    def __init__(self, device: Accelerator, options: Options, state_bytes: int | None = None) -> None:
        self.device, self.options = device, options
        count = options.tensors // 3  # parameters, and two moments of each
        elements = (state_bytes or options.state_bytes) // (4 * 3 * count)
        where = torch.device("cpu" if options.simulate else "cuda:0")
        with where:
            self.model = torch.nn.ParameterList([torch.full((elements,), 0.5) for _ in range(count)])
        device.module(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        device.slots(self.optimizer)
        self.number = 0

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.number}

    @property
    def bytes(self) -> int:
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *slots))

    def step(self) -> Callable[[], float]:
        """One step; returns the seconds of the optimizer's part on the device, once that has ended."""
        self.device.work(self.options.step_s)
        begin = self.device.mark()
        self.optimizer.step()
        end = self.device.mark()
        return lambda: end() - begin()


@dataclass(frozen=True)
class Trained:
    """Seconds of `steps` steps by the clock; what each `save` blocked; and the optimizer's seconds.

    The latter for steps after a save, and for the other steps.
    """

    seconds: float
    steps: int
    blocked_s: list[float]
    behind_s: list[float]
    others_s: list[float]


def train(
    loop: Loop, steps: int, *, every: int = 0, checkpointer: fs.Checkpointer | None = None, limit_s: float = math.inf
) -> Trained:
    """That many steps, or for that long, with a save after each `every` of them.

    No save begins while the previous one is in flight, since it would wait for that, and the time in `save` itself is
    measured.
    """
    blocked: list[float] = []
    last: fs.Save | None = None
    saved = False
    optimizer: list[tuple[bool, Callable[[], float]]] = []
    loop.device.synchronize()
    begin = perf_counter()
    done = 0
    while done < steps and perf_counter() - begin < limit_s:
        done += 1
        optimizer.append((saved, loop.step()))
        saved = checkpointer is not None and every > 0 and done % every == 0 and (last is None or last.committed.done())
        if checkpointer is not None and saved:
            loop.number += 1
            started = perf_counter()
            last = checkpointer.save(loop.number, loop.state)
            blocked.append(perf_counter() - started)
    loop.device.synchronize()
    seconds = perf_counter() - begin
    pending = [(behind, passed()) for behind, passed in optimizer]
    behind_s, others_s = ([took for behind, took in pending if behind == which] for which in (True, False))
    return Trained(seconds, done, blocked, behind_s, others_s)


def folder(options: Options, name: str) -> Path:
    """A folder for a store on the measured disk."""
    return options.scratch / name
