"""Synthetic trainings and drills for tests of the arithmetic."""

from __future__ import annotations

from bench.rivals import OURS
from bench.training.programme import FLAT, FULL, MANY
from bench.training.records import (
    Block,
    Calibration,
    Drilled,
    DrillOutcome,
    DrillSample,
    Run,
    SavedSample,
    StepSample,
    Trained,
    TrainingOutcome,
    Window,
)

GB = 1_000_000_000
PAYLOAD = 2 * GB


def block(
    every: int, seconds: tuple[float, ...], saves: tuple[SavedSample, ...] = (), drain_s: float = 0.0,
    cpu_s: float = 10.0,
) -> Block:
    """Steps of these seconds, those behind saves among them; an optimizer takes 50 ms more behind a save."""
    due = {save.number: save.save_s for save in saves}
    steps = tuple(
        StepSample(index, s, 0.15 if index - 1 in due else 0.1, due.get(index)) for index, s in enumerate(seconds, 1)
    )
    return Block(every, steps, saves, drain_s, cpu_s, peak_bytes=3 * GB + every * GB, shared_bytes=every * GB)


def saved(number: int, save_s: float, fence_s: float = 0.0, durable_s: float = 1.0) -> SavedSample:
    return SavedSample(number, save_s, fence_s, durable_s)


def training(*blocks: Block, differing: tuple[str, ...] = ()) -> TrainingOutcome:
    return TrainingOutcome(PAYLOAD, 12, 3 * GB, 0, blocks, differing)


def run(trained: list[Trained], drilled: list[Drilled] | None = None) -> Run:
    return Run(
        "bench", "2026-01-01", {"CPU": "x"}, FULL.name, FULL.shape, Calibration(Window(4, 112), (1.9, 2.0, 2.2)),
        rounds=2, trained=tuple(trained), drilled=tuple(drilled or ()),
    )


def two_rounds() -> Run:
    """Saves every 5 cost ours 1 % in the first round and 3 % in the second, with 10 s of drain for torch.save."""
    trained = []
    for index, slow in ((1, 1.01), (2, 1.03)):
        none, ours = (2.0,) * 10, (2.0 * slow,) * 10
        first, later = saved(1, 0.5), saved(6, 0.004 * index, fence_s=0.006 * index)
        theirs = saved(1, 6.0), saved(6, 5.0)
        trained += [
            Trained(OURS, index, training(block(0, none), block(5, ours, (first, later), cpu_s=14.0))),
            Trained("torch", index, training(block(5, none, theirs, drain_s=10.0), block(0, none))),  # the other order
        ]
    return run(trained)


def drilled(name: str, peaks: list[int], save_s: float = 0.005, failures: tuple[str, ...] = ()) -> Drilled:
    """Saves whose peaks are these; the first takes ten times as long as the others."""
    samples = tuple(
        DrillSample(index, save_s * (10 if index == 1 else 1), 0.0, 1.0, 0.5, peak, 0, 0, PAYLOAD)
        for index, peak in enumerate(peaks, 1)
    )
    return Drilled(name, 1, DrillOutcome(PAYLOAD, 0, samples, failures))


def flat(growing_bytes: int, failures: tuple[str, ...] = ()) -> Drilled:
    """200 saves: memory is made by the first twenty, then grows by so many bytes from save to save."""
    peaks = [min(index, 20) * GB // 20 + max(0, index - 20) * growing_bytes for index in range(1, 201)]
    return drilled(FLAT, peaks, failures=failures)


def many(save_s: float) -> Drilled:
    return drilled(MANY, [GB] * 4, save_s)
