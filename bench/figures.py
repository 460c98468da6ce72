"""The arithmetic of the tables: medians, spreads, and ratios of what was measured in the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from bench.records import LoadSample, Outcome, Run, SaveSample

Sample = TypeVar("Sample")
Series = Mapping[int, Sequence[Sample]]
"""Samples by round."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and what it stands for."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """None of no values."""
    values = list(values)
    return Spread(median(values), min(values), max(values)) if values else None


def ratios(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> list[float]:
    """One for each round that both have."""
    return [numerator[at] / denominator[at] for at in sorted(numerator.keys() & denominator.keys())]


def by_round(series: Series[Sample], value: Callable[[Sample], float]) -> dict[int, float]:
    """The median of each round."""
    return {at: median(map(value, samples)) for at, samples in series.items() if samples}


def values(series: Series[Sample], value: Callable[[Sample], float]) -> list[float]:
    return [value(sample) for samples in series.values() for sample in samples]


def saves(run: Run, rival: str, *, first: bool) -> Series[SaveSample]:
    """The first save of each process, or the later ones."""
    return {
        at: [sample for outcome in outcomes for sample in outcome.saves if (sample.number == 1) == first]
        for at, outcomes in _outcomes(run, rival).items()
    }


def loads(run: Run, rival: str, how: str) -> Series[LoadSample]:
    return {
        at: [sample for outcome in outcomes for sample in outcome.loads if sample.how == how]
        for at, outcomes in _outcomes(run, rival).items()
    }


def device_rates(run: Run, direction: str) -> dict[int, float]:
    """fio's GB/s by round."""
    if run.device is None:
        return {}
    samples = run.device.writes if direction == "write" else run.device.reads
    return {at: sample.gb_per_s for at, sample in enumerate(samples, 1)}


def _outcomes(run: Run, rival: str) -> dict[int, list[Outcome]]:
    found: dict[int, list[Outcome]] = {}
    for measured in run.measured:
        if measured.rival == rival and measured.outcome is not None:
            found.setdefault(measured.round, []).append(measured.outcome)
    return found
