"""The save coordinator: how N ranks save into one store together, N at least 1.

    assign   each rank reports its pieces (parts of tensors); rank 0 assigns writers  (each save, in the background)
    commit   each rank reports the files it wrote, or its failure; rank 0 publishes

A rank whose layout (its pieces) did not change keeps its share of the plan (which rank writes which pieces), and begins
to write when `save` is called. A rank with a new layout waits in the background for the other ranks and for rank 0's
plan. Each plan is checked for completeness. A group of one writes everything and needs no agreement; it commits with
the same messages, without encoding them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from flowstone.commit import publish
from flowstone.config import CATCH_UP_CALLS
from flowstone.coordination.messages import (
    Assignment,
    Contribution,
    DifferingObjects,
    Outcome,
    PlanTerms,
    Proposal,
    SaveAttempt,
    WriteReport,
    WriterShare,
    apart_of,
    assignment_of,
    from_steps,
    pack,
    pack_written,
    unpack,
    unpack_written,
    written_by,
)
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
from flowstone.plan.replicas import ReplicaComparison
from flowstone.ranks import Agreement, AgreementResult, Decision, MessageEncoding
from flowstone.store.base import Store
from flowstone.table.pieces import Layout

if TYPE_CHECKING:
    from flowstone.codecs.unmatched_rules import UnmatchedRules
    from flowstone.coordination.rank_zero import RankZero


class _Tries(msgspec.Struct, frozen=True):
    """How often a rank has called `save`. `highest`: the highest step of any call. `tries`: for each step with more
    than one call, the number of calls.
    """

    highest: int
    tries: dict[int, int]


class SaveCoordinator:
    """Coordinates the saves of this rank with the other ranks.

    `save` calls only methods that wait for no rank (`assignment`, `begin_attempt`, `draft_name`); they read the results
    of earlier agreements. The agreements run on the writer's thread, in the same order on every rank. One Python
    assignment stores a result, so that `save` sees all of it or nothing. Each attribute is set by one thread only.
    """

    def __init__(self, agreement: Agreement, host: str, unmatched: UnmatchedRules | None = None) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self._agreement, self._host = agreement, host
        self._mine: Assignment | None = None  # set only by the writer's thread; the objects in it never change
        # Set only by the caller's thread. The assignment of a group of one; and the assignment for a layout that
        # differs from the agreed one only in which pieces are lazy (captured after `save` returns).
        self._everything: Assignment | None = None
        self._captured_otherwise: tuple[Assignment, Assignment] | None = None
        self._unmatched = unmatched
        # The identity of this run of the job, once all ranks know it; it never changes.
        self._job = secrets.token_hex(8) if agreement.rank == 0 else ""
        # These three are changed without a lock, as an interrupt could leave a lock held. Only one call at a time
        # changes the first two, and the writer's threads only add to the third.
        self._highest = -1  # highest step of any call of `save`
        self._tries: dict[int, int] = {}  # step -> number of calls, if there was more than one
        self._heard: set[tuple[int, int]] = set()  # (step, number of calls of another rank)

    @cached_property
    def _rank_zero(self) -> RankZero | None:
        """What rank 0 remembers of all ranks; None on other ranks. Only the writer's thread may use it."""
        from flowstone.coordination.rank_zero import RankZero  # imported here: a load needs none of it

        return RankZero(self.size, self._unmatched, self._job) if self.rank == 0 else None

    @property
    def is_alone(self) -> bool:
        """Whether this is a group of one, which may begin each save at once."""
        return self.size == 1

    def assignment(self, layout: Layout) -> Assignment | None:
        """The pieces that this rank writes of `layout`, if the ranks have agreed on that before, so that the rank may
        begin to write; otherwise None.
        """
        mine = self._everything if self.is_alone else self._mine
        if mine is None or mine.layout.pieces is not layout.pieces or mine.layout.aliases is not layout.aliases:
            if not self.is_alone:
                return None
            mine = self._everything = Assignment.of_whole_layout(layout)
        if mine.layout is layout:
            return mine
        last = self._captured_otherwise
        if last is None or last[0] is not mine or last[1].layout is not layout:
            last = self._captured_otherwise = mine, replace(mine, layout=layout)
        return last[1]

    def begin_attempt(self, step: int) -> SaveAttempt:
        """Count this call of `save` for `step`. Returns the step with the number of the call."""
        if step > self._highest:
            self._highest, tries = step, 1
        else:
            heard = [tries for other, tries in tuple(self._heard) if other == step]
            tries = self._tries[step] = max(self._tries.get(step, 1), *heard, 1) + 1
        return SaveAttempt(step, tries)

    def _count_on(self, step: int, tries: int) -> None:
        """Record that another rank has called `save` for `step` `tries` times. Can be called on any thread."""
        self._heard.add((step, tries))

    def count_alike(self, phase: str, error: Exception | None) -> None:
        """Agree on the number of calls of `save` for each step: the highest number of any rank. Without this agreement,
        the next save would fail if the ranks' numbers differ.

        raises  `error`, or RankError for another rank's error
        """
        tried = dict(self._tries)
        for step, tries in tuple(self._heard):
            tried[step] = max(tried.get(step, 1), tries)
        counted = _Tries(self._highest, tried)
        agreed = self._agreement.agree(phase, error or msgspec.msgpack.encode(counted), _most_tries)
        most = msgspec.msgpack.decode(agreed.common, type=_Tries)
        self._highest, self._tries = most.highest, most.tries

    def draft_name(self, attempt: SaveAttempt) -> str:
        """The id of the checkpoint that this call of `save` writes. Every rank computes the same id without
        communication.
        """
        return f"{self._job}-{attempt.step}-{attempt.number}"

    def assign(
        self, step: int, layout: Layout, begun: Assignment | None = None, *, is_far: bool = False
    ) -> Assignment:
        """Agree on a plan for `step`.

        begun   the assignment by which this rank has already begun to write; None: it has not begun
        is_far  whether a part of the state is in device memory
        raises  RankError; CollisionError, CoverageError on rank 0
        """
        rank_zero = self._rank_zero
        if begun is not None and begun.is_everything and rank_zero is not None:
            rank_zero.assign_whole_layout(begun)
            return begun
        proposal = Proposal(step, self._host, begun.plan, None) if begun else Proposal(
            step, self._host, None, pack(layout), is_far
        )
        try:
            agreed = self._agree_on_plan(step, proposal, rank_zero.assign if rank_zero else _nothing)
        except Exception:
            self._mine = None  # so the next save makes a new plan
            raise
        terms, part = unpack(agreed.common, PlanTerms), unpack(agreed.own, WriterShare)
        self._job = terms.job
        if part.positions is not None:
            mine = assignment_of(terms, layout, part)
        else:
            assert begun is not None, "only a rank that has begun gets no positions"
            mine = begun
            if part.sets:
                compared = ReplicaComparison.of(layout, from_steps(part.sets), terms.share)
                mine = replace(begun, plan=terms.plan, buffers=terms.buffers, compared=compared)
        self._mine = mine
        return mine

    def _agree_on_plan(
        self, step: int, mine: Proposal | Exception, decide: Callable[[Sequence[Proposal]], Decision]
    ) -> AgreementResult:
        """Agree with all ranks on a plan for `step`. If some ranks are still at an earlier step, only their own call
        fails; the other ranks wait until these ranks reach `step`.
        """
        for _ in range(CATCH_UP_CALLS):
            try:
                return self._agreement.agree(
                    f"the plan of step {step}", mine, decide, position=step, encoding=_PROPOSALS
                )
            except RankError as error:
                if error.ahead != step:
                    raise
        raise RankError(
            f"other ranks did not call save() for step {step} in time", rank=self.rank, phase="plan",
            next="call save() with the same steps, in the same order, on every rank",
        )

    def absent(self, step: int, error: Exception) -> None:
        """Tell the other ranks that this rank does not save `step`, because of `error`."""
        self._mine = None
        try:
            self._agree_on_plan(step, error, _nothing)
        except Exception as told:
            log.debug("step %d is not saved: %s", step, told)  # this rank or another one has reported it already

    def report_abandoned(self, step: int, error: Exception) -> None:
        """Tell the other ranks that this rank writes nothing of a planned `step`, because of `error`."""
        if not isinstance(error, StateChangedError):  # a changed state does not make the plan wrong
            self._mine = None
        try:
            self._agreement.agree(f"the commit of step {step}", error, lambda _: Decision(), position=_before(step))
        except Exception as told:
            log.debug("step %d is not saved: %s", step, told)

    def commit(
        self, attempt: SaveAttempt, made: Contribution | Exception, assignment: Assignment, store: Store,
        draft: publish.Draft, store_id: str,
    ) -> Manifest:
        """Publish the files of all ranks. The checkpoint is durable when this returns, on any rank.

        raises  RankError: the first failure of any rank
        """
        step = attempt.step
        mine: WriteReport | Exception = made if isinstance(made, Exception) else written_by(
            made, assignment.plan, draft.id, attempt.number, made.folds(step, assignment.compared)
        )
        written: list[WriteReport] = []

        def publish_it(apart: Sequence[DifferingObjects] = ()) -> Decision:
            assert self._rank_zero is not None
            manifest = self._rank_zero.commit(written, apart, store, draft, store_id)
            return Decision(msgspec.msgpack.encode(Outcome(encode_manifest(manifest), [])))

        def look(messages: Sequence[WriteReport]) -> Decision:
            from flowstone.coordination.rank_zero import check_one_attempt, differing_sections  # only rank 0 imports it

            written.extend(messages)
            check_one_attempt(written)
            assert self._rank_zero is not None
            if self._rank_zero.replicas_differ(written):
                return Decision(msgspec.msgpack.encode(Outcome(b"", [], replicas=True)))
            differing = differing_sections(written)
            return Decision(msgspec.msgpack.encode(Outcome(b"", differing))) if differing else publish_it()

        def name_differing(messages: Sequence[bytes]) -> Decision:
            assert self._rank_zero is not None
            self._rank_zero.raise_differing_replicas(messages)

        try:
            agreed = self._agreement.agree(
                f"the commit of step {step}", mine, look, position=_before(step), encoding=_WRITTEN
            )
            outcome = unpack(agreed.common, Outcome)
            assert not isinstance(made, Exception), "a rank that failed does not get here"
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
            if self.rank == 0:  # ranks whose wait timed out do not know whether they may remove their files
                segments = [row.name for contribution in written for row in contribution.segments]
                publish.remove_own_files(store, draft, (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME, *segments))
            raise
        return decode_manifest(outcome.manifest, path=f"{store.location}/{draft.directory}")


def _before(step: int) -> int:
    """The number that orders the commit of `step` among the agreements. It is lower than that of the plan of the same
    step: a rank that plans the step again has abandoned the commit.
    """
    return step - 1


def _nothing(_: object) -> Decision:
    return Decision()


_PROPOSALS: MessageEncoding[Proposal] = MessageEncoding(msgspec.msgpack.encode, partial(unpack, kind=Proposal))
_APART: MessageEncoding[DifferingObjects] = MessageEncoding(
    msgspec.msgpack.encode, partial(unpack, kind=DifferingObjects)
)
_WRITTEN: MessageEncoding[WriteReport] = MessageEncoding(pack_written, unpack_written)


def _most_tries(messages: Sequence[bytes]) -> Decision:
    """For each step, the highest number of calls of any rank."""
    most: dict[int, int] = {}
    counted = [msgspec.msgpack.decode(entry, type=_Tries) for entry in messages]
    for entry in counted:
        for step, tries in entry.tries.items():
            most[step] = max(most.get(step, 1), tries)
    return Decision(msgspec.msgpack.encode(_Tries(max(entry.highest for entry in counted), most)))
