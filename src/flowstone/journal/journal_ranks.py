"""The ranks that write one journal together, each to its own file (docs/ORDERING.md, Journal).

A step is committed once all ranks have it.

    begin      each rank reports which parameters it updates; rank 0 decides which gradients each rank logs, names the
               journal, and chooses the port to which replicas of the state connect, if the ranks have any
    end_step   each rank has made its frame durable, or reports why it has none; rank 0 commits the step, or refuses it

Both run on the journal's thread, over their own connection, so no step waits for them. The next call of `save` waits:
it gets the outcome of the previous step, and whether all ranks must save in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.config import JOURNAL_FULL_SAVES_MAX
from flowstone.errors import CollisionError, ReplayError
from flowstone.journal.gradient_owners import ParameterOwners, agreement_term, assign_owners
from flowstone.journal.journal_format import JournalHeader
from flowstone.ranks import Decision, RankGroup
from flowstone.session.shared import Shared


class SteppedParameters(msgspec.Struct, frozen=True, eq=False):
    """The parameters that the optimizers of one rank update, in the order of the optimizers.

    keys     identify parameters across ranks: see gradient_owners
    lengths  lengths of their gradients, in bytes
    starts   position of each optimizer's first parameter
    proven   digest of the names of all tensors with fingerprints, and of the regions that this rank has of them
    """

    keys: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    starts: tuple[int, ...]
    proven: int


class JointJournal(msgspec.Struct, frozen=True, eq=False):
    """The ranks' agreement on one journal.

    opening  header of this rank's file
    stepped  the parameters that this rank's optimizers update
    owners   for each of them, the rank that logs its gradients
    alike    whether all ranks hold the same tensors, so that their fingerprints must be equal
    """

    opening: JournalHeader
    stepped: SteppedParameters
    owners: ParameterOwners
    alike: bool

    def logs(self, optimizer: int, parameter: int) -> bool:
        """Whether this rank logs the gradients of that parameter."""
        return bool(self.owners.rank[self.stepped.starts[optimizer] + parameter] == self.opening.rank)

    def claim(self, steps: Sequence[tuple[int, Sequence[int]]]) -> int:
        """A checksum of which shared parameters had gradients in a step. The ranks compare their checksums: see
        gradient_owners.agreement_term.

        steps  for each optimizer step, the optimizer and the parameters that had a gradient
        """
        starts = self.stepped.starts
        present = [[starts[number] + parameter for parameter in parameters] for number, parameters in steps]
        return agreement_term(self.stepped.keys, self.owners, self.opening.rank, present)


class StepReport(msgspec.Struct, frozen=True):
    """A rank's report on one step.

    refusal      why this rank has not journaled the step (a replay could not repeat it); "" if it is durable here
    is_late      whether a load would take longer than `recovery_s`
    is_free      whether no full save is running
    claim        checksum of which shared parameters had gradients: see gradient_owners.agreement_term
    fingerprint  fingerprint of the state's window, if all ranks hold the same tensors
    """

    refusal: str
    is_late: bool = False
    is_free: bool = True
    claim: int = 0
    fingerprint: str = ""


class _JournalProposal(msgspec.Struct, frozen=True):
    """A rank's proposal for a new journal.

    refusal    why this rank cannot take part; "" if it can
    after      the step that the journal continues from
    lag_steps  as this rank's Checkpointer is configured
    keys, lengths, proven  see SteppedParameters
    node       the node of this rank's replica; "" without a replica
    """

    refusal: str
    after: int = 0
    lag_steps: int = 1
    keys: bytes = b""
    lengths: bytes = b""
    proven: int = 0
    node: str = ""


class _JournalDecision(msgspec.Struct, frozen=True):
    """Rank 0's answer to proposals for a new journal.

    refusal          why there is no journal; "" if there is one
    alike            whether all ranks hold the same tensors
    port             the port to which replicas connect; 0: they cannot
    why_no_replicas  why replicas cannot connect
    """

    refusal: str
    id: str = ""
    number: int = 0
    checkpoint: str | None = None
    parent: str | None = None
    alike: bool = False
    port: int = 0
    why_no_replicas: str = ""


class _StepDecision(msgspec.Struct, frozen=True):
    """Rank 0's answer to reports on a step. `refusal`: why the step is not journaled. `must_save_full`: whether the
    next step is also saved in full.
    """

    refusal: str
    must_save_full: bool = False


class LocalReplica(Protocol):
    """The replica of this rank's state, which must connect to the replicas of other ranks (replica/replica_link.py)."""

    @property
    def node(self) -> str: ...
    def invite(self, nodes: Sequence[str], /) -> tuple[int, str]: ...
    def set_meeting_port(self, port: int, why_not: str, /) -> None: ...


class JournalRanks:
    """One rank's agreements with the other ranks on journals: `begin` agrees on a new journal, `end_step` on whether a
    step is committed. All ranks call these two methods in the same order.
    """

    def __init__(self, shared: Shared, replica: LocalReplica | None) -> None:
        """`replica`: the replica of this rank's state; None: it has none."""
        group, self._replica = shared.group, replica
        self._group = RankGroup(group.deadline_s, f"{shared.store.location} (journal)", shared.verb_lock.counter)

    def announce_step(self, step: int) -> None:
        """Announce to the other ranks that this rank has called `save(step)`. On the caller's thread."""
        self._group.announce_step(step)

    def begin(
        self, step: int, mine: tuple[JournalHeader, SteppedParameters] | str | Exception, number: Callable[[], int]
    ) -> JointJournal:
        """Agree with the other ranks on a journal whose first step is `step`.

        mine    this rank's proposed header and parameters; or the reason why it cannot take part; or its error
        number  returns the journal's number; called on rank 0
        raises  ReplayError if some rank cannot take part; RankError
        """
        node = "" if self._replica is None else self._replica.node
        message = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(_proposal(mine, node))

        def decide(messages: Sequence[bytes]) -> Decision:
            proposals = [msgspec.msgpack.decode(data, type=_JournalProposal) for data in messages]
            return _decide_journal(proposals, mine, number, self._invite)

        phase = f"the journal that begins with step {step}"
        agreed = self._group.agreement.agree(phase, message, decide, position=step)
        begun = msgspec.msgpack.decode(agreed.common, type=_JournalDecision)
        if begun.refusal:
            raise refused(step, begun.refusal)
        assert isinstance(mine, tuple), "if one rank refuses, all do"
        if self._replica is not None:
            self._replica.set_meeting_port(begun.port, begun.why_no_replicas)
        opening, stepped = mine
        owner, holders = np.frombuffer(agreed.own, "<i4").reshape(2, -1)
        ends = [*stepped.starts[1:], len(owner)]
        opening = replace(
            opening, id=begun.id, number=begun.number, checkpoint=begun.checkpoint, parent=begun.parent,
            owners=tuple(tuple(owner[a:b].tolist()) for a, b in zip(stepped.starts, ends, strict=True)),
        )
        return JointJournal(opening, stepped, ParameterOwners(owner, holders), begun.alike)

    def _invite(self, nodes: Sequence[str]) -> tuple[int, str]:
        """On rank 0: the result of ReplicaLink.invite, if this rank has a replica."""
        return (0, "rank 0 has no replica: give every_step=Replica(...) on all ranks") if self._replica is None else (
            self._replica.invite(nodes)
        )

    def end_step(self, step: int, mine: StepReport | Exception) -> bool:
        """Commit a step if all ranks have its frame. Returns whether all ranks must also save the next one in full.

        raises  ReplayError  some rank cannot replay the step
                RankError, CollisionError
                `mine`, if it is an error
        """
        message = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(mine)

        def decide(messages: Sequence[bytes]) -> Decision:
            reports = [msgspec.msgpack.decode(data, type=StepReport) for data in messages]
            return Decision(msgspec.msgpack.encode(_decide_step(reports)))

        agreed = self._group.agreement.agree(f"step {step} of the journal", message, decide, position=step)
        ended = msgspec.msgpack.decode(agreed.common, type=_StepDecision)
        if ended.refusal:
            raise refused(step, ended.refusal)
        return ended.must_save_full

    def end(self, *, wait: bool) -> None:
        """End the agreements with the other ranks. Rank 0 leaves last."""
        if wait:
            self._group.leave()
        else:
            self._group.abandon()


def refused(step: int, why: str) -> ReplayError:
    return ReplayError(
        f"step {step} was not journaled: it cannot be replayed", reason=why,
        next="do nothing: the next save is a full checkpoint. If this happens often, save less often, without "
        "every_step",
    )


def _proposal(mine: tuple[JournalHeader, SteppedParameters] | str, node: str) -> _JournalProposal:
    if isinstance(mine, str):
        return _JournalProposal(mine)
    opening, stepped = mine
    return _JournalProposal(
        "", opening.after, opening.torn_max, stepped.keys.astype("<u8").tobytes(),
        stepped.lengths.astype("<u8").tobytes(), stepped.proven, node,
    )


def _decide_journal(
    proposals: Sequence[_JournalProposal], mine: object, number: Callable[[], int],
    invite: Callable[[Sequence[str]], tuple[int, str]],
) -> Decision:
    """On rank 0: name the journal, and decide which gradients each rank logs."""
    refusal, first = _first_refusal([proposal.refusal for proposal in proposals]), proposals[0]
    for rank, proposal in enumerate(proposals):
        if not refusal and proposal.lag_steps != first.lag_steps:
            refusal = f"rank {rank} has lag_steps={proposal.lag_steps}, but rank 0 has {first.lag_steps}"
    for rank, proposal in enumerate(proposals):
        if not refusal and proposal.after != first.after:
            refusal = f"rank {rank} continues from step {proposal.after}, but rank 0 from step {first.after}"
    if refusal:
        return Decision(msgspec.msgpack.encode(_JournalDecision(refusal)))
    assert isinstance(mine, tuple), "rank 0 did not refuse"
    opening: JournalHeader = mine[0]
    shared_out = assign_owners(
        [np.frombuffer(proposal.keys, "<u8").astype(np.uint64) for proposal in proposals],
        [np.frombuffer(proposal.lengths, "<u8").astype(np.uint64) for proposal in proposals],
    )
    alike = all((proposal.keys, proposal.proven) == (proposals[0].keys, proposals[0].proven) for proposal in proposals)
    nodes = [proposal.node for proposal in proposals]
    port, why = invite(nodes) if any(nodes) else (0, "")
    begun = _JournalDecision("", opening.id, number(), opening.checkpoint, opening.parent, alike, port, why)
    return Decision(
        msgspec.msgpack.encode(begun),
        [np.stack([owners.rank, owners.holders]).astype("<i4").tobytes() for owners in shared_out],
    )


def _decide_step(reports: Sequence[StepReport]) -> _StepDecision:
    """On rank 0: decide whether the step is committed."""
    refusal = _first_refusal([report.refusal for report in reports])
    if not refusal and sum(report.claim for report in reports) % (1 << 64):
        refusal = "a parameter had a gradient on some of the ranks that hold it, but not on all"
    if refusal:
        return _StepDecision(refusal)
    for rank, report in enumerate(reports):
        if report.fingerprint != reports[0].fingerprint:
            raise CollisionError(
                f"the state of rank {rank} differs from that of rank 0, though both hold the same tensors",
                next="find out why the ranks differ. The next save writes a full checkpoint and compares the ranks' "
                "tensors; if it finds the difference, it fails and names the tensors",
            )
    return _StepDecision("", any(report.is_late for report in reports) and all(report.is_free for report in reports))


def _first_refusal(refusals: Sequence[str]) -> str:
    ranks = [rank for rank, why in enumerate(refusals) if why]
    if not ranks:
        return ""
    more = f", and {len(ranks) - 1} more ranks" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}: {refusals[ranks[0]]}"


class FullSavePolicy:
    """Decides for several ranks how many of the next saves are full because steps could not be journaled.

    All ranks decide the same, since they count the same calls, and get the same outcomes. If, after the full saves, the
    next step cannot be journaled either, the number of full saves doubles.
    """

    def __init__(self) -> None:
        self._full_saves, self._last = 1, 0  # remaining full saves, and how many the last refused step caused

    def reset(self, full_saves: int) -> None:
        """After a load, or a rewind: make the next `full_saves` saves full."""
        self._full_saves, self._last = full_saves, 0

    def note(self, *, failed: bool) -> None:
        """Note whether the last journaled step has failed on any rank."""
        self._last = min(2 * self._last or 1, JOURNAL_FULL_SAVES_MAX) if failed else 0
        self._full_saves = max(self._full_saves, self._last)

    def next_is_full(self) -> bool:
        """Whether the save that begins now is full. Counts this save."""
        if not self._full_saves:
            return False
        self._full_saves -= 1
        return True
