"""The results of a study, as sentences: computed from the medians. Pure.

Counts as noise: a ratio no farther from 1 than the rounds of one cell usually are from each other; and two cells whose
ranges of rounds overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from flowstone_study.records import DIRECTIONS, ENGINE_LABELS, LAYOUT_LABELS, Cell, Direction
from flowstone_study.summary import Summary, size_label

_NOTICEABLE = 0.03  # a smaller gain is not worth changing a setting, whatever the spread
_NEARLY_ALL = 0.95
_NOISE = " (within the noise)"
_WORDS = {"write": "Save", "restore": "Restore"}


def of_grid(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        top = max(measured, key=lambda cell: _rate(summary, cell))
        enough = [c for c in measured if _rate(summary, c) >= _NEARLY_ALL * _rate(summary, top)]
        least = min(enough, key=lambda c: (c.request_bytes * c.queue_depth, c.queue_depth))
        slowest = min(measured, key=lambda cell: _rate(summary, cell))
        found.append(
            f"{_WORDS[direction]}: best {_gb(summary, top)} with {_request(top)}; 95 % of it from {_request(least)} on "
            f"({size_label(least.request_bytes * least.queue_depth)} in flight). Slowest: {_request(slowest)}, "
            f"{_gb(summary, slowest)}."
        )
    return tuple(found)


def of_layouts(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        plain = {c.layout: c for c in measured if c.direct and (c.coalesced or c.layout == "tensor")}
        if "rank" in plain:
            others = [
                f"{LAYOUT_LABELS[name]} {_times(summary, cell, plain['rank'])}"
                for name, cell in plain.items() if name != "rank"
            ]
            found.append(
                f"{_WORDS[direction]}, direct and coalesced: file per rank {_gb(summary, plain['rank'])}; of that, "
                f"{', '.join(others)}."
            )
        joined = _ratio(summary, [(c, replace(c, coalesced=False)) for c in measured if c.coalesced])
        direct = _ratio(summary, [(c, replace(c, direct=False)) for c in measured if c.direct])
        found.append(
            f"{_WORDS[direction]}, over all layouts: coalescing {_judged(joined, summary)}, direct against buffered "
            f"{_judged(direct, summary)}."
        )
    return tuple(found)


def of_mixes(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{cell.mix} {_times(summary, cell, replace(cell, coalesced=False))}"
            for cell in measured if cell.coalesced
        ]
        found.append(f"{_WORDS[direction]}, what coalescing gives: {', '.join(ratios)}.")
    return tuple(found)


def of_engines(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        told = []
        for engine, label in ENGINE_LABELS.items():
            most = max((c for c in measured if c.engine == engine), key=lambda c: _rate(summary, c), default=None)
            if most is not None:
                told.append(f"{label} {_gb(summary, most)} ({most.memory}, {_processes(most.processes)})")
        found.append(f"{_WORDS[direction]}, the best of each interface: {', '.join(told)}.")
        one, many = min(c.processes for c in measured), max(c.processes for c in measured)
        alone = [c for c in measured if c.processes == one]
        fresh = _ratio(summary, [(c, replace(c, memory="reused")) for c in alone if c.memory == "fresh"])
        pinned = _ratio(summary, [(c, replace(c, memory="reused")) for c in alone if c.memory == "registered"])
        line = (
            f"{_WORDS[direction]}, against reused memory and with {_processes(one)}: fresh memory "
            f"{_judged(fresh, summary)}, registered {_judged(pinned, summary)}."
        )
        if many > one:
            more = _ratio(summary, [(c, replace(c, processes=one)) for c in measured if c.processes == many])
            line += f" {_processes(many)} against {_processes(one)}: {_judged(more, summary)}."
        found.append(line)
    return tuple(found)


def of_processor(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        reused = [c for c in measured if c.memory == "reused" and c.processes == 1]
        told = [f"{ENGINE_LABELS[c.engine]} {summary.measured[c].cpu_s_per_gb:.3f}" for c in reused]
        found.append(f"{_WORDS[direction]}, CPU-seconds per GB with reused memory and 1 process: {', '.join(told)}.")
    return tuple(found)


def of_pages(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{c.memory} memory {_times(summary, c, replace(c, huge_pages=False))}"
            for c in measured if c.huge_pages
        ]
        found.append(f"{_WORDS[direction]}, huge pages against small ones: {', '.join(ratios)}.")
    return tuple(found)


def of_sizes(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    found = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{size_label(c.bytes)} {_times(summary, c, replace(c, direct=False))}"
            for c in sorted(measured, key=lambda c: c.bytes) if c.direct
        ]
        if ratios:
            found.append(f"{_WORDS[direction]}, direct against buffered: {', '.join(ratios)}.")
    return tuple(found)


def of_reserving(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    told = [
        f"{'direct' if cell.direct else 'buffered'} {_times(summary, cell, replace(cell, reserved=False))}"
        for cell in cells if cell.reserved and cell in summary.measured
    ]
    return (f"Save, blocks reserved first against a file that grows: {', '.join(told)}.",) if told else ()


def _measured(cells: Sequence[Cell], summary: Summary) -> Iterable[tuple[Direction, list[Cell]]]:
    for direction in DIRECTIONS:
        of_direction = [c for c in cells if c.direction == direction and c in summary.measured]
        if of_direction:
            yield direction, of_direction


def _rate(summary: Summary, cell: Cell) -> float:
    return summary.measured[cell].gb_per_s


def _against(summary: Summary, cell: Cell, other: Cell) -> float | None:
    mine, theirs = summary.rate(cell), summary.rate(other)
    return mine / theirs if mine and theirs else None


def _ratio(summary: Summary, pairs: Iterable[tuple[Cell, Cell]]) -> float | None:
    """The median ratio of the rates, over the pairs in which both cells were measured."""
    ratios = [_against(summary, cell, other) for cell, other in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    return median(known) if known else None


def _judged(ratio: float | None, summary: Summary) -> str:
    """Text for a ratio that stands for several pairs."""
    if ratio is None:
        return "not measured"
    return f"{ratio:.2f} x" + (_NOISE if abs(ratio - 1) <= max(_NOTICEABLE, summary.spread) else "")


def _times(summary: Summary, cell: Cell, other: Cell) -> str:
    """Text for one cell compared with another."""
    told = _judged(_against(summary, cell, other), summary)
    mine, theirs = summary.measured.get(cell), summary.measured.get(other)
    if mine is None or theirs is None or told.endswith(_NOISE):
        return told
    return told + (_NOISE if mine.low <= theirs.high and theirs.low <= mine.high else "")


def _gb(summary: Summary, cell: Cell) -> str:
    return f"{_rate(summary, cell):.2f} GB/s"


def _request(cell: Cell) -> str:
    return f"{size_label(cell.request_bytes)} x {cell.queue_depth}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
