"""Flowstone alone: saves of an optimizer's state, without a training around them."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import meter
from bench.meter import Meter
from bench.training.records import DrillOutcome, DrillSample, DrillTask
from bench.worker import settle
from flowstone import Checkpointer, Keep, Save
from flowstone.events import phases as events


@dataclass
class _Observed:
    """The events of one save, with their times."""

    fence_s: float = 0.0
    durable: float = 0.0
    copied_bytes: int = 0


@dataclass
class _Timed:
    """The caller's measurements of one save."""

    started: float
    save_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    shared_bytes: int = 0
    dirty_bytes: int = 0

    def look(self) -> None:
        self.shared_bytes = max(self.shared_bytes, meter.shared_bytes())
        self.dirty_bytes = max(self.dirty_bytes, meter.dirty_bytes())


@dataclass
class Drill:
    """A state, its Checkpointer, and their measurements so far."""

    task: DrillTask
    observed: dict[int, _Observed] = field(default_factory=dict)
    timed: dict[int, _Timed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.optimizer = _build(self.task)

    def run(self) -> DrillOutcome:
        gc.collect()
        before_bytes = meter.resident_bytes()
        with Checkpointer(
            Path(self.task.directory) / "store", keep=Keep(last=1), budget_bytes=self.task.budget_bytes,
            on_error="continue", on_event=self._on_event,
        ) as checkpointer:
            saves = [self._save(checkpointer, number) for number in range(1, self.task.saves + 1)]
            checkpointer.wait()
            errors = {save.step: save.committed.exception() for save in saves}
        failures = tuple(f"save {number}: {error}" for number, error in errors.items() if error is not None)
        samples = tuple(self._sample(number) for number, error in errors.items() if error is None)
        return DrillOutcome(self.payload_bytes(), before_bytes, samples, failures)

    def payload_bytes(self) -> int:
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *slots))

    def _save(self, checkpointer: Checkpointer, number: int) -> Save:
        if not self.task.stepping:
            settle(self.task.settle_s)
        self.observed[number] = _Observed()
        watch, timed = Meter(), _Timed(time.monotonic())
        self.timed[number] = timed
        save = checkpointer.save(
            number, {"model": self.model, "optimizer": self.optimizer, "step": number}, fence="auto"
        )
        timed.save_s = time.monotonic() - timed.started
        timed.look()
        if self.task.stepping:
            self.optimizer.step()
        else:
            save.committed.exception()  # waits for its end, and leaves a failure for later
        reading = watch.read()
        timed.cpu_s, timed.peak_bytes = reading.cpu_s, reading.peak_bytes
        timed.look()
        return save

    def _on_event(self, event: events.Event) -> None:
        """From any thread: each writes fields of its own."""
        if isinstance(event, events.Fenced):
            self.observed[event.step].fence_s += event.waited_s
        elif isinstance(event, events.Written):
            self.observed[event.step].copied_bytes = event.copied_bytes
        elif isinstance(event, events.Committed):
            self.observed[event.step].durable = time.monotonic()

    def _sample(self, number: int) -> DrillSample:
        reported, timed = self.observed[number], self.timed[number]
        return DrillSample(
            number=number, save_s=timed.save_s, fence_s=reported.fence_s, durable_s=reported.durable - timed.started,
            cpu_s=timed.cpu_s, peak_bytes=timed.peak_bytes, shared_bytes=timed.shared_bytes,
            dirty_bytes=timed.dirty_bytes, copied_bytes=reported.copied_bytes,
        )


def _build(task: DrillTask) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Equal parameters and their AdamW after one step; gradients are kept if steps follow."""
    count = task.tensors // 3  # parameters, and two moments of each
    elements = task.state_bytes // (4 * 3 * count)
    model = torch.nn.ParameterList([torch.randn(elements) for _ in range(count)])
    for parameter in model:
        parameter.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    if not task.stepping:
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def drill(task: DrillTask) -> DrillOutcome:
    return Drill(task).run()
