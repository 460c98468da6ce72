"""Tables and charts from raw numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median

from bench.charts import Bar, BarChart
from bench.figures import spread
from bench.goals import cell
from bench.report import Table
from bench.rivals import Entry
from bench.training import figures
from bench.training.goals import drills, times_perceived
from bench.training.programme import FULL, GOAL_EVERY, PARTICIPANTS, PROGRAMMES
from bench.training.records import Run, SavedSample


def tables(run: Run) -> tuple[Table, ...]:
    """Those that have rows."""
    tables = (
        Table("Steps of training, compared with as many steps without saves in the same process", _STEP_COLUMNS,
              tuple(_step_rows(run))),
        Table("Saves during training (without the first save of each process, except in rows that say so)",
              _SAVE_COLUMNS, tuple(_save_rows(run))),
        Table("The cost of saves for training", _COST_COLUMNS, tuple(_cost_rows(run))),
        Table("Flowstone alone, without training", _DRILL_COLUMNS, tuple(_drill_rows(run))),
        Table("What failed", ("row", "round", "why"), tuple(_failure_rows(run))),
    )
    return tuple(table for table in tables if table.rows)


def _entries(run: Run) -> Iterator[tuple[Entry, int]]:
    """The systems that trained, with each interval at which they saved."""
    for entry in PARTICIPANTS:
        for every in figures.intervals(run, entry.name):
            yield entry, every


def _title(entry: Entry, every: int) -> str:
    return f"{entry.title}, every {every}" if every > 1 else f"{entry.title}, every step"


_PERCENTS = (50, 95, 99)
_STEP_COLUMNS = (
    "a save", "steps", *(f"p{p} s" for p in _PERCENTS), *(f"p{p} s, no saves" for p in _PERCENTS),
    "p95 relative to no saves", "total relative to no saves",
)


def _step_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for entry, every in _entries(run):
        legs = figures.pairs(run, entry.name, every)
        with_saves, without = (
            figures.steps(pair[index] for of in legs.values() for pair in of) for index in (1, 0)
        )
        yield (
            _title(entry, every), str(len(with_saves)),
            *(f"{figures.percentile(samples, p):.3f}" for samples in (with_saves, without) for p in _PERCENTS),
            cell(spread(figures.percentile_ratios(legs, 95)), 3), cell(spread(figures.total_ratios(legs)), 3),
        )


_SAVE_COLUMNS = (
    "a save", "saves", "in `save` ms", "at the fence ms", "blocked ms", "perceived GB/s", "durable s", "GB/s durable",
    "Flowstone's perceived GB/s, times",
)


def _save_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for entry in PARTICIPANTS:
        firsts = [save for save in figures.first_saves(run, entry.name) if save.error is None]
        if firsts:
            yield f"{entry.title}, first of a process", *_save_cells(run, entry, firsts), ""
        for every in figures.intervals(run, entry.name):
            saves = [save for of in figures.later_saves(run, entry.name, every).values() for save in of]
            if saves:
                times = "" if entry.is_ours else cell(times_perceived(run, entry.name, every), 0)
                yield _title(entry, every), *_save_cells(run, entry, saves), times


def _save_cells(run: Run, entry: Entry, saves: list[SavedSample]) -> tuple[str, ...]:
    payload = figures.payload_bytes(run, entry.name)

    def column(value: Callable[[SavedSample], float], digits: int = 2) -> str:
        return cell(spread(map(value, saves)), digits)

    return (
        str(len(saves)), column(lambda s: s.save_s * 1e3, 1), column(lambda s: s.fence_s * 1e3, 1),
        column(lambda s: s.blocked_s * 1e3, 1), column(lambda s: payload / s.blocked_s / 1e9),
        column(lambda s: s.durable_s or 0.0), column(lambda s: payload / (s.durable_s or float("inf")) / 1e9),
    )


_COST_COLUMNS = (
    "a save", "remaining after the last step, s", "next optimizer step longer by ms", "extra CPU-s/GB",
    "extra peak MB", "extra shared MB", "failed", "last save exact",
)


def _cost_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for entry, every in _entries(run):
        legs = figures.pairs(run, entry.name, every)
        peaks = figures.extra_peaks(run, entry.name, every)
        differing = [outcome.differing for outcome in figures.outcomes(run, entry.name).values()]
        yield (
            _title(entry, every), cell(spread(saves.drain_s for of in legs.values() for _, saves in of)),
            cell(spread(seconds * 1e3 for seconds in figures.longer_optimizer_s(legs)), 0),
            cell(spread(figures.cpu_per_gb(run, entry.name, every))),
            cell(spread(resident / 1e6 for resident, _ in peaks), 0),
            cell(spread(shared / 1e6 for _, shared in peaks), 0),
            str(len(figures.failures(run, entry.name, every))), "NO" if any(differing) else "yes",
        )


_DRILL_COLUMNS = (
    "saves of", "saves", "first `save` ms", "later `save` ms", "fence ms", "GB/s durable", "CPU-s/GB",
    "extra peak MB", "shared MB", "dirty MB", "failed",
)


def _drill_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for drill in PROGRAMMES[run.programme].drills:
        outcomes = drills(run, drill.name)
        pairs = [(outcome, sample) for outcome in outcomes for sample in outcome.samples]
        if not pairs:
            continue
        later = [(outcome, sample) for outcome, sample in pairs if sample.number > 1]
        # With a step after every save, its processor time is included, and the next save waits for this one's end.
        alone = [] if drill.stepping else later
        yield (
            drill.title, str(len(pairs)), cell(spread(s.save_s * 1e3 for _, s in pairs if s.number == 1), 1),
            cell(spread(s.save_s * 1e3 for _, s in later), 1), cell(spread(s.fence_s * 1e3 for _, s in later), 1),
            cell(spread(o.payload_bytes / s.durable_s / 1e9 for o, s in later)),
            cell(spread(s.cpu_s / o.payload_bytes * 1e9 for o, s in alone)),
            cell(spread((s.peak_bytes - o.before_bytes) / 1e6 for o, s in pairs), 0),
            cell(spread(s.shared_bytes / 1e6 for _, s in pairs), 0),
            cell(spread(s.dirty_bytes / 1e6 for _, s in pairs), 0), str(sum(len(o.failures) for o in outcomes)),
        )


def _failure_rows(run: Run) -> Iterator[tuple[str, str, str]]:
    titles = {entry.name: entry.title for entry in PARTICIPANTS}
    for trained in run.trained:
        title, number = titles[trained.rival], str(trained.round)
        if trained.outcome is None:
            yield title, number, trained.error or ""
            continue
        for block in trained.outcome.blocks:
            errors = [save.error for save in block.saves if save.error is not None]
            if errors:
                yield f"{title}, every {block.every}", number, f"{len(errors)} of {len(block.saves)} saves: {errors[0]}"
        if differing := trained.outcome.differing:
            others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            yield title, number, f"the last save came back with other bytes in {differing[0]}{others}"
    for drilled in run.drilled:
        title, number = PROGRAMMES[run.programme].drill(drilled.drill).title, str(drilled.round)
        if drilled.outcome is None:
            yield title, number, drilled.error or ""
        elif drilled.outcome.failures:
            yield title, number, f"{len(drilled.outcome.failures)} saves failed: {drilled.outcome.failures[0]}"


def notes(run: Run) -> tuple[str, ...]:
    """Notes for readers of the rows."""
    notes = [f"{entry.title}: {entry.note}." for entry in PARTICIPANTS if entry.note and _took_part(run, entry)]
    fence = "The time at the fence is from Flowstone's own events. The next optimizer step is timed by the benchmark."
    few = "With fewer than a hundred steps, p99 is nearly the slowest step."
    return (*notes, fence, few, "Dirty pages are those of the whole machine, not of one process.")


def _took_part(run: Run, entry: Entry) -> bool:
    return any(trained.rival == entry.name for trained in run.trained)


def conditions(run: Run) -> str:
    shape, window = run.shape, run.calibration.window
    outcome = next((trained.outcome for trained in run.trained if trained.outcome is not None), None)
    size = "" if outcome is None else f", a state of {outcome.payload_bytes / 1e9:.3f} GB in {outcome.tensors} tensors"
    laps = run.calibration.step_s
    took = f"a step took {median(laps):.2f} s then" if laps else ""
    origin = f". The length of the texts was chosen for steps of about {FULL.target_s:g} s, and {took}" if laps else ""
    return (
        f"GPT-2 of {shape.parameters / 1e6:.1f} million parameters ({shape.depth} layers of width {shape.width}, "
        f"vocabulary {shape.vocabulary:,}) with AdamW, fp32{size}, trained on the source of Python's standard library "
        f"in batches of {window.batch} texts of {window.length} tokens{origin}. Rounds: {run.rounds}. In each round, "
        "each system trains in one process, in which blocks of steps with and without saves alternate. Figures are "
        "medians (lowest-highest). A ratio to training without saves has one value for each round; percentiles are "
        "over the steps of all rounds. The time of a step includes the call of `save` after it. GB are 10^9 bytes. "
        "Durable means that files and directories were synced."
    )


def charts(run: Run) -> tuple[BarChart, ...]:
    """The charts that have bars, for the interval of the goals."""
    every = f"a save every {GOAL_EVERY} steps"
    rows = (
        BarChart(
            "interference-total", "Training time, relative to no saves",
            f"{every}; less is better, 1 is no interference.",
            _bars(run, lambda e: figures.total_ratios(figures.pairs(run, e.name, GOAL_EVERY))), None, 3,
        ),
        BarChart(
            "interference-blocked", "Training blocked by a save, milliseconds", f"{every}; less is better.",
            _bars(run, lambda e: [
                save.blocked_s * 1e3 for of in figures.later_saves(run, e.name, GOAL_EVERY).values() for save in of
            ]), None, 1,
        ),
    )
    return tuple(chart for chart in rows if chart.bars)


def _bars(run: Run, values: Callable[[Entry], Iterable[float]]) -> tuple[Bar, ...]:
    rows = ((entry, spread(values(entry))) for entry in PARTICIPANTS if _took_part(run, entry))
    return tuple(Bar(entry.title, value, entry.is_ours) for entry, value in rows if value is not None)
