"""A training as users write it, its clock, and the window size that makes its steps as long as requested."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import functional

from bench.state import State
from bench.training import text
from bench.training.gpt import GPT
from bench.training.records import Calibration, CalibrationTask, Shape, Window

SEED = 20240731
BATCH = 4  # of a calibrated window, as long as its length stays below the model's context
LENGTH_STEP = 8  # lengths are multiples of it
CALIBRATION_STEPS, CALIBRATION_TRIES = 3, 3


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of a step without its save, and of `optimizer.step()` in it."""

    seconds: float
    optimizer_s: float


class Trainer:
    """A GPT, its AdamW and its text."""

    def __init__(self, shape: Shape, window: Window) -> None:
        torch.manual_seed(SEED)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._text = text.tokens(text.library(), shape.vocabulary)
        self.change_window(window)

    def change_window(self, window: Window) -> None:
        self._windows = text.Windows(self._text, window, SEED + 1)

    def step(self) -> Lap:
        """Draw, forward, backward, optimizer."""
        started = time.monotonic()
        inputs, targets = self._windows.draw()
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        before = time.monotonic()
        self.optimizer.step()
        ended = time.monotonic()
        return Lap(ended - started, ended - before)

    def state(self) -> State:
        """The live tensors by name, in nested dictionaries; tied ones occur once."""
        model, slots = {}, {}
        for name, parameter in self.model.named_parameters():
            model[name] = parameter.detach()
            slots[name] = dict(self.optimizer.state[parameter])
        return {"model": model, "optimizer": {"state": slots}}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of every tensor's bytes."""
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


def calibrate(task: CalibrationTask) -> Calibration:
    """The window whose step takes about `target_s`: by a line through two lengths, corrected by a measurement."""
    length = max(LENGTH_STEP, task.shape.context // 8)
    trainer = Trainer(task.shape, Window(BATCH, length))
    known = {}
    for tried in (length // 2, length):
        known[BATCH * tried] = _measure(trainer, Window(BATCH, tried))
    window, laps = Window(BATCH, length), known[BATCH * length]
    for _ in range(CALIBRATION_TRIES):
        expected = solve({count: median(laps) for count, laps in known.items()}, task.target_s)
        window = window_of(expected, task.shape.context)
        laps = _measure(trainer, window)
        known[window.batch * window.length] = laps
    return Calibration(window, laps)


def _measure(trainer: Trainer, window: Window) -> tuple[float, ...]:
    """Steps, without the first, which allocates memory."""
    trainer.change_window(window)
    return tuple(trainer.step().seconds for _ in range(1 + CALIBRATION_STEPS))[1:]


def solve(known: dict[int, float], target_s: float) -> float:
    """Tokens for `target_s`, on the line through the two known counts nearest to it in time."""
    (low, one_s), (two, two_s) = sorted(known.items(), key=lambda item: abs(item[1] - target_s))[:2]
    slope = (two_s - one_s) / (two - low)
    if slope <= 0:  # the noise was larger than the difference, so scale in proportion
        return low * target_s / one_s
    return low + (target_s - one_s) / slope


def window_of(tokens: float, context: int) -> Window:
    """The window with about that many tokens, as short as the context requires."""
    batch = BATCH
    while tokens / batch > context:
        batch *= 2
    return Window(batch, max(LENGTH_STEP, round(tokens / batch / LENGTH_STEP) * LENGTH_STEP))
