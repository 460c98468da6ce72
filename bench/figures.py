"""The arithmetic of the tables: medians, ranges, and ratios of measurements in the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from bench.records import FioSample, LoadSample, Outcome, Run, SaveSample

Sample = TypeVar("Sample")
Series = Mapping[int, Sequence[Sample]]
"""Samples by round."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its range."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """None if there are no values."""
    values = list(values)
    return Spread(median(values), min(values), max(values)) if values else None


def ratios(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> list[float]:
    """One for each round that both have."""
    return [numerator[key] / denominator[key] for key in sorted(numerator.keys() & denominator.keys())]


def by_round(
    series: Series[Sample], value: Callable[[Sample], float], *, of: Callable[[Iterable[float]], float] = median
) -> dict[int, float]:
    """The median of each round, or another function `of` its values."""
    return {key: of(map(value, samples)) for key, samples in series.items() if samples}


def values(series: Series[Sample], value: Callable[[Sample], float]) -> list[float]:
    return [value(sample) for samples in series.values() for sample in samples]


def saves(run: Run, rival: str, *, first: bool) -> Series[SaveSample]:
    """The first save of each process, or the later ones."""
    return {
        key: [sample for outcome in outcomes for sample in outcome.saves if (sample.number == 1) == first]
        for key, outcomes in _outcomes(run, rival).items()
    }


def loads(run: Run, rival: str, how: str, *, first: bool = True) -> Series[LoadSample]:
    """The first load of each process, or the later ones."""
    return {
        key: [
            sample for outcome in outcomes for sample in outcome.loads
            if sample.how == how and (sample.number == 1) == first
        ]
        for key, outcomes in _outcomes(run, rival).items()
    }


def each_load(run: Run, rival: str, how: str) -> list[LoadSample]:
    """The first load of each rank of a job, in all rounds."""
    parts = (part for outcomes in _outcomes(run, rival).values() for outcome in outcomes for part in outcome.parts)
    return [sample for part in parts for sample in part.loads if sample.how == how and sample.number == 1]


def save_rates(run: Run, rival: str, *, first: bool) -> dict[int, float]:
    """Durable GB/s by round."""
    payload = payload_bytes(run, rival)
    return by_round(saves(run, rival, first=first), lambda s: payload / s.durable_s / 1e9)


def load_rates(run: Run, rival: str, how: str, *, first: bool = True) -> dict[int, float]:
    """GB/s by round."""
    payload = payload_bytes(run, rival)
    return by_round(loads(run, rival, how, first=first), lambda s: payload / s.load_s / 1e9)


def device_rates(run: Run, direction: str) -> dict[int, float]:
    """fio's GB/s by round."""
    if run.device is None:
        return {}
    return _rates(run.device.writes if direction == "write" else run.device.reads)


def many_device_rates(run: Run, direction: str) -> dict[int, float]:
    """GB/s by round of several fio jobs together."""
    if run.device is None:
        return {}
    return _rates(run.device.many_writes if direction == "write" else run.device.many_reads)


def save_cpu(run: Run, rival: str) -> list[float]:
    """CPU-seconds per GB of later saves."""
    payload = payload_bytes(run, rival)
    return values(saves(run, rival, first=False), lambda s: s.cpu_s / payload * 1e9)


def load_cpu(run: Run, rival: str, how: str) -> list[float]:
    """CPU-seconds per GB."""
    payload = payload_bytes(run, rival)
    return values(loads(run, rival, how), lambda s: s.cpu_s / payload * 1e9)


def device_shares(run: Run, rival: str, how: str) -> list[float]:
    """Bytes that loads have read from the device, relative to the state's bytes."""
    payload = payload_bytes(run, rival)
    return values(loads(run, rival, how), lambda s: (s.device_bytes or 0) / payload)


def payload_bytes(run: Run, rival: str) -> int:
    """The bytes of the state that this rival saved; those of the run if it did not save."""
    outcomes = (m.outcome for m in run.measured if m.rival == rival and m.outcome is not None)
    return next((outcome.payload_bytes for outcome in outcomes), run.state_bytes)


def rounds(run: Run, rival: str) -> int:
    """The number of rounds in which this rival was measured."""
    return len(_outcomes(run, rival))


def note(run: Run, rival: str) -> str:
    """How its bytes moved, as it reported in the last round."""
    outcomes = (m.outcome for m in reversed(run.measured) if m.rival == rival and m.outcome is not None)
    return next((outcome.note for outcome in outcomes if outcome.note), "")


def _rates(samples: Sequence[FioSample]) -> dict[int, float]:
    return {index: sample.gb_per_s for index, sample in enumerate(samples, 1)}


def _outcomes(run: Run, rival: str) -> dict[int, list[Outcome]]:
    outcomes: dict[int, list[Outcome]] = {}
    for measured in run.measured:
        if measured.rival == rival and measured.outcome is not None:
            outcomes.setdefault(measured.round, []).append(measured.outcome)
    return outcomes
