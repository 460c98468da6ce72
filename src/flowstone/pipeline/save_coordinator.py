"""The save coordinator: how N ranks save into one store together, N at least 1.

    assign   each rank reports what it holds; rank 0 assigns writers      (each save, in the background)
    commit   each rank reports what it has written, or its failure; rank 0 publishes

A rank whose layout did not change keeps its part of the plan, and begins to write when `save` is called. A rank with a
new layout waits in the background for the other ranks and for rank 0's plan. Each plan is checked for completeness. A
group of one writes everything, and needs no agreement; it commits by the same messages, without encoding them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from flowstone.commit import publish
from flowstone.config import CATCH_UP_CALLS
from flowstone.errors import RankError, StateChangedError
from flowstone.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from flowstone.log import log
from flowstone.pipeline.messages import (
    Apart,
    Assignment,
    Contribution,
    Outcome,
    Part,
    Proposal,
    Terms,
    Try,
    Written,
    apart_of,
    assignment_of,
    from_steps,
    pack,
    pack_written,
    unpack,
    unpack_written,
    written_by,
)
from flowstone.pipeline.rank_zero import RankZero, check_one_try, differing_sections
from flowstone.plan.replicas import Compared
from flowstone.ranks import Agreed, Agreement, Decision, Encoding
from flowstone.store.base import Store
from flowstone.table.pieces import Layout

if TYPE_CHECKING:
    from flowstone.pipeline.unmatched_rules import UnmatchedRules


class _Tries(msgspec.Struct, frozen=True):
    """highest: the highest step that was tried; tries: number of tries of each step that was tried more than once."""

    highest: int
    tries: dict[int, int]


class SaveCoordinator:
    """One rank's side of the coordination.

    `save` reads what is known (`assignment`, `begin_try`, `draft_name`), on any thread, and waits for no rank. What the
    ranks do together runs on one thread, the writer's, in the same order on every rank; its result is stored by one
    assignment, so that `save` sees all of it or nothing. Each attribute has one owner, which alone sets it.
    """

    def __init__(self, agreement: Agreement, host: str, unmatched: UnmatchedRules | None = None) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self._agreement, self._host = agreement, host
        self._mine: Assignment | None = None  # set by the writer's thread alone; what it refers to never changes
        # Set by the caller's thread alone: what a group of one writes, and an assignment for a layout that differs only
        # in which pieces are captured late.
        self._everything: Assignment | None = None
        self._captured_otherwise: tuple[Assignment, Assignment] | None = None
        self._rank_zero = RankZero(agreement.size, unmatched) if agreement.rank == 0 else None
        # The identity of this run of the job, once all ranks know it; it never changes.
        self._job = "" if self._rank_zero is None else self._rank_zero.job
        # Counted without a lock, which an interrupt could leave locked: one verb at a time changes the first two, and
        # the writer's threads only add to the third.
        self._highest = -1  # step that was tried
        self._tries: dict[int, int] = {}  # of steps that were tried more than once
        self._heard: set[tuple[int, int]] = set()  # a step, and how often another rank has tried it

    @property
    def knows_every_layout(self) -> bool:
        """Whether each save may begin at once: a group of one needs no other rank's agreement."""
        return self.size == 1

    def assignment(self, layout: Layout) -> Assignment | None:
        """This rank's part of `layout`, if known: then it may begin."""
        mine = self._everything if self.knows_every_layout else self._mine
        if mine is None or mine.layout.pieces is not layout.pieces or mine.layout.aliases is not layout.aliases:
            if not self.knows_every_layout:
                return None
            mine = self._everything = Assignment.everything(layout)
        if mine.layout is layout:
            return mine
        known = self._captured_otherwise
        if known is None or known[0] is not mine or known[1].layout is not layout:
            known = self._captured_otherwise = mine, replace(mine, layout=layout)
        return known[1]

    def begin_try(self, step: int) -> Try:
        """Count this call of `save`."""
        if step > self._highest:
            self._highest, tries = step, 1
        else:
            heard = [tries for other, tries in tuple(self._heard) if other == step]
            tries = self._tries[step] = max(self._tries.get(step, 1), *heard, 1) + 1
        return Try(step, tries)

    def _count_on(self, step: int, tries: int) -> None:
        """Note that another rank has tried `step` that often. Any thread."""
        self._heard.add((step, tries))

    def count_alike(self, phase: str, error: Exception | None) -> None:
        """Agree on the number of tries of each step: the highest of any rank. Different counts fail the next save.

        raises  `error`, or RankError for another rank's error
        """
        tried = dict(self._tries)
        for step, tries in tuple(self._heard):
            tried[step] = max(tried.get(step, 1), tries)
        counted = _Tries(self._highest, tried)
        agreed = self._agreement.agree(phase, error or msgspec.msgpack.encode(counted), _most_tries)
        most = msgspec.msgpack.decode(agreed.common, type=_Tries)
        self._highest, self._tries = most.highest, most.tries

    def draft_name(self, this_try: Try) -> str:
        """The identity that the checkpoint will have: every rank computes it without asking."""
        return f"{self._job}-{this_try.step}-{this_try.number}"

    def assign(
        self, step: int, layout: Layout, begun: Assignment | None = None, *, is_far: bool = False
    ) -> Assignment:
        """Agree on a plan for `step`.

        begun   the assignment with which this rank has already begun
        is_far  some of the layout is in device memory
        raises  RankError; CollisionError, CoverageError on rank 0
        """
        rank_zero = self._rank_zero
        if begun is not None and begun.is_everything and rank_zero is not None:
            rank_zero.take_everything(begun)
            return begun
        proposal = Proposal(step, self._host, begun.plan, None) if begun else Proposal(
            step, self._host, None, pack(layout), is_far
        )
        try:
            agreed = self._agree_on_plan(step, proposal, rank_zero.assign if rank_zero else _nothing)
        except Exception:
            self._mine = None  # the next plan is made anew
            raise
        terms, part = unpack(agreed.common, Terms), unpack(agreed.own, Part)
        self._job = terms.job
        if part.positions is not None:
            mine = assignment_of(terms, layout, part)
        else:
            assert begun is not None, "only what was known can stay as it was"
            mine = begun
            if part.sets:
                compared = Compared.of(layout, from_steps(part.sets), terms.share)
                mine = replace(begun, plan=terms.plan, buffers=terms.buffers, compared=compared)
        self._mine = mine
        return mine

    def _agree_on_plan(
        self, step: int, mine: Proposal | Exception, decide: Callable[[Sequence[Proposal]], Decision]
    ) -> Agreed:
        """If some ranks are behind, only their own call fails; the others wait for them to catch up."""
        for _ in range(CATCH_UP_CALLS):
            try:
                return self._agreement.agree(
                    f"the plan of step {step}", mine, decide, position=step, encoding=_PROPOSALS
                )
            except RankError as error:
                if error.ahead != step:
                    raise
        raise RankError(f"other ranks did not reach step {step}", rank=self.rank, phase="plan")

    def absent(self, step: int, error: Exception) -> None:
        """Tell the other ranks that this rank does not save `step`, because of `error`."""
        self._mine = None
        try:
            self._agree_on_plan(step, error, _nothing)
        except Exception as told:
            log.debug("step %d is not saved: %s", step, told)  # this rank or another one has reported it already

    def give_up(self, step: int, error: Exception) -> None:
        """Tell the other ranks that this rank writes nothing of a planned `step`, because of `error`."""
        if not isinstance(error, StateChangedError):  # which does not make the plan wrong
            self._mine = None
        try:
            self._agreement.agree(f"the commit of step {step}", error, lambda _: Decision(), position=_before(step))
        except Exception as told:
            log.debug("step %d is not saved: %s", step, told)

    def commit(
        self, this_try: Try, made: Contribution | Exception, assignment: Assignment, store: Store, draft: publish.Draft,
        store_id: str,
    ) -> Manifest:
        """Publish what all ranks have written. The checkpoint is durable when this returns, on any rank.

        raises  RankError: the first failure of any rank
        """
        step = this_try.step
        mine: Written | Exception = made if isinstance(made, Exception) else written_by(
            made, assignment.plan, draft.id, this_try.number, made.folds(step, assignment.compared)
        )
        written: list[Written] = []

        def publish_it(apart: Sequence[Apart] = ()) -> Decision:
            assert self._rank_zero is not None
            manifest = self._rank_zero.commit(written, apart, store, draft, store_id)
            return Decision(msgspec.msgpack.encode(Outcome(encode_manifest(manifest), [])))

        def look(said: Sequence[Written]) -> Decision:
            written.extend(said)
            check_one_try(written)
            assert self._rank_zero is not None
            if self._rank_zero.replicas_differ(written):
                return Decision(msgspec.msgpack.encode(Outcome(b"", [], replicas=True)))
            differing = differing_sections(written)
            return Decision(msgspec.msgpack.encode(Outcome(b"", differing))) if differing else publish_it()

        def name_differing(said: Sequence[bytes]) -> Decision:
            assert self._rank_zero is not None
            self._rank_zero.raise_differing_replicas(said)

        try:
            agreed = self._agreement.agree(
                f"the commit of step {step}", mine, look, position=_before(step), encoding=_WRITTEN
            )
            outcome = unpack(agreed.common, Outcome)
            assert not isinstance(made, Exception), "a rank that failed agrees on nothing"
            if outcome.replicas:
                self._agreement.agree(
                    f"the replicas of step {step}", made.digests(step, assignment), name_differing,
                    position=_before(step)
                )
            if outcome.apart:
                agreed = self._agreement.agree(
                    f"the objects of step {step}", apart_of(made, outcome.apart), publish_it, position=_before(step),
                    encoding=_APART,
                )
                outcome = unpack(agreed.common, Outcome)
        except Exception as error:
            if isinstance(error, RankError) and "tries" in error.facts:
                self._count_on(step, int(str(error.facts["tries"])))
            if self._rank_zero is not None:  # ranks that gave up do not know whether they may remove their files
                segments = [row.name for one in written for row in one.segments]
                publish.remove_own(store, draft, (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME, *segments))
            raise
        return decode_manifest(outcome.manifest, path=f"{store.location}/{draft.directory}")


def _before(step: int) -> int:
    """The position of a commit: a rank that plans the step again has given the commit up, and waits for the rest.
    """
    return step - 1


def _nothing(_: object) -> Decision:
    return Decision()


_PROPOSALS: Encoding[Proposal] = Encoding(msgspec.msgpack.encode, partial(unpack, kind=Proposal))
_APART: Encoding[Apart] = Encoding(msgspec.msgpack.encode, partial(unpack, kind=Apart))
_WRITTEN: Encoding[Written] = Encoding(pack_written, unpack_written)


def _most_tries(said: Sequence[bytes]) -> Decision:
    """For each step, the highest count of any rank."""
    most: dict[int, int] = {}
    counted = [msgspec.msgpack.decode(one, type=_Tries) for one in said]
    for one in counted:
        for step, tries in one.tries.items():
            most[step] = max(most.get(step, 1), tries)
    return Decision(msgspec.msgpack.encode(_Tries(max(one.highest for one in counted), most)))
