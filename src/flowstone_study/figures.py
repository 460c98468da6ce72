"""The figures of a study, as values: the comparison, its text, and its result. Pure.

The terminal prints them as tables, the page draws them.
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
    """One value of a figure; `median` is None if the cell was planned and not measured, `cell` if it was not planned
    (an impossible combination)."""

    cell: Cell | None
    median: Median | None

    def value(self, unit: Unit) -> float | None:
        if self.median is None:
            return None
        return self.median.gb_per_s if unit == "GB/s" else self.median.cpu_s_per_gb


@dataclass(frozen=True, slots=True)
class Group:
    label: str
    entries: tuple[Entry, ...]  # one for each series


@dataclass(frozen=True, slots=True)
class Panel:
    """One direction. A heat map's groups are its rows, its series the columns."""

    title: str
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """kind: heat map, or bars. about: what is varied, and background. found: the result of this study."""

    title: str
    kind: Literal["heat map", "bars"]
    unit: Unit
    series: tuple[str, ...]
    series_title: str
    group_title: str
    panels: tuple[Panel, ...]
    about: str
    found: tuple[str, ...]


def figures(plan: Plan, summary: Summary) -> tuple[Figure, ...]:
    """All of a study's figures, in reading order."""
    mixes = sorted({cell.mix for cell in plan.layouts}, key=MIXES.index)
    found = [
        _grid(plan, summary),
        *(_layouts(tuple(cell for cell in plan.layouts if cell.mix == mix), summary) for mix in mixes),
        _mixes(plan, summary), _engines(plan, summary, "GB/s"), _engines(plan, summary, "CPU-s/GB"),
        _pages(plan, summary), _sizes(plan, summary), _reserving(plan, summary),
    ]
    return tuple(figure for figure in found if any(group.entries for p in figure.panels for group in p.groups))


def _grid(plan: Plan, summary: Summary) -> Figure:
    requests = sorted({cell.request_bytes for cell in plan.grid})
    depths = sorted({cell.queue_depth for cell in plan.grid})
    at = {(cell.direction, cell.request_bytes, cell.queue_depth): cell for cell in plan.grid}
    panels = tuple(
        _panel(
            direction, summary,
            ((size_label(size), [at.get((direction, size, depth)) for depth in depths]) for size in requests),
        )
        for direction in DIRECTIONS
    )
    return Figure(
        title="Request size and queue depth", kind="heat map", unit="GB/s", series=tuple(map(str, depths)),
        series_title="requests in flight", group_title="request size", panels=panels,
        about="One process, one file, tensors coalesced. A blank cell would not fill its queue with the bytes of this "
        "study. Cells of small requests move fewer bytes (see the samples).",
        found=findings.of_grid(plan.grid, summary),
    )


def _layouts(cells: Sequence[Cell], summary: Summary) -> Figure:
    series = ((True, True), (False, True), (True, False), (False, False))
    at = {(c.direction, c.layout, c.coalesced, c.direct): c for c in cells}
    planned = [layout for layout in LAYOUTS if any(c.layout == layout for c in cells)]
    panels = tuple(
        _panel(
            direction, summary,
            ((LAYOUT_LABELS[lay], [at.get((direction, lay, joined, direct)) for joined, direct in series])
             for lay in planned),
        )
        for direction in DIRECTIONS
    )
    mix, processes = cells[0].mix, cells[0].processes
    return Figure(
        title=f"Layout, coalescing, buffering: {mix}", kind="bars", unit="GB/s",
        series=("direct, coalesced", "direct, not coalesced", "buffered, coalesced", "buffered, not coalesced"),
        series_title="", group_title="layout", panels=panels,
        about=f"{processes} process{'es' if processes > 1 else ''}, the tensor sizes of mix {mix}, scaled. A file per "
        "tensor leaves nothing to coalesce. Gossman et al. (arXiv 2512.24511) published raw results of such runs on a "
        "Lustre file system: there one shared file reached a quarter to a third of the rate of a file per rank, two "
        "ranks per file two thirds, and a file per chunk of 128 MiB about half.",
        found=findings.of_layouts(cells, summary),
    )


def _mixes(plan: Plan, summary: Summary) -> Figure:
    at = {(c.direction, c.mix, c.coalesced): c for c in plan.mixes}
    planned = [mix for mix in MIXES if any(c.mix == mix for c in plan.mixes)]
    panels = tuple(
        _panel(direction, summary, ((mix, [at.get((direction, mix, j)) for j in (True, False)]) for mix in planned))
        for direction in DIRECTIONS
    )
    return Figure(
        title="Tensor sizes, and what coalescing does for them", kind="bars", unit="GB/s",
        series=("coalesced", "not coalesced"), series_title="", group_title="mix", panels=panels,
        about="A file per rank. Gossman et al. found that small buffers which are not coalesced halve the rate of "
        "large equal ones; how much of that is seen depends on how small a study's tensors are against its requests.",
        found=findings.of_mixes(plan.mixes, summary),
    )


def _engines(plan: Plan, summary: Summary, unit: Unit) -> Figure:
    counts = sorted({cell.processes for cell in plan.engines})
    at = {(c.direction, c.engine, c.memory, c.processes): c for c in plan.engines}
    kinds = [
        (engine, memory) for engine in ENGINE_LABELS for memory in MEMORIES
        if any((c.engine, c.memory) == (engine, memory) for c in plan.engines)
    ]
    panels = tuple(
        _panel(
            direction, summary,
            ((f"{ENGINE_LABELS[engine]}, {memory}", [at.get((direction, engine, memory, n)) for n in counts])
             for engine, memory in kinds),
        )
        for direction in DIRECTIONS
    )
    series = tuple("1 process" if n == 1 else f"{n} processes" for n in counts)
    if unit == "GB/s":
        title = "Interface, memory, processes"
        about = (
            "Fresh memory is mapped for the run and touched first inside the timer (on a save it is filled there, copy "
            "included); registered memory is pinned with the ring inside the timer, which a long-lived engine pays "
            "once. The best settings of a restore are worth little to a loader that allocates as it reads."
        )
        found = findings.of_engines(plan.engines, summary)
    else:
        title = "Processor time, by interface and memory"
        about = (
            "User and system time of all processes; lower is better. Time that the kernel spends on writing back "
            "buffered data belongs to no process and is missing here, as is the work of anything above plain reads "
            "and writes."
        )
        found = findings.of_processor(plan.engines, summary)
    return Figure(
        title=title, kind="bars", unit=unit, series=series, series_title="", group_title="interface, memory",
        panels=panels, about=about, found=found,
    )


def _pages(plan: Plan, summary: Summary) -> Figure:
    at = {(c.direction, c.memory, c.huge_pages): c for c in plan.pages}
    planned = [memory for memory in MEMORIES if any(c.memory == memory for c in plan.pages)]
    panels = tuple(
        _panel(direction, summary, ((m, [at.get((direction, m, huge)) for huge in (True, False)]) for m in planned))
        for direction in DIRECTIONS
    )
    return Figure(
        title="Pages under the memory", kind="bars", unit="GB/s", series=("huge pages asked for", "small pages"),
        series_title="", group_title="memory", panels=panels,
        about="One process. Memory scattered over 4 KiB pages makes the device see many small pieces of each request, "
        "and costs one fault for every 4 KiB where it is fresh.",
        found=findings.of_pages(plan.pages, summary),
    )


def _sizes(plan: Plan, summary: Summary) -> Figure:
    sizes = sorted({cell.bytes for cell in plan.sizes})
    at = {(c.direction, c.bytes, c.direct): c for c in plan.sizes}
    panels = tuple(
        _panel(
            direction, summary,
            ((size_label(size), [at.get((direction, size, direct)) for direct in (True, False)]) for size in sizes),
        )
        for direction in DIRECTIONS
    )
    return Figure(
        title="Bytes of a rank, direct or buffered", kind="bars", unit="GB/s", series=("direct", "buffered"),
        series_title="", group_title="bytes", panels=panels,
        about="One process, one file. What opening, reserving and syncing cost weighs more the fewer bytes there are.",
        found=findings.of_sizes(plan.sizes, summary),
    )


def _reserving(plan: Plan, summary: Summary) -> Figure:
    at = {(c.reserved, c.direct): c for c in plan.reserving}
    labels = {True: "reserved first", False: "as written"}
    panel = _panel(
        "write", summary, ((labels[r], [at.get((r, direct)) for direct in (True, False)]) for r in (True, False))
    )
    return Figure(
        title="Blocks reserved before they are written", kind="bars", unit="GB/s", series=("direct", "buffered"),
        series_title="", group_title="blocks", panels=(panel,),
        about="One process, one file, fallocate inside the timer. A file that grows with each request makes many file "
        "systems take its requests one at a time.",
        found=findings.of_reserving(plan.reserving, summary),
    )


def _panel(direction: Direction, summary: Summary, rows: Iterable[tuple[str, Sequence[Cell | None]]]) -> Panel:
    groups = tuple(
        Group(label, tuple(Entry(cell, summary.measured.get(cell) if cell else None) for cell in cells))
        for label, cells in rows
    )
    return Panel(DIRECTION_LABELS[direction], groups)
