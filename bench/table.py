"""Tables from raw numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench import figures
from bench.figures import Series
from bench.goals import cell, sharing_gains
from bench.records import FioSample, LoadSample, Run, SaveSample
from bench.report import Table
from bench.rivals import ALONE, CACHED, CONDITIONS, ENTRIES, OURS, REPLICAS, SHARED, Entry, replica_load
from bench.rivals import entry as entry_of


def tables(run: Run) -> tuple[Table, ...]:
    """The tables that have rows."""
    rivals = [entry for entry in ENTRIES if not entry.is_ours or entry.name == OURS]
    settings = [entry for entry in ENTRIES if entry.is_ours and entry.name != OURS]
    first_later = "first: the first save of a fresh process; later: the later saves of the same process"
    tables = (
        device_table(run),
        Table(f"Save ({first_later})", _SAVE_COLUMNS, tuple(save_rows(run, rivals))),
        Table("Cold load into existing tensors", _LOAD_COLUMNS, tuple(load_rows(run, rivals))),
        against_table(run),
        Table("Flowstone in other settings: save", _SAVE_COLUMNS, tuple(save_rows(run, settings))),
        Table("Flowstone in other settings: load", _LOAD_COLUMNS, tuple(load_rows(run, settings))),
        sharing_table(run),
        failure_table(run),
    )
    return tuple(table for table in tables if table.rows)


def device_table(run: Run) -> Table:
    rows = []
    if run.device is not None:
        device = run.device
        for title, samples in (
            ("fio write, fsync inside, best", device.writes), ("fio read, best", device.reads),
            ("fio write, fsync inside, plain memory", device.plain_writes),
            ("fio read, plain memory", device.plain_reads),
            ("fio write, fsync inside, jobs at once", device.many_writes),
            ("fio read, jobs at once", device.many_reads),
        ):
            if not samples:
                continue
            setting = samples[0]
            rows.append((
                title, str(setting.jobs), setting.memory, f"{setting.request_bytes >> 20} MiB x {setting.depth}",
                cell(figures.spread(s.seconds for s in samples)), cell(figures.spread(s.gb_per_s for s in samples)),
                cell(figures.spread(_fio_cpu(s) for s in samples)),
            ))
    title = (
        "What fio measures on this device, with io_uring and O_DIRECT. Ratios in the tables below are relative to the "
        "best of these rates. Registered memory is in huge pages"
    )
    return Table(title, ("job", "jobs", "memory", "request x depth", "s", "GB/s", "CPU-s/GB"), tuple(rows))


def _fio_cpu(sample: FioSample) -> float:
    return sample.cpu_s / sample.bytes * 1e9


_SAVE_COLUMNS = (
    "save", "blocked s", "durable s", "GB/s durable", "relative to fio", "CPU-s/GB", "extra peak MB", "files",
)


def save_rows(run: Run, entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    for entry in entries:
        for first in (True, False):
            series = figures.saves(run, entry.name, first=first)
            if any(series.values()):
                title = f"{title_of(run, entry)}, {'first' if first else 'later'}" if entry.saves > 1 else entry.title
                yield title, *_save_cells(run, entry, series)


def title_of(run: Run, entry: Entry) -> str:
    """The title, with the number of rounds if it took part in fewer than others."""
    took = figures.rounds(run, entry.name)
    return entry.title if took == run.rounds else f"{entry.title} [{took} of {run.rounds} rounds]"


def _save_cells(run: Run, entry: Entry, series: Series[SaveSample]) -> tuple[str, ...]:
    payload = figures.payload_bytes(run, entry.name)
    rates = figures.by_round(series, lambda s: payload / s.durable_s / 1e9)
    of_fio = figures.ratios(rates, _device_rates(run, entry, "write"))
    files = {sample.files for samples in series.values() for sample in samples}
    return (
        _cell(series, lambda s: s.blocked_s), _cell(series, lambda s: s.durable_s),
        _cell(series, lambda s: payload / s.durable_s / 1e9), cell(figures.spread(of_fio)),
        _cell(series, lambda s: s.cpu_s / payload * 1e9), _cell(series, lambda s: s.extra_peak_bytes / 1e6, 0),
        "-".join(map(str, sorted(files))),
    )


def _device_rates(run: Run, entry: Entry, direction: str) -> dict[int, float]:
    """The rates of as many fio jobs as the row has ranks."""
    return (figures.device_rates if entry.ranks == 1 else figures.many_device_rates)(run, direction)


_LOAD_COLUMNS = ("load", "s", "GB/s", "relative to fio", "CPU-s/GB", "extra peak MB", "page cache", "exact")


def load_rows(run: Run, entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    for entry in entries:
        for how in entry.loads:
            for first in (True, False):
                series = figures.loads(run, entry.name, how, first=first)
                if any(series.values()):
                    again = "" if first else ", again in the same process"
                    yield f"{title_of(run, entry)}, {how}{again}", *_load_cells(run, entry, series)


def _load_cells(run: Run, entry: Entry, series: Series[LoadSample]) -> tuple[str, ...]:
    payload = figures.payload_bytes(run, entry.name)
    rates = figures.by_round(series, lambda s: payload / s.load_s / 1e9)
    of_fio = figures.ratios(rates, _device_rates(run, entry, "read"))
    samples = [sample for samples in series.values() for sample in samples]
    return (
        _cell(series, lambda s: s.load_s), _cell(series, lambda s: payload / s.load_s / 1e9),
        cell(figures.spread(of_fio)), _cell(series, lambda s: s.cpu_s / payload * 1e9),
        _cell(series, lambda s: s.extra_peak_bytes / 1e6, 0), _page_cache(samples),
        "yes" if all(s.exact for s in samples) else "NO",
    )


def _page_cache(samples: Sequence[LoadSample]) -> str:
    if any(sample.cold is None for sample in samples):
        return "unknown"
    if all(sample.cold for sample in samples):
        return "cold"
    return CACHED if all(sample.how.startswith(CACHED) for sample in samples) else "NOT COLD"


def sharing_table(run: Run) -> Table:
    """The gain and the cost of replicas when one rank reads for all."""
    columns = (
        "load", "times faster",
        *(f"{title}: {how}"
          for title in ("read from the device, relative to the state", "CPU-s/GB", "extra peak MB of a rank")
          for how in ("shared", "each")),
    )
    rows = []
    for condition in CONDITIONS:
        gains = figures.spread(sharing_gains(run, condition))
        if gains is None:
            continue
        hows = [replica_load(condition, how) for how in (SHARED, ALONE)]
        rows.append((
            condition, f"{cell(gains)}x",
            *(cell(figures.spread(figures.device_shares(run, REPLICAS, how))) for how in hows),
            *(cell(figures.spread(figures.load_cpu(run, REPLICAS, how))) for how in hows),
            *(cell(figures.spread(s.extra_peak_bytes / 1e6 for s in figures.each_load(run, REPLICAS, how)), 0)
              for how in hows),
        ))
    size = figures.payload_bytes(run, REPLICAS) / 1e9
    return Table(f"Four replicas of {size:.3f} GB: {SHARED}, against {ALONE}", columns, tuple(rows))


def against_table(run: Run) -> Table:
    """How many times longer each rival takes, first saves with first, later ones with later ones."""
    columns = (
        "Flowstone is faster than", "durable, first", "durable, later", "blocked, first", "blocked, later", "cold load",
    )
    ours, rows = figures.loads(run, OURS, entry_of(OURS).loads[0]), []
    for entry in ENTRIES:
        if entry.is_ours or not figures.rounds(run, entry.name) or not any(ours.values()):
            continue
        cells = [
            _times(figures.saves(run, entry.name, first=first), figures.saves(run, OURS, first=first), seconds)
            for seconds in (lambda s: s.durable_s, lambda s: s.blocked_s)
            for first in (True, False)
        ]
        theirs = figures.loads(run, entry.name, entry.loads[0])
        rows.append((title_of(run, entry), *cells, _times(theirs, ours, lambda s: s.load_s)))
    return Table("Flowstone against its rivals (times)", columns, tuple(rows))


def _times(
    theirs: Series[figures.Sample], ours: Series[figures.Sample], seconds: Callable[[figures.Sample], float]
) -> str:
    interval = figures.spread(figures.ratios(figures.by_round(theirs, seconds), figures.by_round(ours, seconds)))
    return cell(interval, 1) if interval is None else f"{cell(interval, 1)}x"


def failure_table(run: Run) -> Table:
    rows = [
        (entry_of(m.rival).title, str(m.round), m.error) for m in run.measured if m.error is not None
    ]
    return Table("What failed", ("row", "round", "why"), tuple(rows))


def notes(run: Run) -> tuple[str, ...]:
    """Notes for readers of the rows, and how Flowstone's bytes moved."""
    notes = []
    for entry in ENTRIES:
        if any(measured.rival == entry.name for measured in run.measured):
            backend = figures.note(run, entry.name)
            facts = [fact for fact in (entry.note, backend and f"Files are written with {backend}") if fact]
            notes += [f"{entry.title}: {'. '.join(facts)}."] if facts else []
    return tuple(notes)


def conditions(run: Run) -> str:
    return (
        f"{run.layout}. In each of {run.rounds} rounds, every row is measured once. Figures are medians "
        "(lowest-highest); ratios are medians of the rounds' ratios. GB are 10^9 bytes. Every timer includes the fsync "
        "of files and directories."
    )


def _cell(series: Series[figures.Sample], value: Callable[[figures.Sample], float], digits: int = 2) -> str:
    return cell(figures.spread(figures.values(series, value)), digits)
