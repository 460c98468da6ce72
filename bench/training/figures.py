"""The arithmetic of the tables: percentiles of steps, ratios to the blocks without saves beside them, slopes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import linear_regression, median, quantiles

from bench.training.records import Block, DrillSample, Run, SavedSample, StepSample, TrainingOutcome

Pair = tuple[Block, Block]
"""A leg: (without saves, with saves)."""

SETTLED_AFTER = 0.1  # of all saves; those before allocate memory, which must not grow afterwards


def outcomes(run: Run, rival: str) -> dict[int, TrainingOutcome]:
    """By round."""
    return {t.round: t.outcome for t in run.trained if t.rival == rival and t.outcome is not None}


def intervals(run: Run, rival: str) -> tuple[int, ...]:
    """The intervals at which this rival saved, ascending."""
    return tuple(sorted({saves.every for outcome in outcomes(run, rival).values() for _, saves in outcome.legs()}))


def pairs(run: Run, rival: str, every: int) -> dict[int, list[Pair]]:
    """The legs with a save every `every` steps, by round."""
    legs_by_round = {
        at: [pair for pair in outcome.legs() if pair[1].every == every] for at, outcome in outcomes(run, rival).items()
    }
    return {key: legs for key, legs in legs_by_round.items() if legs}


def steps(blocks: Iterable[Block]) -> list[StepSample]:
    return [step for block in blocks for step in block.steps]


def percentile(samples: Iterable[StepSample], percent: int) -> float:
    """The percentile of the steps' seconds, interpolated; near the slowest step if there are few."""
    seconds = [step.seconds for step in samples]
    return quantiles(seconds, n=100, method="inclusive")[percent - 1] if len(seconds) > 1 else seconds[0]


def total_ratios(legs: dict[int, list[Pair]]) -> list[float]:
    """Total time with saves over that of as many steps without, one for each round."""
    return [sum(saves.seconds for _, saves in of) / sum(none.seconds for none, _ in of) for of in legs.values()]


def percentile_ratios(legs: dict[int, list[Pair]], percent: int) -> list[float]:
    """The same of a percentile of the steps."""
    return [
        percentile(steps(saves for _, saves in of), percent) / percentile(steps(none for none, _ in of), percent)
        for of in legs.values()
    ]


def first_saves(run: Run, rival: str) -> list[SavedSample]:
    """The first one of each process."""
    return [laps[0] for outcome in outcomes(run, rival).values() if (laps := _saves(outcome))]


def later_saves(run: Run, rival: str, every: int) -> dict[int, list[SavedSample]]:
    """By round, saves at this interval that are not their process's first and did not fail."""
    return {
        key: [
            save for _, block in outcome.legs() if block.every == every
            for save in block.saves if save.error is None and save != _saves(outcome)[0]
        ]
        for key, outcome in outcomes(run, rival).items()
    }


def failures(run: Run, rival: str, every: int) -> list[str]:
    """Why saves at this interval failed, in order."""
    errors = (
        save.error for outcome in outcomes(run, rival).values() for _, block in outcome.legs()
        if block.every == every for save in block.saves
    )
    return [error for error in errors if error is not None]


def payload_bytes(run: Run, rival: str) -> int:
    return next(iter(outcomes(run, rival).values())).payload_bytes


def cpu_per_gb(run: Run, rival: str, every: int) -> list[float]:
    """How many seconds more a leg's steps took with saves than without, for each saved GB; one for each leg."""
    return [
        (saves.cpu_s - none.cpu_s) / (len(saves.saves) * outcome.payload_bytes / 1e9)
        for outcome in outcomes(run, rival).values() for none, saves in outcome.legs() if saves.every == every
    ]


def extra_peaks(run: Run, rival: str, every: int) -> list[tuple[int, int]]:
    """(resident, shared) bytes above the peaks before the first save, for each block with saves."""
    return [
        (saves.peak_bytes - outcome.before_bytes, saves.shared_bytes - outcome.before_shared_bytes)
        for outcome in outcomes(run, rival).values() for _, saves in outcome.legs() if saves.every == every
    ]


def longer_optimizer_s(legs: dict[int, list[Pair]]) -> list[float]:
    """How much longer `optimizer.step()` takes after a save than in steps without saves; one for each such step.

    It includes a wait at a fence as seen from outside, and the slowdown of the step by the writes.
    """
    return list(_longer(pair for of in legs.values() for pair in of))


def _longer(of: Iterable[Pair]) -> Iterator[float]:
    for none, saves in of:
        usual = median(step.optimizer_s for step in none.steps)
        for before, step in zip(saves.steps, saves.steps[1:], strict=False):
            if before.save_s is not None:
                yield step.optimizer_s - usual


def growth(samples: Sequence[DrillSample], values: Sequence[int]) -> float | None:
    """Growth in bytes over all saves, by a line fitted to all but the first; None if there are too few."""
    first = max(1, round(SETTLED_AFTER * len(samples)))
    settled = [(s.number, value) for s, value in zip(samples, values, strict=True)][first:]
    if len(settled) < 2:
        return None
    slope, _ = linear_regression(*zip(*settled, strict=True))
    return slope * len(samples)


def _saves(outcome: TrainingOutcome) -> list[SavedSample]:
    return sorted((save for block in outcome.blocks for save in block.saves), key=lambda save: save.number)
