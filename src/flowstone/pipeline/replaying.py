"""A load that goes on from its checkpoint through the journals, and what it tells of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.entries import step_directory
from flowstone.commit.journals import Chain
from flowstone.errors import DamagedError, RankError
from flowstone.events import FellBack
from flowstone.journal_events import NotReplayed, Replayed
from flowstone.log import log
from flowstone.pipeline.load_outcome import LoadReport, Replay
from flowstone.pipeline.replay import Fitted, UnfitError, count_readable, fit, replay
from flowstone.pipeline.shared import Shared
from flowstone.ranks import Decision

if TYPE_CHECKING:
    from flowstone.layout_rules import LoadRule


class _Fits(msgspec.Struct, frozen=True):
    """What a rank says before a replay. `chain`: which journals it has found; `why`: it cannot replay them, "" if it
    can; `steps`: how many it can read, where damage is allowed.
    """

    chain: tuple[tuple[str, int], ...] = ()
    why: str = ""
    steps: int = 0


def go_on(
    shared: Shared, report: LoadReport, state: Mapping[str, object], chain: Chain | None, *, newest: int,
    rules: Sequence[LoadRule], fallback: bool,
) -> LoadReport:
    """Replay what leads further from the checkpoint that `report` is of, to step `newest`. Returns the report of both.

    chain  that rank 0 has found; None on other ranks, which look for the same

    A journal of another layout is not replayed: the state stays that of the checkpoint, and the report says how many
    steps are missing, and why. Raises what `replay` does, but for that. Several ranks do all of it alike.
    """
    outcome, base, group = shared.outcome, report.step, shared.group
    checkpoint, failure = Checkpoint(shared.store, step_directory(base), shared.options), None
    try:
        fitted, damage = _fit_together(shared, report, state, chain, newest, rules=rules, fallback=fallback)
    except UnfitError as unfit:
        return _without(shared, report, chain, newest, str(unfit))
    outcome.unfinished = f"the replay of the steps after {base} did not finish"
    try:
        found, met = replay(shared.store, checkpoint, state, fitted, fallback=fallback and group.size == 1)
    except Exception as error:
        failure = error
    group.confirm(f"the replay of the steps after {base}", failure)
    outcome.unfinished, step, damage = None, fitted.chain.newest, damage or met
    if damage is not None:
        step = outcome.superseded_above = _reached(shared, fitted.chain, found.steps)
        found = replace(found, newest=newest, reason=str(damage))
        log.warning("the journal is damaged behind step %d: %s", step, damage)
        shared.emit(FellBack(step, str(damage)))
    shared.emit(Replayed(base, step, found.seconds))
    return replace(report, step=step, replay=found, seconds=report.seconds + found.seconds)


def _fit_together(
    shared: Shared, report: LoadReport, state: Mapping[str, object], chain: Chain | None, newest: int, *,
    rules: Sequence[LoadRule], fallback: bool,
) -> tuple[Fitted, Exception | None]:
    """What all ranks can replay; and the damage behind it, which `fallback` allows. Changes nothing.

    Where damage is allowed, several ranks read their files first: a step that is made cannot be taken back.

    raises  UnfitError  some rank cannot; on all of them
    """
    store, group, fitted, mine = shared.store, shared.group, None, _Fits()
    failure: Exception | None = None
    reads_first = fallback and group.size > 1
    try:
        chain = _found(shared, chain, newest)
        _check_same(report, rules, chain, group.size)
        fitted = fit(store, state, chain, group.rank)
        steps = count_readable(store, fitted) if reads_first else 0
        mine = _Fits(tuple((part.journal.opening.id, part.until) for part in chain.parts), "", steps)
    except UnfitError as unfit:
        mine = _Fits(why=str(unfit))
    except Exception as error:
        failure = error
    words = failure or msgspec.msgpack.encode(mine)
    agreed = group.agreement.agree(f"the journals after step {report.step}", words, _fits)
    told = msgspec.msgpack.decode(agreed.common, type=_Fits)
    if told.why:
        raise UnfitError(told.why)
    assert fitted is not None, "what all can replay, this rank can"
    places = list(fitted.chain.steps(store, group.rank)) if reads_first else []
    if told.steps >= len(places):
        return fitted, None
    cut = fitted.chain.up_to(places[told.steps - 1][1].step if told.steps else report.step)
    fitted = msgspec.structs.replace(fitted, chain=cut, openings=fitted.openings[: len(cut.parts)])
    return fitted, DamagedError(f"what replays step {places[told.steps][1].step} is damaged, in the file of some rank")


def _fits(said: Sequence[bytes]) -> Decision:
    """On rank 0: what all ranks can replay."""
    all_said = [msgspec.msgpack.decode(one, type=_Fits) for one in said]
    for rank, one in enumerate(all_said):
        if one.why:
            whose = "" if len({other.why for other in all_said}) == 1 else f"rank {rank}: "
            return Decision(msgspec.msgpack.encode(_Fits(why=f"{whose}{one.why}")))
        if one.chain != all_said[0].chain:
            raise RankError(
                f"rank {rank} sees other journals than rank 0", rank=rank, phase="replay",
                next="use one directory that every node sees, with changes visible at once",
            )
    return Decision(msgspec.msgpack.encode(_Fits(steps=min(one.steps for one in all_said))))


def _found(shared: Shared, chain: Chain | None, newest: int) -> Chain:
    chain = journals.leads_to(shared.store, newest) if chain is None else chain
    if chain is None:
        raise RankError(
            f"rank {shared.group.rank} sees no journal that leads to step {newest}, as rank 0 does",
            rank=shared.group.rank, phase="replay",
            next="use one directory that every node sees, with changes visible at once",
        )
    return chain


def _reached(shared: Shared, chain: Chain, steps: int) -> int:
    places = list(chain.steps(shared.store, shared.group.rank))
    return places[steps - 1][1].step if steps else chain.base


def _check_same(report: LoadReport, rules: Sequence[LoadRule], chain: Chain, ranks: int) -> None:
    """Raise Unfit for what is known without a look at the state."""
    for part in chain.parts:
        saved = part.journal.opening.ranks
        if saved != ranks:
            raise UnfitError(f"its steps were made by {saved} ranks, and here are {ranks}")
    if rules or report.cast or report.renamed or report.skipped:
        raise UnfitError("the checkpoint was loaded with rules, into another layout")


def _without(shared: Shared, report: LoadReport, chain: Chain | None, newest: int, why: str) -> LoadReport:
    """The report of a load that stays at the checkpoint."""
    if chain is not None:  # on rank 0
        count = sum(1 for _ in chain.steps(shared.store, 0))
        log.warning(
            "loaded step %d; %d steps after it, to step %d, are in a journal that is not replayed: %s. To have them, "
            "load into the layout, and on as many ranks, as they were saved with, and save there; to drop them, call "
            "rewind(%d)", report.step, count, newest, why, report.step,
        )
    shared.emit(NotReplayed(report.step, newest, why))
    return replace(report, replay=Replay(report.step, 0, newest, "exact", None, why, 0.0, 0))
