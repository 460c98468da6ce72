"""A load that goes on from its checkpoint through the journals, and what it tells of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.entries import step_directory
from flowstone.commit.journals import Chain
from flowstone.events import FellBack, NotReplayed, Replayed
from flowstone.log import log
from flowstone.pipeline.load_outcome import LoadReport, Replay
from flowstone.pipeline.replay import UnfitError, replay
from flowstone.pipeline.shared import Shared

if TYPE_CHECKING:
    from flowstone.layout_rules import LoadRule


def go_on(
    shared: Shared, report: LoadReport, state: Mapping[str, object], chain: Chain | None, *, rules: Sequence[LoadRule],
    fallback: bool,
) -> LoadReport:
    """Replay what leads further from the checkpoint that `report` is of. Returns the report of both.

    A journal of another layout is not replayed: the state stays that of the checkpoint, and the report says how many
    steps are missing, and why. Raises what `replay` does, but for that.
    """
    chain = journals.newest_chain(shared.store) if chain is None else chain
    if chain is None:
        return report
    outcome, base = shared.outcome, report.step
    checkpoint = Checkpoint(shared.store, step_directory(base), shared.options)
    outcome.unfinished = f"the replay of the steps after {base} did not finish"
    try:
        _check_same(report, rules, chain, shared.group.size)
        found, damage = replay(
            shared.store, checkpoint, state, chain, rank=shared.group.rank, fallback=fallback
        )
    except UnfitError as unfit:
        outcome.unfinished = None
        return _without(shared, report, chain, str(unfit))
    outcome.unfinished = None
    step = chain.newest
    if damage is not None:
        step = outcome.superseded_above = _reached(shared, chain, found.steps)
        log.warning("the journal is damaged behind step %d: %s", step, damage)
        shared.emit(FellBack(step, str(damage)))
    shared.emit(Replayed(base, step, found.seconds))
    return replace(report, step=step, replay=found, seconds=report.seconds + found.seconds)


def _reached(shared: Shared, chain: Chain, steps: int) -> int:
    places = list(chain.steps(shared.store, shared.group.rank))
    return places[steps - 1][1].step if steps else chain.base


def _check_same(report: LoadReport, rules: Sequence[LoadRule], chain: Chain, ranks: int) -> None:
    """Raise Unfit for what is known without a look at the state."""
    saved = chain.parts[0].journal.opening.ranks
    if saved != ranks:
        raise UnfitError(f"its steps were made by {saved} ranks, and here are {ranks}")
    if rules or report.cast or report.renamed or report.skipped:
        raise UnfitError("the checkpoint was loaded with rules, into another layout")


def _without(shared: Shared, report: LoadReport, chain: Chain, why: str) -> LoadReport:
    """The report of a load that stays at the checkpoint."""
    count = sum(1 for _ in chain.steps(shared.store, 0))
    log.warning(
        "loaded step %d; %d steps after it, to step %d, are in a journal that is not replayed: %s. To have them, load "
        "into the layout, and on as many ranks, as they were saved with, and save there; to drop them, call rewind(%d)",
        report.step, count, chain.newest, why, report.step,
    )
    shared.emit(NotReplayed(report.step, chain.newest, why))
    return replace(report, replay=Replay(report.step, 0, chain.newest, "exact", None, why, 0.0, 0))
