"""From raw numbers to tables: for the terminal and for docs/PERFORMANCE.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from bench import figures
from bench.figures import Series, Spread
from bench.records import FioSample, LoadSample, Run, SaveSample
from bench.rivals import ENTRIES, OURS, Entry
from bench.rivals import entry as entry_of

GOAL_TO_DEVICE = 0.85
BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. The first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """Something that was to be reached; `reached` is None where it could not be measured."""

    text: str
    wanted: float
    reached: Spread | None

    @property
    def is_met(self) -> bool:
        return self.reached is not None and self.reached.median >= self.wanted

    def __str__(self) -> str:
        verdict = "pass" if self.is_met else "miss"
        return f"{verdict}  {self.text}: {cell(self.reached)}, goal {self.wanted:.2f}"


def cell(spread: Spread | None, digits: int = 2) -> str:
    """Median (lowest-highest)."""
    if spread is None:
        return ABSENT
    if spread.low == spread.high:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


# Tables


def tables(run: Run) -> tuple[Table, ...]:
    return (device_table(run), save_table(run), load_table(run), against_table(run))


def device_table(run: Run) -> Table:
    rows = []
    if run.device is not None:
        device = run.device
        for title, samples in (
            ("fio write, fsync inside, best", device.writes), ("fio read, best", device.reads),
            ("fio write, fsync inside, plain memory", device.plain_writes),
            ("fio read, plain memory", device.plain_reads),
        ):
            setting = samples[0]
            rows.append((
                title, setting.memory, f"{setting.request_bytes >> 20} MiB x {setting.depth}",
                cell(figures.spread(s.seconds for s in samples)), cell(figures.spread(s.gb_per_s for s in samples)),
                cell(figures.spread(_fio_cpu(s) for s in samples)),
            ))
    title = "The device (fio: io_uring, direct; ratios below are to the best; registered memory is in huge pages)"
    return Table(title, ("job", "memory", "request x depth", "s", "GB/s", "CPU-s/GB"), tuple(rows))


def _fio_cpu(sample: FioSample) -> float:
    return sample.cpu_s / sample.bytes * 1e9


def save_table(run: Run) -> Table:
    columns = (
        "save", "blocked s", "durable s", "GB/s durable", "of fio", "CPU-s/GB", "extra peak MB", "files",
    )
    rows = []
    for entry, first in _save_rows(run):
        series = figures.saves(run, entry.name, first=first)
        if any(series.values()):
            rows.append((_save_title(entry, first=first), *_save_cells(run, series)))
    rows += _failed_rows(run, len(columns))
    return Table("Save (first: of a fresh process; later: those after it in the same process)", columns, tuple(rows))


def _save_rows(run: Run) -> Iterable[tuple[Entry, bool]]:
    present = {measured.rival for measured in run.measured}
    for entry in ENTRIES:
        if entry.name in present:
            yield from ((entry, first) for first in (True, False))


def _save_title(entry: Entry, *, first: bool) -> str:
    return f"{entry.title}, {'first' if first else 'later'}" if entry.saves > 1 else entry.title


def _save_cells(run: Run, series: Series[SaveSample]) -> tuple[str, ...]:
    payload = _payload_bytes(run)
    rates = figures.by_round(series, lambda s: payload / s.durable_s / 1e9)
    of_fio = figures.ratios(rates, figures.device_rates(run, "write"))
    files = {sample.files for samples in series.values() for sample in samples}
    return (
        _cell(series, lambda s: s.blocked_s), _cell(series, lambda s: s.durable_s),
        _cell(series, lambda s: payload / s.durable_s / 1e9), cell(figures.spread(of_fio)),
        _cell(series, lambda s: s.cpu_s / payload * 1e9), _cell(series, lambda s: s.extra_peak_bytes / 1e6, 0),
        "-".join(map(str, sorted(files))),
    )


def load_table(run: Run) -> Table:
    columns = ("cold load", "s", "GB/s", "of fio", "CPU-s/GB", "extra peak MB", "cache was cold", "exact")
    payload, rows = _payload_bytes(run), []
    for entry in ENTRIES:
        for how in entry.loads:
            series = figures.loads(run, entry.name, how)
            if any(series.values()):
                rows.append((f"{entry.title}, {how}", *_load_cells(run, series, payload)))
    return Table("Cold load, fresh process, into existing tensors", columns, tuple(rows))


def _load_cells(run: Run, series: Series[LoadSample], payload: int) -> tuple[str, ...]:
    rates = figures.by_round(series, lambda s: payload / s.load_s / 1e9)
    of_fio = figures.ratios(rates, figures.device_rates(run, "read"))
    samples = [sample for samples in series.values() for sample in samples]
    cold = "unknown" if any(s.cold is None for s in samples) else "yes" if all(s.cold for s in samples) else "NO"
    return (
        _cell(series, lambda s: s.load_s), _cell(series, lambda s: payload / s.load_s / 1e9),
        cell(figures.spread(of_fio)), _cell(series, lambda s: s.cpu_s / payload * 1e9),
        _cell(series, lambda s: s.extra_peak_bytes / 1e6, 0), cold,
        "yes" if all(s.exact for s in samples) else "NO",
    )


def against_table(run: Run) -> Table:
    """How many times longer each rival takes, first saves with first, later ones with later ones."""
    columns = (
        "Flowstone is faster than", "durable, first", "durable, later", "blocked, first", "blocked, later", "cold load",
    )
    ours, rows = figures.loads(run, OURS, entry_of(OURS).loads[0]), []
    for entry in ENTRIES:
        if entry.name == OURS or not any(m.rival == entry.name for m in run.measured):
            continue
        cells = [
            _times(figures.saves(run, entry.name, first=first), figures.saves(run, OURS, first=first), seconds)
            for seconds in (lambda s: s.durable_s, lambda s: s.blocked_s)
            for first in (True, False)
        ]
        theirs = figures.loads(run, entry.name, entry.loads[0])
        rows.append((entry.title, *cells, _times(theirs, ours, lambda s: s.load_s)))
    return Table("Flowstone against its rivals (times)", columns, tuple(rows))


def _times(
    theirs: Series[figures.Sample], ours: Series[figures.Sample], seconds: Callable[[figures.Sample], float]
) -> str:
    found = figures.spread(figures.ratios(figures.by_round(theirs, seconds), figures.by_round(ours, seconds)))
    return cell(found, 1) if found is None else f"{cell(found, 1)}x"


def goals(run: Run) -> tuple[Goal, ...]:
    payload = _payload_bytes(run)
    write, read = figures.device_rates(run, "write"), figures.device_rates(run, "read")
    found = []
    for first, title in ((True, "first save of a process"), (False, "later saves")):
        rates = figures.by_round(figures.saves(run, OURS, first=first), lambda s: payload / s.durable_s / 1e9)
        found.append((f"durable save, {title}, of fio's write rate", figures.ratios(rates, write)))
    loads = figures.loads(run, OURS, entry_of(OURS).loads[0])
    rates = figures.by_round(loads, lambda s: payload / s.load_s / 1e9)
    found.append(("cold load, of fio's read rate", figures.ratios(rates, read)))
    return tuple(Goal(text, GOAL_TO_DEVICE, figures.spread(values)) for text, values in found)


def _cell(series: Series[figures.Sample], value: Callable[[figures.Sample], float], digits: int = 2) -> str:
    return cell(figures.spread(figures.values(series, value)), digits)


def _payload_bytes(run: Run) -> int:
    return next((m.outcome.payload_bytes for m in run.measured if m.outcome is not None), run.state_bytes)


def _failed_rows(run: Run, width: int) -> list[tuple[str, ...]]:
    failed = ((f"{entry_of(m.rival).title}, round {m.round}", m.error) for m in run.measured if m.error is not None)
    return [(f"{title}: FAILED", error, *[""] * (width - 2)) for title, error in failed]


# Faces


def machine_line(run: Run) -> str:
    return ", ".join(f"{name} {value}" if name != "CPU" else value for name, value in run.machine.items())


def conditions(run: Run) -> str:
    return (
        f"{run.layout}; {run.rounds} interleaved rounds; median (lowest-highest); GB are 10^9 bytes; "
        "fsync of files and directories inside every timer; ratios are medians of the rounds' own ratios."
    )


def print_tables(run: Run, console: Console) -> None:
    console.print(machine_line(run), style="dim")
    console.print(conditions(run), style="dim")
    for table in tables(run):
        if not table.rows:
            continue
        drawn = RichTable(title=table.title, title_justify="left")
        for position, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if position else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for goal in goals(run):
        console.print(str(goal), style="green" if goal.is_met else "red")


def markdown(run: Run) -> str:
    """The part of docs/PERFORMANCE.md that this program writes, markers included."""
    parts = [BEGIN, f"`{run.command}`, {run.started_utc}", machine_line(run) + ".", conditions(run)]
    parts += [f"**{table.title}**\n\n{_markdown_table(table)}" for table in tables(run) if table.rows]
    parts.append("\n".join(f"- {goal}" for goal in goals(run)))
    return "\n\n".join((*parts, END)) + "\n"


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    rule = "|---" + "|---:" * (len(table.columns) - 1) + "|"
    return "\n".join((line(table.columns), rule, *map(line, table.rows)))
