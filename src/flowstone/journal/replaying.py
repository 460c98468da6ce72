"""Continue a load from its checkpoint through the journals, and make one report of the load and the replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from flowstone.commit.entries import step_directory
from flowstone.errors import DamagedError, RankError
from flowstone.journal import journals
from flowstone.journal.journal_events import NotReplayed, Replayed
from flowstone.journal.journals import Chain
from flowstone.journal.replay import ReplayPlan, UnfitError, count_readable, plan_replay, replay
from flowstone.log import log
from flowstone.ranks import Decision
from flowstone.reading.checkpoint import Checkpoint
from flowstone.session.load_outcome import LoadReport, Replay
from flowstone.session.shared import Shared

if TYPE_CHECKING:
    from flowstone.layouts.layout_rules import LoadRule


class _ReplayReport(msgspec.Struct, frozen=True):
    """A rank's report before a replay.

    chain  the journals that it has found: (id, last step) of each
    why    why it cannot replay them; "" if it can
    steps  if a load may continue in spite of damage: the number of readable steps
    """

    chain: tuple[tuple[str, int], ...] = ()
    why: str = ""
    steps: int = 0


def replay_journals(
    shared: Shared, report: LoadReport, state: Mapping[str, object], chain: Chain | None, *, newest: int,
    rules: Sequence[LoadRule], fallback: bool,
) -> LoadReport:
    """Replay the journals from the checkpoint of `report` to step `newest`. Returns one report of load and replay.

    chain  the journals, on rank 0; None on other ranks, which find them themselves

    A journal that does not fit the state is not replayed: the state stays at the checkpoint, and the report names the
    missing steps and the reason. Raises the errors of `replay`. All ranks do the same.
    """
    outcome, base, group = shared.outcome, report.step, shared.group
    checkpoint, failure = Checkpoint(shared.store, step_directory(base), shared.options), None
    try:
        fitted, damage = _fit_together(shared, report, state, chain, newest, rules=rules, fallback=fallback)
    except UnfitError as unfit:
        return _without(shared, report, chain, newest, str(unfit))
    outcome.begin_replay(base)
    try:
        replayed, new_damage = replay(shared.store, checkpoint, state, fitted, fallback=fallback and group.size == 1)
    except Exception as error:
        failure = error
    group.confirm_all(f"the replay of the steps after {base}", failure)
    outcome.end_replay()
    step, damage = fitted.chain.newest, damage or new_damage
    if damage is not None:
        step = _reached(shared, fitted.chain, replayed.steps)
        outcome.fall_back(step)
        replayed = replace(replayed, newest=newest, reason=str(damage))
        log.warning("the journal is damaged after step %d: %s", step, damage)
        from flowstone.events.rare_events import FellBack  # imported here: few loads fall back

        shared.emit(FellBack(step, str(damage)))
    shared.emit(Replayed(base, step, replayed.seconds))
    return replace(report, step=step, replay=replayed, seconds=report.seconds + replayed.seconds)


def _fit_together(
    shared: Shared, report: LoadReport, state: Mapping[str, object], chain: Chain | None, newest: int, *,
    rules: Sequence[LoadRule], fallback: bool,
) -> tuple[ReplayPlan, Exception | None]:
    """Returns a plan for the steps that all ranks can replay; and, if `fallback` is set, the error of a damaged frame
    after these.

    With `fallback` and several ranks, every rank reads its whole files first, since a replayed step cannot be undone.

    raises  UnfitError  on all ranks, if one of them cannot replay the journals
    """
    store, group, fitted, mine = shared.store, shared.group, None, _ReplayReport()
    failure: Exception | None = None
    reads_first = fallback and group.size > 1
    try:
        chain = _found(shared, chain, newest)
        _check_same(report, rules, chain, group.size)
        fitted = plan_replay(store, state, chain, group.rank)
        steps = count_readable(store, fitted) if reads_first else 0
        mine = _ReplayReport(tuple((part.journal.header.id, part.until) for part in chain.parts), "", steps)
    except UnfitError as unfit:
        mine = _ReplayReport(why=str(unfit))
    except Exception as error:
        failure = error
    message = failure or msgspec.msgpack.encode(mine)
    agreed = group.agreement.agree(f"the journals after step {report.step}", message, _fits)
    common = msgspec.msgpack.decode(agreed.common, type=_ReplayReport)
    if common.why:
        raise UnfitError(common.why)
    assert fitted is not None, "this rank can, as all can"
    places = list(fitted.chain.steps(store, group.rank)) if reads_first else []
    if common.steps >= len(places):
        return fitted, None
    cut = fitted.chain.up_to(places[common.steps - 1][1].step if common.steps else report.step)
    fitted = msgspec.structs.replace(fitted, chain=cut, openings=fitted.openings[: len(cut.parts)])
    damaged = places[common.steps][1].step
    return fitted, DamagedError(f"the journal frame of step {damaged} is damaged on one rank")


def _fits(answers: Sequence[bytes]) -> Decision:
    """On rank 0: decide which steps all ranks can replay."""
    reports = [msgspec.msgpack.decode(data, type=_ReplayReport) for data in answers]
    for rank, report in enumerate(reports):
        if report.why:
            whose = "" if len({other.why for other in reports}) == 1 else f"rank {rank}: "
            return Decision(msgspec.msgpack.encode(_ReplayReport(why=f"{whose}{report.why}")))
        if report.chain != reports[0].chain:
            raise RankError(
                f"rank {rank} sees other journals than rank 0", rank=rank, phase="replay",
                next="use one directory that every node sees, with changes visible at once",
            )
    return Decision(msgspec.msgpack.encode(_ReplayReport(steps=min(report.steps for report in reports))))


def _found(shared: Shared, chain: Chain | None, newest: int) -> Chain:
    chain = journals.journal_chain(shared.store, newest) if chain is None else chain
    if chain is None:
        raise RankError(
            f"rank {shared.group.rank} sees no journal that leads to step {newest}, but rank 0 does",
            rank=shared.group.rank, phase="replay",
            next="use one directory that every node sees, with changes visible at once",
        )
    return chain


def _reached(shared: Shared, chain: Chain, steps: int) -> int:
    places = list(chain.steps(shared.store, shared.group.rank))
    return places[steps - 1][1].step if steps else chain.base


def _check_same(report: LoadReport, rules: Sequence[LoadRule], chain: Chain, ranks: int) -> None:
    """Raise UnfitError if the journals cannot be replayed, for a reason that does not depend on the state."""
    for part in chain.parts:
        saved = part.journal.header.ranks
        if saved != ranks:
            raise UnfitError(f"the journal was written by {saved} ranks, but this job has {ranks}")
    if rules or report.cast or report.renamed or report.skipped:
        raise UnfitError("the checkpoint was loaded with rules, into another layout")


def _without(shared: Shared, report: LoadReport, chain: Chain | None, newest: int, why: str) -> LoadReport:
    """The report of a load that stays at the checkpoint. `why`: why the journals are not replayed."""
    if chain is not None:  # true only on rank 0
        count = sum(1 for _ in chain.steps(shared.store, 0))
        log.warning(
            "loaded step %d; %d steps after it, to step %d, are in a journal that cannot be replayed here: %s. To "
            "keep them, load with as many ranks and into the same layout as in training, then save a checkpoint; "
            "to drop them, call rewind(%d)", report.step, count, newest, why, report.step,
        )
    shared.emit(NotReplayed(report.step, newest, why))
    return replace(report, replay=Replay(report.step, 0, newest, "exact", None, why, 0.0, 0))
