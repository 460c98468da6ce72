"""The save coordinator: how the N ranks of a job save into one store as one, N at least 1.

    assign   each rank reports what it holds; rank 0 assigns who writes what     (each save, in the background)
    commit   each rank reports what it has written, or what failed; rank 0 publishes

A rank whose layout is what it was keeps its part of the plan, and begins to write when `save` is called. One that is
new waits for the others, in the background, and for what rank 0 makes of it. Each plan is proved to be whole. A group
of one writes everything, which it knows at once; it commits by the same messages, which nobody has to encode.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

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

_log = logging.getLogger(__name__)


class _Tries(msgspec.Struct, frozen=True):
    """highest: of the steps that were tried; tries: of those that were more than once."""

    highest: int
    tries: dict[int, int]


class SaveCoordinator:
    """One rank's side of it.

    `save` asks for what is known (`assignment`, `begin_try`, `draft_name`), on any thread, and waits for no rank.
    What ranks do together is for one thread, the writer's, in the same order on every rank: what is learnt there is
    known as soon as it is learnt, all of it at once.
    """

    def __init__(self, agreement: Agreement, host: str) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self._agreement, self._host = agreement, host
        self._mine: Assignment | None = None  # replaced by the thread that agrees, never changed
        # The same for a layout of which only that has changed what is captured late. Of the caller's thread.
        self._captured_otherwise: tuple[Assignment, Assignment] | None = None
        self._rank_zero = RankZero(agreement.size) if agreement.rank == 0 else None
        # The name of this run of the job, once all know it; the same for ever.
        self._job = "" if self._rank_zero is None else self._rank_zero.job
        self._counting = threading.Lock()  # around the next two
        self._highest = -1  # step that was tried
        self._tries: dict[int, int] = {}  # of steps that were tried more than once

    @property
    def knows_every_layout(self) -> bool:
        """Whether each save may begin at once: in a group of one nobody else has to hear of what it holds."""
        return self.size == 1

    def assignment(self, layout: Layout) -> Assignment | None:
        """What this rank writes of `layout`, where that is known: it may begin."""
        mine = self._mine
        if mine is None or mine.layout.pieces is not layout.pieces or mine.layout.aliases is not layout.aliases:
            if not self.knows_every_layout:
                return None
            mine = self._mine = Assignment.everything(layout)
        if mine.layout is layout:
            return mine
        known = self._captured_otherwise
        if known is None or known[0] is not mine or known[1].layout is not layout:
            known = self._captured_otherwise = mine, replace(mine, layout=layout)
        return known[1]

    def begin_try(self, step: int) -> Try:
        """Count this call of `save`."""
        with self._counting:
            if step > self._highest:
                self._highest, tries = step, 1
            else:
                tries = self._tries[step] = self._tries.get(step, 1) + 1
        return Try(step, tries)

    def _count_on(self, step: int, tries: int) -> None:
        """Another rank has tried `step` so often."""
        with self._counting:
            self._tries[step] = max(self._tries.get(step, 1), tries)

    def count_alike(self, phase: str, error: Exception | None) -> None:
        """Agree on how often each step was tried: as often as by any rank. Counts that differ fail the next save of it.

        raises  `error`, or RankError for that of another rank
        """
        with self._counting:
            counted = _Tries(self._highest, dict(self._tries))
        agreed = self._agreement.agree(phase, error or msgspec.msgpack.encode(counted), _most_tries)
        most = msgspec.msgpack.decode(agreed.common, type=_Tries)
        with self._counting:
            self._highest, self._tries = most.highest, most.tries

    def draft_name(self, this_try: Try) -> str:
        """The identity that a checkpoint will have: every rank knows it without asking."""
        return f"{self._job}-{this_try.step}-{this_try.number}"

    def assign(
        self, step: int, layout: Layout, begun: Assignment | None = None, *, is_far: bool = False
    ) -> Assignment:
        """Agree on a plan for `step`.

        begun   the one that this rank has already begun by
        is_far  some of the layout lies on a device
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
            self._mine = None  # the next one is made anew
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
        """Where some ranks are behind, those lose their own call alone; the others wait for them to catch up."""
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
        """Tell the others that this rank does not save `step`, because of `error`."""
        self._mine = None
        try:
            self._agree_on_plan(step, error, _nothing)
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)  # as we have said, or another rank

    def give_up(self, step: int, error: Exception) -> None:
        """Tell the others that this rank writes nothing of a `step` that was planned, because of `error`."""
        if not isinstance(error, StateChangedError):  # which is no fault of the plan's
            self._mine = None
        try:
            self._agreement.agree(f"the commit of step {step}", error, lambda _: Decision(), position=_before(step))
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)

    def commit(
        self, this_try: Try, made: Contribution | Exception, assignment: Assignment, store: Store, draft: publish.Draft,
        store_id: str,
    ) -> Manifest:
        """Publish what all ranks have written. The checkpoint is durable when this returns, on any rank.

        raises  RankError: the first failure of any of them
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
            assert not isinstance(made, Exception), "who has failed agrees on nothing"
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
            if self._rank_zero is not None:  # ranks that have given up do not know that they may remove theirs
                segments = [row.name for one in written for row in one.segments]
                publish.remove_own(store, draft, (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME, *segments))
            raise
        return decode_manifest(outcome.manifest, path=f"{store.location}/{draft.directory}")


def _before(step: int) -> int:
    """The position of a commit: a rank that plans the step once more has given it up, and waits for those still in it.
    """
    return step - 1


def _nothing(_: object) -> Decision:
    return Decision()


_PROPOSALS: Encoding[Proposal] = Encoding(msgspec.msgpack.encode, partial(unpack, kind=Proposal))
_APART: Encoding[Apart] = Encoding(msgspec.msgpack.encode, partial(unpack, kind=Apart))
_WRITTEN: Encoding[Written] = Encoding(pack_written, unpack_written)


def _most_tries(said: Sequence[bytes]) -> Decision:
    """The most of each that any rank has counted."""
    most: dict[int, int] = {}
    counted = [msgspec.msgpack.decode(one, type=_Tries) for one in said]
    for one in counted:
        for step, tries in one.tries.items():
            most[step] = max(most.get(step, 1), tries)
    return Decision(msgspec.msgpack.encode(_Tries(max(one.highest for one in counted), most)))
