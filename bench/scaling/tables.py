"""Goals, tables and growth curves from the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.charts import Curve, GrowthChart
from bench.figures import Spread, spread
from bench.goals import Goal
from bench.report import Table
from bench.scaling.records import Case, Outcome, Run
from bench.scaling.state import MODELS, PARALLELISMS

FIRST_PLAN_S, OF_BOUND, OF_MEAN, CACHED_MS = 60.0, 1.02, 1.02, 10.0
MILLION, INDEX_S, LOAD_S, MEMORY_BYTES = 1_000_000, 2.0, 1.0, 1e9
_MOST = "bytes of the rank that writes most"
LOAD_PHASES, SAVE_PHASES = ("open index", "load plan"), ("index", "manifest", "write index")


def goals(run: Run) -> tuple[Goal, ...]:
    """A goal about a job that was not planned is left out."""
    return (*_large(run), *_balance(run), *_cached(run), *_million(run))


def _done(run: Run) -> Iterator[tuple[Case, Outcome]]:
    yield from ((case, case.outcome) for case in run.cases if case.outcome is not None)


def _title(case: Case) -> str:
    return f"{MODELS[case.task.model].title}, {PARALLELISMS[case.task.how].title}, {case.task.ranks:,} ranks"


def _large(run: Run) -> Iterator[Goal]:
    ranks = max((case.task.ranks for case in run.cases), default=0)
    cases = [(case, outcome) for case, outcome in _done(run) if case.task.ranks == ranks]
    for case, outcome in cases:
        taken = outcome.spent["first plan"].cpu_s
        yield Goal(f"{_title(case)}: first plan, CPU-s of one core", _one(taken), FIRST_PLAN_S, at_most=True)


def _balance(run: Run) -> Iterator[Goal]:
    def of(value: Callable[[Outcome], float], how: Sequence[str]) -> Spread | None:
        return spread(value(outcome) for case, outcome in _done(run) if case.task.how in how)

    for how, form in PARALLELISMS.items():
        reached = of(lambda outcome: outcome.largest / outcome.bound, (how,))
        if reached is not None:
            worst = Spread(reached.high, reached.low, reached.high)
            text = f"{form.title}, all sizes: {_MOST}, relative to the least possible; the worst"
            yield Goal(text, worst, OF_BOUND, at_most=True, digits=3)
    for how, form in PARALLELISMS.items():
        if how in ("hsdp", "tp-pp-ddp", "tp-pp-zero"):
            reached = of(lambda outcome: outcome.largest / outcome.mean, (how,))
            even = of(lambda outcome: outcome.bound / outcome.mean, (how,))
            if reached is not None and even is not None:
                worst = Spread(reached.high, reached.low, reached.high)
                relative = f"relative to the mean (the least possible is {even.high:.3f})"
                text = f"{form.title}, all sizes: {_MOST}, {relative}; the worst"
                yield Goal(text, worst, OF_MEAN, at_most=True, digits=3)


def _cached(run: Run) -> Iterator[Goal]:
    reached = spread(outcome.cached_s * 1e3 for _, outcome in _done(run))
    if reached is not None:
        worst = Spread(reached.high, reached.low, reached.high)
        text = "save with the plan of an earlier save: time in `save`, ms; the worst of all jobs"
        yield Goal(text, worst, CACHED_MS, at_most=True)


def _million(run: Run) -> Iterator[Goal]:
    jobs = [(case, outcome) for case, outcome in _done(run) if outcome.pieces >= MILLION]
    if not jobs:
        return
    case, outcome = min(jobs, key=lambda pair: pair[1].pieces)
    title = f"{outcome.pieces:,} pieces ({_title(case)})"
    written, opened = (sum(outcome.spent[p].cpu_s for p in of) for of in (SAVE_PHASES, LOAD_PHASES))
    yield Goal(f"{title}: index made, written and synced, CPU-s", _one(written), INDEX_S, at_most=True)
    yield Goal(f"{title}: index opened and one rank's load planned, CPU-s", _one(opened), LOAD_S, at_most=True)
    peak = max(outcome.spent[phase].peak_bytes for phase in (*SAVE_PHASES, *LOAD_PHASES))
    yield Goal(f"{title}: additional memory, MB", _one(peak / 1e6), MEMORY_BYTES / 1e6, at_most=True,
               digits=0)


def _one(value: float) -> Spread:
    return Spread(value, value, value)


def tables(run: Run) -> tuple[Table, ...]:
    """Those that have rows."""
    rows = (
        Table("The first plan (rank 0 decodes all layouts, assigns writers, checks the plan and encodes its answer)",
              _PLAN_COLUMNS, tuple(_plan_rows(run))),
        Table("Bytes for each rank, and messages through the job's key-value store", _BALANCE_COLUMNS,
              tuple(_balance_rows(run))),
        Table("Index and manifest (rank 0, every save), and a load into another layout (every rank)", _INDEX_COLUMNS,
              tuple(_index_rows(run))),
        Table("What failed", ("job", "why"), tuple((_title(c), c.error) for c in run.cases if c.error is not None)),
    )
    return tuple(table for table in rows if table.rows)


_PLAN_COLUMNS = (
    "job", "state TB", "pieces held", "pieces written", "one rank's message kB", "to encode it, ms",
    "first plan, CPU-s", "peak MB", "one rank's write plan, ms", "cached, ms",
)


def _plan_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for case, outcome in _done(run):
        plan = outcome.spent["first plan"]
        yield (
            _title(case), f"{outcome.state_bytes / 1e12:.2f}", f"{outcome.held_pieces:,}", f"{outcome.pieces:,}",
            f"{outcome.message_bytes / 1e3:.1f}", f"{outcome.spent['say'].cpu_s * 1e3:.0f}", f"{plan.cpu_s:.2f}",
            f"{plan.peak_bytes / 1e6:.0f}", f"{outcome.spent['write plan'].cpu_s * 1e3:.0f}",
            f"{outcome.cached_s * 1e3:.2f}",
        )


_BALANCE_COLUMNS = (
    "job", "mean GB", "largest writer / least possible", "least possible / mean", "largest writer / mean",
    "largest piece / mean", "first plan: messages", "MB", "each save: receipts MB",
)


def _balance_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for case, outcome in _done(run):
        yield (
            _title(case), f"{outcome.mean / 1e9:.2f}", f"{outcome.largest / outcome.bound:.3f}",
            f"{outcome.bound / outcome.mean:.3f}", f"{outcome.largest / outcome.mean:.3f}",
            f"{outcome.largest_piece / outcome.mean:.3f}", f"{outcome.posted:,}", f"{outcome.posted_bytes / 1e6:.1f}",
            f"{outcome.posted_receipts_bytes / 1e6:.1f}",
        )


_INDEX_COLUMNS = (
    "job", "pieces", "index MB", "index made, CPU-s", "peak MB", "manifest kB", "written and synced, s",
    "opened, CPU-s", "load plan, CPU-s", "peak MB of both", "loaded into", "reads", "reads, MB",
)


def _index_rows(run: Run) -> Iterator[tuple[str, ...]]:
    for case, outcome in _done(run):
        spent = outcome.spent
        opened, planned = (spent[phase] for phase in LOAD_PHASES)
        yield (
            _title(case), f"{outcome.pieces:,}", f"{outcome.index_bytes / 1e6:.1f}", f"{spent['index'].cpu_s:.2f}",
            f"{spent['index'].peak_bytes / 1e6:.0f}", f"{outcome.manifest_bytes / 1e3:.0f}",
            f"{spent['write index'].seconds:.2f}", f"{opened.cpu_s:.2f}", f"{planned.cpu_s:.2f}",
            f"{max(opened.peak_bytes, planned.peak_bytes) / 1e6:.0f}", PARALLELISMS[case.task.target].title,
            f"{outcome.reads:,}", f"{outcome.read_bytes / 1e6:,.0f}",
        )


def charts(run: Run) -> tuple[GrowthChart, ...]:
    """Of the model with the most bytes among those with two sizes."""
    models = {case.task.model: outcome.state_bytes for case, outcome in _done(run)}
    if not models:
        return ()
    model = max(models, key=models.__getitem__)
    title = MODELS[model].title
    rows = (
        GrowthChart(
            "scale-plan", f"First plan, CPU-seconds: {title}", "One core of rank 0. The dashed line is the goal.",
            _curves(run, model, lambda o: o.spent["first plan"].cpu_s), FIRST_PLAN_S,
        ),
        GrowthChart(
            "scale-index", f"Index made, CPU-seconds: {title}", "Rank 0, in the background of every save.",
            _curves(run, model, lambda o: o.spent["index"].cpu_s),
        ),
        GrowthChart(
            "scale-load", f"Index opened and load planned, CPU-seconds: {title}", "One rank of another layout.",
            _curves(run, model, lambda o: sum(o.spent[phase].cpu_s for phase in LOAD_PHASES)),
        ),
        GrowthChart(
            "scale-memory", f"Largest memory of a phase, MB: {title}", "Beyond what the process held before it.",
            _curves(run, model, lambda o: max(spent.peak_bytes for spent in o.spent.values()) / 1e6),
        ),
        GrowthChart(
            "scale-store", f"First plan through the job's store, MB: {title}", "All messages of all ranks.",
            _curves(run, model, lambda o: o.posted_bytes / 1e6),
        ),
    )
    return tuple(chart for chart in rows if chart.curves)


def _curves(run: Run, model: str, value: Callable[[Outcome], float]) -> tuple[Curve, ...]:
    curves = []
    for how, parallelism in PARALLELISMS.items():
        points = sorted(
            (case.task.ranks, max(value(outcome), 1e-4))
            for case, outcome in _done(run) if (case.task.model, case.task.how) == (model, how)
        )
        if points:
            curves.append(Curve(parallelism.title, tuple(points)))
    return tuple(curves)


NOTES = (
    "Only the ranks are simulated. Every message, plan, index and manifest is made by the code that a job runs.",
    (
        "Processor time is that of one process on one core. A peak is the memory that a phase uses in addition to the "
        "memory in use before it."
    ),
    (
        "The least possible is computed by an exact maximum flow, which may cut pieces anywhere. Plans cut long "
        "replicas between rows."
    ),
    (
        "A receipt is what a rank reports after it has written. Receipts of 33 ranks, with random digests, stand for "
        "those of all ranks. The bytes of a receipt count at every level of the tree."
    ),
)
