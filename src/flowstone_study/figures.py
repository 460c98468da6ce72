"""The figures of a study, each with its data, its description, and its result.

The terminal shows them as tables, and the HTML page as drawings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowstone_study import findings
from flowstone_study.planning import Plan
from flowstone_study.records import DIRECTIONS, ENGINE_LABELS, LAYOUT_LABELS, LAYOUTS, MEMORIES, MIXES, Cell, Direction
from flowstone_study.summary import Median, Summary, size_label

Unit = Literal["GB/s", "CPU-s/GB"]
DIRECTION_LABELS: Mapping[Direction, str] = {"write": "Save: write and fsync", "restore": "Restore: read"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a figure. `median` is None if the cell was not measured. `cell` is None if the combination of
    settings is impossible.
    """

    cell: Cell | None
    median: Median | None

    def value(self, unit: Unit) -> float | None:
        if self.median is None:
            return None
        return self.median.gb_per_s if unit == "GB/s" else self.median.cpu_s_per_gb


@dataclass(frozen=True, slots=True)
class Group:
    label: str
    entries: tuple[Entry, ...]  # one entry for each series


@dataclass(frozen=True, slots=True)
class Panel:
    """The part of a figure for saves, or for restores. In a heat map, `groups` are the rows, and the figure's `series`
    the columns.
    """

    title: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure. `about`: which settings vary, and background. `results`: what this study has found."""

    title: str
    kind: Literal["heat map", "bars"]
    unit: Unit
    series: tuple[str, ...]
    series_title: str
    group_title: str
    panels: tuple[Panel, ...]
    about: str
    results: tuple[str, ...]


def figures(plan: Plan, summary: Summary) -> tuple[Figure, ...]:
    """All figures of a study, in reading order."""
    mixes = sorted({cell.mix for cell in plan.layouts}, key=MIXES.index)
    all_figures = [
        _grid(plan, summary),
        *(_layouts(tuple(cell for cell in plan.layouts if cell.mix == mix), summary) for mix in mixes),
        _mixes(plan, summary), _engines(plan, summary, "GB/s"), _engines(plan, summary, "CPU-s/GB"),
        _pages(plan, summary), _sizes(plan, summary), _reserving(plan, summary),
    ]
    return tuple(figure for figure in all_figures if any(group.entries for p in figure.panels for group in p.groups))


def _grid(plan: Plan, summary: Summary) -> Figure:
    requests = sorted({cell.request_bytes for cell in plan.grid})
    depths = sorted({cell.queue_depth for cell in plan.grid})
    cell_of = {(cell.direction, cell.request_bytes, cell.queue_depth): cell for cell in plan.grid}
    panels = tuple(
        _panel(
            direction, summary,
            ((size_label(size), [cell_of.get((direction, size, depth)) for depth in depths]) for size in requests),
        )
        for direction in DIRECTIONS
    )
    return Figure(
        title="Request size and queue depth", kind="heat map", unit="GB/s", series=tuple(map(str, depths)),
        series_title="requests in flight", group_title="request size", panels=panels,
        about="One process, one file, tensors coalesced. Where a cell is blank, this study has too few bytes to fill "
        "the queue. Cells of small requests move fewer bytes (see the samples).",
        results=findings.of_grid(plan.grid, summary),
    )


def _layouts(cells: Sequence[Cell], summary: Summary) -> Figure:
    series = ((True, True), (False, True), (True, False), (False, False))
    cell_of = {(c.direction, c.layout, c.coalesced, c.direct): c for c in cells}
    planned = [layout for layout in LAYOUTS if any(c.layout == layout for c in cells)]
    panels = tuple(
        _panel(
            direction, summary,
            ((LAYOUT_LABELS[lay], [cell_of.get((direction, lay, joined, direct)) for joined, direct in series])
             for lay in planned),
        )
        for direction in DIRECTIONS
    )
    mix, processes = cells[0].mix, cells[0].processes
    return Figure(
        title=f"Layout, coalescing, buffering: {mix}", kind="bars", unit="GB/s",
        series=("direct, coalesced", "direct, not coalesced", "buffered, coalesced", "buffered, not coalesced"),
        series_title="", group_title="layout", panels=panels,
        about=f"{processes} process{'es' if processes > 1 else ''}, the tensor sizes of mix {mix}, scaled. With a file "
        "per tensor, nothing can be coalesced. Gossman et al. (arXiv 2512.24511) published raw results of such runs on "
        "a Lustre file system: there one shared file reached a quarter to a third of the rate of a file per rank, two "
        "ranks per file two thirds, and a file per chunk of 128 MiB about half.",
        results=findings.of_layouts(cells, summary),
    )


def _mixes(plan: Plan, summary: Summary) -> Figure:
    cell_of = {(c.direction, c.mix, c.coalesced): c for c in plan.mixes}
    planned = [mix for mix in MIXES if any(c.mix == mix for c in plan.mixes)]
    panels = tuple(
        _panel(direction, summary, ((m, [cell_of.get((direction, m, j)) for j in (True, False)]) for m in planned))
        for direction in DIRECTIONS
    )
    return Figure(
        title="Tensor sizes, with and without coalescing", kind="bars", unit="GB/s",
        series=("coalesced", "not coalesced"), series_title="", group_title="mix", panels=panels,
        about="A file per rank. Gossman et al. found that small buffers which are not coalesced reach half the "
        "rate of large ones. The smaller the tensors of a study are than its requests, the larger the difference.",
        results=findings.of_mixes(plan.mixes, summary),
    )


def _engines(plan: Plan, summary: Summary, unit: Unit) -> Figure:
    counts = sorted({cell.processes for cell in plan.engines})
    cell_of = {(c.direction, c.engine, c.memory, c.processes): c for c in plan.engines}
    kinds = [
        (engine, memory) for engine in ENGINE_LABELS for memory in MEMORIES
        if any((c.engine, c.memory) == (engine, memory) for c in plan.engines)
    ]
    panels = tuple(
        _panel(
            direction, summary,
            ((f"{ENGINE_LABELS[engine]}, {memory}", [cell_of.get((direction, engine, memory, n)) for n in counts])
             for engine, memory in kinds),
        )
        for direction in DIRECTIONS
    )
    series = tuple("1 process" if n == 1 else f"{n} processes" for n in counts)
    if unit == "GB/s":
        title = "Interface, memory, processes"
        about = (
            "The time of fresh memory includes mapping and first touch (on a save, by the copy that fills it). The "
            "time of registered memory includes pinning, which a long-lived engine does once. A loader that allocates "
            "while it reads should compare fresh memory only."
        )
        results = findings.of_engines(plan.engines, summary)
    else:
        title = "Processor time, by interface and memory"
        about = (
            "User and system time of all processes; lower is better. Time that the kernel spends on writing back "
            "buffered data belongs to no process and is missing here, as is all work other than plain reads and "
            "writes."
        )
        results = findings.of_processor(plan.engines, summary)
    return Figure(
        title=title, kind="bars", unit=unit, series=series, series_title="", group_title="interface, memory",
        panels=panels, about=about, results=results,
    )


def _pages(plan: Plan, summary: Summary) -> Figure:
    cell_of = {(c.direction, c.memory, c.huge_pages): c for c in plan.pages}
    planned = [memory for memory in MEMORIES if any(c.memory == memory for c in plan.pages)]
    panels = tuple(
        _panel(direction, summary, ((m, [cell_of.get((direction, m, h)) for h in (True, False)]) for m in planned))
        for direction in DIRECTIONS
    )
    return Figure(
        title="Pages under the memory", kind="bars", unit="GB/s", series=("huge pages requested", "small pages"),
        series_title="", group_title="memory", panels=panels,
        about="One process. With pages of 4 KiB, the device splits each request into many small ones, and fresh memory "
        "costs one page fault for every 4 KiB.",
        results=findings.of_pages(plan.pages, summary),
    )


def _sizes(plan: Plan, summary: Summary) -> Figure:
    sizes = sorted({cell.bytes for cell in plan.sizes})
    cell_of = {(c.direction, c.bytes, c.direct): c for c in plan.sizes}
    panels = tuple(
        _panel(
            direction, summary,
            ((size_label(s), [cell_of.get((direction, s, direct)) for direct in (True, False)]) for s in sizes),
        )
        for direction in DIRECTIONS
    )
    return Figure(
        title="Bytes of a rank, direct or buffered", kind="bars", unit="GB/s", series=("direct", "buffered"),
        series_title="", group_title="bytes", panels=panels,
        about="One process, one file. The fewer bytes, the larger the share of opening, reserving and syncing.",
        results=findings.of_sizes(plan.sizes, summary),
    )


def _reserving(plan: Plan, summary: Summary) -> Figure:
    cell_of = {(c.reserved, c.direct): c for c in plan.reserving}
    labels = {True: "reserved first", False: "as written"}
    panel = _panel(
        "write", summary, ((labels[r], [cell_of.get((r, direct)) for direct in (True, False)]) for r in (True, False))
    )
    return Figure(
        title="Blocks reserved before they are written", kind="bars", unit="GB/s", series=("direct", "buffered"),
        series_title="", group_title="blocks", panels=(panel,),
        about="One process, one file, fallocate inside the timer. If a file grows with each request, many file "
        "systems run its requests one at a time.",
        results=findings.of_reserving(plan.reserving, summary),
    )


def _panel(direction: Direction, summary: Summary, rows: Iterable[tuple[str, Sequence[Cell | None]]]) -> Panel:
    groups = tuple(
        Group(label, tuple(Entry(cell, summary.measured.get(cell) if cell else None) for cell in cells))
        for label, cells in rows
    )
    return Panel(DIRECTION_LABELS[direction], groups)
