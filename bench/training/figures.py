"""The arithmetic of the tables: percentiles of steps, ratios to the blocks without saves beside them, slopes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import linear_regression, median, quantiles

from bench.training.records import Block, DrillSample, Run, SavedSample, StepSample, TrainingOutcome

Pair = tuple[Block, Block]
"""A leg: (without saves, with saves)."""

SETTLED_AFTER = 0.1  # of all saves; memory is made by those before, and must not grow any more


def outcomes(run: Run, rival: str) -> dict[int, TrainingOutcome]:
    """By round."""
    return {t.round: t.outcome for t in run.trained if t.rival == rival and t.outcome is not None}


def intervals(run: Run, rival: str) -> tuple[int, ...]:
    """At which this rival saved, ascending."""
    return tuple(sorted({saves.every for outcome in outcomes(run, rival).values() for _, saves in outcome.legs()}))


def pairs(run: Run, rival: str, every: int) -> dict[int, list[Pair]]:
    """The legs with a save every `every` steps, by round."""
    found = {
        at: [pair for pair in outcome.legs() if pair[1].every == every] for at, outcome in outcomes(run, rival).items()
    }
    return {at: legs for at, legs in found.items() if legs}


def steps(blocks: Iterable[Block]) -> list[StepSample]:
    return [step for block in blocks for step in block.steps]


def percentile(samples: Iterable[StepSample], percent: int) -> float:
    """Of the steps' seconds, between neighbours in proportion; near the slowest step where there are few."""
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
    return [found[0] for outcome in outcomes(run, rival).values() if (found := _saves(outcome))]


def later_saves(run: Run, rival: str, every: int) -> dict[int, list[SavedSample]]:
    """By round, those at this interval that are not their process's first and did not fail."""
    return {
        at: [
            save for _, block in outcome.legs() if block.every == every
            for save in block.saves if save.error is None and save != _saves(outcome)[0]
        ]
        for at, outcome in outcomes(run, rival).items()
    }


def failures(run: Run, rival: str, every: int) -> list[str]:
    """Why saves at this interval failed, in order."""
    found = (
        save.error for outcome in outcomes(run, rival).values() for _, block in outcome.legs()
        if block.every == every for save in block.saves
    )
    return [error for error in found if error is not None]


def payload_bytes(run: Run, rival: str) -> int:
    return next(iter(outcomes(run, rival).values())).payload_bytes


def cpu_per_gb(run: Run, rival: str, every: int) -> list[float]:
    """Seconds that a leg's steps took more with saves than without, for each GB that was saved; one for each leg."""
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
    """How much longer `optimizer.step()` takes behind a save than in steps without saves; one for each such step.

    A wait at a fence as it looks from outside, and whatever the writing takes from the step.
    """
    return list(_longer(pair for of in legs.values() for pair in of))


def _longer(of: Iterable[Pair]) -> Iterator[float]:
    for none, saves in of:
        usual = median(step.optimizer_s for step in none.steps)
        for before, step in zip(saves.steps, saves.steps[1:], strict=False):
            if before.save_s is not None:
                yield step.optimizer_s - usual


def growth(samples: Sequence[DrillSample], values: Sequence[int]) -> float | None:
    """Bytes gained over as many saves as there were, by the line through all but the first; None of too few."""
    first = max(1, round(SETTLED_AFTER * len(samples)))
    settled = [(s.number, value) for s, value in zip(samples, values, strict=True)][first:]
    if len(settled) < 2:
        return None
    slope, _ = linear_regression(*zip(*settled, strict=True))
    return slope * len(samples)


def _saves(outcome: TrainingOutcome) -> list[SavedSample]:
    return sorted((save for block in outcome.blocks for save in block.saves), key=lambda save: save.number)
