"""The charts of a run against rivals: one bar for each row of the programme that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench import figures
from bench.charts import Bar, BarChart
from bench.records import Run, SaveSample
from bench.rivals import ENTRIES, OURS, Entry


def charts(run: Run) -> tuple[BarChart, ...]:
    """Those that have bars. Later saves: what a training job mostly does."""
    line = " The dashed line is fio." if run.device is not None else ""
    candidates = (
        BarChart(
            "durable-save", "Durable save, GB/s", f"Later saves of a process, fsync included; more is better.{line}",
            _save_bars(run, lambda s, payload: payload / s.durable_s / 1e9), _device(run, "write"), 2,
        ),
        BarChart(
            "blocked", "Training blocked by a save, seconds", "Later saves of a process; less is better.",
            _save_bars(run, lambda s, _: s.blocked_s), None, 2,
        ),
        BarChart(
            "cold-load", "Cold load into existing tensors, GB/s", f"In a fresh process; more is better.{line}",
            tuple(_load_bars(run)), _device(run, "read"), 2,
        ),
        BarChart(
            "save-cpu", "CPU-seconds per GB saved",
            "Later saves of a process, all threads and children; less is better.",
            _save_bars(run, lambda s, payload: s.cpu_s / payload * 1e9), None, 2,
        ),
    )
    return tuple(chart for chart in candidates if chart.bars)


def _compared() -> Iterator[Entry]:
    yield from (entry for entry in ENTRIES if entry.name == OURS or not entry.is_ours)


def _save_bars(run: Run, value: Callable[[SaveSample, int], float]) -> tuple[Bar, ...]:
    bars = []
    for entry in _compared():
        payload = figures.payload_bytes(run, entry.name)
        series = figures.saves(run, entry.name, first=False)
        interval = figures.spread(value(sample, payload) for samples in series.values() for sample in samples)
        if interval is not None:
            bars.append(Bar(entry.title, interval, entry.is_ours))
    return tuple(bars)


def _load_bars(run: Run) -> Iterator[Bar]:
    for entry in _compared():
        for how in entry.loads:
            interval = figures.spread(figures.load_rates(run, entry.name, how).values())
            if interval is not None:
                several = f", {how}" if len(entry.loads) > 1 else ""
                yield Bar(entry.title + several, interval, entry.is_ours)


def _device(run: Run, direction: str) -> float | None:
    interval = figures.spread(figures.device_rates(run, direction).values())
    return None if interval is None else interval.median
