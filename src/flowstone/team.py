"""A team: the ranks of a job that save into one store as one.

    share    each rank says what it holds; rank 0 shares out who writes what     (each save, in the background)
    commit   each rank says what it has written, or what failed; rank 0 publishes

A rank whose layout is what it was keeps its part of the plan, and begins to write when `save` is called. One that is
new waits for the others, in the background, and for what rank 0 makes of it. Each plan is proved to be whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.commit import publish
from flowstone.config import CATCH_UP_CALLS
from flowstone.errors import RankError
from flowstone.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from flowstone.lead import Lead, check_one_try, differing_sections
from flowstone.messages import (
    Apart,
    Assignment,
    Contribution,
    Outcome,
    Part,
    Proposal,
    Written,
    apart_of,
    assignment_of,
    pack,
    unpack,
    written_by,
)
from flowstone.pieces import Layout
from flowstone.ranks import Agreed, Agreement, Decision
from flowstone.store.base import Store

_log = logging.getLogger(__name__)


class Team:
    """One rank's side of it. One thread at a time, and every rank in the same order."""

    def __init__(self, agreement: Agreement, host: str) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self._agreement, self._host = agreement, host
        self._mine: Assignment | None = None
        self._highest = -1  # step that was tried
        self._tries: dict[int, int] = {}  # of steps that were tried more than once
        self._job = ""  # the name of this run of the job, once all know it
        self._lead = Lead(agreement.size) if agreement.rank == 0 else None

    def assignment(self, layout: Layout) -> Assignment | None:
        """What this rank writes of `layout`, where that has been planned: it may begin."""
        return self._mine if self._mine is not None and self._mine.layout is layout else None

    def begin_try(self, step: int) -> str:
        """A name for this call of `save`: ranks that call alike have the same, and none has one twice."""
        if step > self._highest:
            self._highest, tries = step, 1
        else:
            tries = self._tries[step] = self._tries.get(step, 1) + 1
        return f"{step}-{tries}"

    def draft_name(self, this_try: str) -> str:
        """The identity that a checkpoint will have: every rank knows it without asking."""
        return f"{self._job}-{this_try}"

    def share(
        self, step: int, layout: Layout, begun: Assignment | None = None, samples: NDArray[np.uint16] | None = None
    ) -> Assignment:
        """Agree on a plan for `step`.

        begun    the one that this rank has already begun by
        samples  otherwise: of each piece, a digest of a few of its bytes; replicas have equal ones
        raises   RankError; CollisionError, CoverageError on rank 0
        """
        packed = None if samples is None else pack(layout, samples)
        proposal = Proposal(step, self._host, begun.plan if begun else None, packed)
        lead = self._lead
        try:
            agreed = self._agree_on_plan(
                step, msgspec.msgpack.encode(proposal),
                lambda said: lead.share([unpack(one, Proposal) for one in said]) if lead else Decision(),
            )
        except Exception:
            self._mine = None  # the next one is made anew
            raise
        plan, self._job, buffers = msgspec.msgpack.decode(agreed.common, type=tuple[str, str, int])
        part = unpack(agreed.own, Part)
        if part.positions is None:
            assert begun is not None, "only what was known can stay as it was"
            self._mine = begun if plan == begun.plan else replace(begun, plan=plan, buffers=buffers)
        else:
            self._mine = replace(assignment_of(plan, layout, part.positions, part.blocks), buffers=buffers)
        return self._mine

    def _agree_on_plan(
        self, step: int, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]
    ) -> Agreed:
        """Where some ranks are behind, those lose their own call alone; the others wait for them to catch up."""
        for _ in range(CATCH_UP_CALLS):
            try:
                return self._agreement.agree(f"the plan of step {step}", mine, decide, place=step)
            except RankError as error:
                if error.ahead != step:
                    raise
        raise RankError(f"other ranks do not come to step {step}", rank=self.rank, phase="plan")

    def absent(self, step: int, error: Exception) -> None:
        """Tell the others that this rank does not save `step`, because of `error`."""
        self._mine = None
        try:
            self._agree_on_plan(step, error, lambda _: Decision())
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)  # as we have said, or another rank

    def give_up(self, step: int, error: Exception) -> None:
        """Tell the others that this rank writes nothing of a `step` that was planned, because of `error`."""
        self._mine = None
        try:
            self._agreement.agree(f"the commit of step {step}", error, lambda _: Decision(), place=_before(step))
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)

    def commit(
        self, step: int, made: Contribution | Exception, assignment: Assignment, store: Store, draft: publish.Draft,
        store_id: str,
    ) -> Manifest:
        """Publish what all ranks have written. The checkpoint is durable when this returns, on any rank.

        raises  RankError: the first failure of any of them
        """
        mine: Written | Exception
        if isinstance(made, Exception):
            mine = made
        else:
            mine = written_by(made, assignment.plan, draft.directory, replicated=self.rank == 0)
        mine_packed = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(mine)
        written: list[Written] = []

        def publish_it(apart: Sequence[Apart] = ()) -> Decision:
            assert self._lead is not None
            manifest = self._lead.commit(written, apart, store, draft, store_id)
            return Decision(msgspec.msgpack.encode(Outcome(encode_manifest(manifest), [])))

        def look(said: Sequence[bytes]) -> Decision:
            written.extend(unpack(one, Written) for one in said)
            check_one_try(written)
            differing = differing_sections(written)
            return Decision(msgspec.msgpack.encode(Outcome(b"", differing))) if differing else publish_it()

        try:
            agreed = self._agreement.agree(f"the commit of step {step}", mine_packed, look, place=_before(step))
            outcome = unpack(agreed.common, Outcome)
            if outcome.apart:
                assert not isinstance(made, Exception), "who has failed agrees on nothing"
                agreed = self._agreement.agree(
                    f"the objects of step {step}", msgspec.msgpack.encode(apart_of(made, outcome.apart)),
                    lambda said: publish_it([unpack(one, Apart) for one in said]), place=_before(step),
                )
                outcome = unpack(agreed.common, Outcome)
        except Exception as error:
            if isinstance(error, RankError) and "tries" in error.facts:
                self._tries[step] = max(self._tries.get(step, 1), int(str(error.facts["tries"])))
            if self._lead is not None:  # ranks that have given up do not know that they may remove theirs
                segments = [row.name for one in written for row in one.segments]
                publish.withdraw(store, draft, (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME, *segments))
            raise
        return decode_manifest(outcome.manifest, path=f"{store.location}/{draft.directory}")


def _before(step: int) -> int:
    """The place of a commit: who plans the step once more has given it up, and waits for those who are in it yet."""
    return step - 1
