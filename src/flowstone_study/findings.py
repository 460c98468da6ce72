"""The results of a study as sentences, which are made from the medians.

A ratio of two cells' rates counts as noise if it differs from 1 by no more than the rounds of one cell usually differ
from each other, or if the rates of the two cells' rounds overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from flowstone_study.records import DIRECTIONS, ENGINE_LABELS, LAYOUT_LABELS, Cell, Direction
from flowstone_study.summary import Summary, size_label

_NOTICEABLE = 0.03  # a smaller gain is not worth changing a setting, however little the rounds differ
_NEARLY_ALL = 0.95
_NOISE = " (within the noise)"
_WORDS = {"write": "Save", "restore": "Restore"}


def of_grid(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        top = max(measured, key=lambda cell: _rate(summary, cell))
        enough = [c for c in measured if _rate(summary, c) >= _NEARLY_ALL * _rate(summary, top)]
        least = min(enough, key=lambda c: (c.request_bytes * c.queue_depth, c.queue_depth))
        slowest = min(measured, key=lambda cell: _rate(summary, cell))
        lines.append(
            f"{_WORDS[direction]}: best {_gb(summary, top)} with {_request(top)}; 95 % of it with {_request(least)} "
            f"({size_label(least.request_bytes * least.queue_depth)} in flight). Slowest: {_request(slowest)}, "
            f"{_gb(summary, slowest)}."
        )
    return tuple(lines)


def of_layouts(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        plain = {c.layout: c for c in measured if c.direct and (c.coalesced or c.layout == "tensor")}
        if "rank" in plain:
            others = [
                f"{LAYOUT_LABELS[name]} {_times(summary, cell, plain['rank'])}"
                for name, cell in plain.items() if name != "rank"
            ]
            lines.append(
                f"{_WORDS[direction]}, direct and coalesced: file per rank {_gb(summary, plain['rank'])}; "
                f"relative to it, {', '.join(others)}."
            )
        joined = _ratio(summary, [(c, replace(c, coalesced=False)) for c in measured if c.coalesced])
        direct = _ratio(summary, [(c, replace(c, direct=False)) for c in measured if c.direct])
        lines.append(
            f"{_WORDS[direction]}, over all layouts: coalescing {_judged(joined, summary)}, direct against buffered "
            f"{_judged(direct, summary)}."
        )
    return tuple(lines)


def of_mixes(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{cell.mix} {_times(summary, cell, replace(cell, coalesced=False))}"
            for cell in measured if cell.coalesced
        ]
        lines.append(f"{_WORDS[direction]}, gain by coalescing: {', '.join(ratios)}.")
    return tuple(lines)


def of_engines(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        best_texts = []
        for engine, label in ENGINE_LABELS.items():
            most = max((c for c in measured if c.engine == engine), key=lambda c: _rate(summary, c), default=None)
            if most is not None:
                best_texts.append(f"{label} {_gb(summary, most)} ({most.memory}, {_processes(most.processes)})")
        lines.append(f"{_WORDS[direction]}, the best of each interface: {', '.join(best_texts)}.")
        fewest, most_used = min(c.processes for c in measured), max(c.processes for c in measured)
        alone = [c for c in measured if c.processes == fewest]
        fresh = _ratio(summary, [(c, replace(c, memory="reused")) for c in alone if c.memory == "fresh"])
        pinned = _ratio(summary, [(c, replace(c, memory="reused")) for c in alone if c.memory == "registered"])
        line = (
            f"{_WORDS[direction]}, against reused memory and with {_processes(fewest)}: fresh memory "
            f"{_judged(fresh, summary)}, registered {_judged(pinned, summary)}."
        )
        if most_used > fewest:
            more = _ratio(summary, [(c, replace(c, processes=fewest)) for c in measured if c.processes == most_used])
            line += f" {_processes(most_used)} against {_processes(fewest)}: {_judged(more, summary)}."
        lines.append(line)
    return tuple(lines)


def of_processor(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        reused = [c for c in measured if c.memory == "reused" and c.processes == 1]
        texts = [f"{ENGINE_LABELS[c.engine]} {summary.measured[c].cpu_s_per_gb:.3f}" for c in reused]
        lines.append(f"{_WORDS[direction]}, CPU-seconds per GB with reused memory and 1 process: {', '.join(texts)}.")
    return tuple(lines)


def of_pages(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{c.memory} memory {_times(summary, c, replace(c, huge_pages=False))}"
            for c in measured if c.huge_pages
        ]
        lines.append(f"{_WORDS[direction]}, huge pages against small ones: {', '.join(ratios)}.")
    return tuple(lines)


def of_sizes(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    lines = []
    for direction, measured in _measured(cells, summary):
        ratios = [
            f"{size_label(c.bytes)} {_times(summary, c, replace(c, direct=False))}"
            for c in sorted(measured, key=lambda c: c.bytes) if c.direct
        ]
        if ratios:
            lines.append(f"{_WORDS[direction]}, direct against buffered: {', '.join(ratios)}.")
    return tuple(lines)


def of_reserving(cells: Sequence[Cell], summary: Summary) -> tuple[str, ...]:
    texts = [
        f"{'direct' if cell.direct else 'buffered'} {_times(summary, cell, replace(cell, reserved=False))}"
        for cell in cells if cell.reserved and cell in summary.measured
    ]
    return (f"Save, blocks reserved first against a file that grows: {', '.join(texts)}.",) if texts else ()


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
    """The median of the rates' ratios, over all pairs of cells of which both were measured. None if there is no such
    pair.
    """
    ratios = [_against(summary, cell, other) for cell, other in pairs]
    measured = [ratio for ratio in ratios if ratio is not None]
    return median(measured) if measured else None


def _judged(ratio: float | None, summary: Summary) -> str:
    """A text on the median ratio of several pairs of cells."""
    if ratio is None:
        return "not measured"
    return f"{ratio:.2f} x" + (_NOISE if abs(ratio - 1) <= max(_NOTICEABLE, summary.spread) else "")


def _times(summary: Summary, cell: Cell, other: Cell) -> str:
    """A text that compares the rate of one cell with that of another."""
    text = _judged(_against(summary, cell, other), summary)
    mine, theirs = summary.measured.get(cell), summary.measured.get(other)
    if mine is None or theirs is None or text.endswith(_NOISE):
        return text
    return text + (_NOISE if mine.low <= theirs.high and theirs.low <= mine.high else "")


def _gb(summary: Summary, cell: Cell) -> str:
    return f"{_rate(summary, cell):.2f} GB/s"


def _request(cell: Cell) -> str:
    return f"{size_label(cell.request_bytes)} x {cell.queue_depth}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
