"""The goals of lazy capture, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Spread, ratios, spread
from bench.goals import Goal
from bench.rivals import OURS
from bench.training import figures
from bench.training.programme import FLAT, GOAL_EVERY, MANY, PROGRAMMES
from bench.training.records import DrillOutcome, Run

BLOCKED_MS, FIRST_BLOCKED_MS, SAVE_AND_FENCE_MS = 10.0, 100.0, 20.0
TOTAL, P95 = 1.03, 1.10  # relative to no saves
TIMES_PERCEIVED = 500.0  # relative to torch.save; DataStates-LLM reports 48
FLAT_MB = 16.0  # a line through noise is not quite flat; a leak of one state or one budget is far larger


def goals(run: Run) -> tuple[Goal, ...]:
    """In the order of the goals' table. One about a row that was not run is left out."""
    return (*_blocked(run), *_training(run), *_flat(run))


def drills(run: Run, name: str) -> list[DrillOutcome]:
    return [drilled.outcome for drilled in run.drilled if drilled.drill == name and drilled.outcome is not None]


def _asked(run: Run, name: str) -> bool:
    return any(drilled.drill == name for drilled in run.drilled)


def _blocked(run: Run) -> Iterator[Goal]:
    if not _asked(run, MANY):
        return
    title = PROGRAMMES[run.programme].drill(MANY).title
    samples = [sample for outcome in drills(run, MANY) for sample in outcome.samples]
    for first, expected, when in ((False, BLOCKED_MS, "later saves"), (True, FIRST_BLOCKED_MS, "first save")):
        reached = spread(sample.save_s * 1e3 for sample in samples if (sample.number == 1) == first)
        yield Goal(
            f"time for which `save` blocks training, {title} in all, {when}, ms", reached, expected, at_most=True,
            digits=1,
        )


def _training(run: Run) -> Iterator[Goal]:
    if not any(trained.rival == OURS for trained in run.trained):
        return
    every = f"a save every {GOAL_EVERY} steps"
    saves = [save for of in figures.later_saves(run, OURS, GOAL_EVERY).values() for save in of]
    reached = spread(save.blocked_s * 1e3 for save in saves)
    text = f"blocked in total (in `save`, and by waiting for its capture), {every}, ms"
    yield Goal(text, reached, SAVE_AND_FENCE_MS, at_most=True, digits=1)
    legs = figures.pairs(run, OURS, GOAL_EVERY)
    reached = spread(figures.total_ratios(legs))
    yield Goal(f"training time, {every}, relative to no saves", reached, TOTAL, at_most=True, digits=3)
    reached = spread(figures.percentile_ratios(legs, 95))
    yield Goal(f"p95 of the step time, {every}, relative to no saves", reached, P95, at_most=True, digits=3)
    if any(trained.rival == "torch" for trained in run.trained):
        reached = times_perceived(run, "torch", GOAL_EVERY)
        yield Goal(f"perceived throughput, {every}, relative to torch.save's", reached, TIMES_PERCEIVED, digits=0)


def times_perceived(run: Run, rival: str, every: int) -> Spread | None:
    """Ours relative to a rival's: bytes over blocked time, medians of each round. The states are the same."""
    ours, theirs = (
        {key: median_s for key, of in figures.later_saves(run, who, every).items()
         if (median_s := _median(save.blocked_s for save in of)) is not None}
        for who in (OURS, rival)
    )
    return spread(ratios(theirs, ours))


def _median(values: Iterator[float]) -> float | None:
    interval = spread(values)
    return None if interval is None else interval.median


def _flat(run: Run) -> Iterator[Goal]:
    if not _asked(run, FLAT):
        return
    outcomes = drills(run, FLAT)
    drill = PROGRAMMES[run.programme].drill(FLAT)
    for title, values in (
        ("resident memory", [[s.peak_bytes for s in outcome.samples] for outcome in outcomes]),
        ("shared memory", [[s.shared_bytes for s in outcome.samples] for outcome in outcomes]),
        ("dirty pages", [[s.dirty_bytes for s in outcome.samples] for outcome in outcomes]),
    ):
        grown = (figures.growth(outcome.samples, of) for outcome, of in zip(outcomes, values, strict=True))
        reached = spread(bytes_ / 1e6 for bytes_ in grown if bytes_ is not None)
        text = f"{drill.saves} saves of {drill.title}: growth of {title}, MB"
        yield Goal(text, reached, FLAT_MB, at_most=True, digits=1)
    failed = spread(float(len(outcome.failures)) for outcome in outcomes)
    yield Goal(f"{drill.saves} saves of {drill.title}: failures", failed, 0.0, at_most=True, digits=0)
