"""The ranks that write one journal together, each a file; a step counts once all have it (docs/ORDERING.md, Journal).

    begin      each rank says which parameters it steps; rank 0 says which of them each logs, and names the journal;
               and where replicas of the state meet, if the ranks have any
    end_step   each rank has made its frame durable, or says why there is none; rank 0 commits the step, or gives it up

Both run on the journal's thread, and talk over a connection of their own, so no step waits for them. The next call of
`save` does; so each rank knows there how the step before has ended, and whether all are to save whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.config import JOURNAL_WHOLE_STEPS_MAX
from flowstone.errors import CollisionError, ReplayError
from flowstone.format.journal import Opening
from flowstone.pipeline.shared import Shared
from flowstone.plan.gradient_owners import Owners, claim, share_out
from flowstone.ranks import Decision, RankGroup


class Stepped(msgspec.Struct, frozen=True, eq=False):
    """The parameters that the optimizers of one rank step, one optimizer behind the other.

    keys     see plan.gradient_owners
    lengths  of their gradients, in bytes
    starts   position of each optimizer's first
    proven   digest of the names and the boxes of what a replay must reproduce
    """

    keys: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    starts: tuple[int, ...]
    proven: int


class Joint(msgspec.Struct, frozen=True, eq=False):
    """What the ranks have agreed on for one journal.

    opening  of this rank's file
    alike    all ranks hold the same, so that their fingerprints are equal
    """

    opening: Opening
    stepped: Stepped
    owners: Owners
    alike: bool

    def logs(self, optimizer: int, parameter: int) -> bool:
        """Whether this rank logs the gradients of that parameter."""
        return bool(self.owners.rank[self.stepped.starts[optimizer] + parameter] == self.opening.rank)

    def claim(self, acts: Sequence[tuple[int, Sequence[int]]]) -> int:
        """`acts`: for each, the optimizer and the parameters that had a gradient. See plan.gradient_owners.claim."""
        starts = self.stepped.starts
        present = [[starts[number] + at for at in parameters] for number, parameters in acts]
        return claim(self.stepped.keys, self.owners, self.opening.rank, present)


class Said(msgspec.Struct, frozen=True):
    """What a rank says once its frame of a step is durable.

    refusal      why it has none, as the step cannot be replayed; "" if it has
    is_late      a load would take longer than it may
    is_free      no whole save is under way
    claim        of gradients that several ranks have
    fingerprint  of the state, if all ranks have the same
    """

    refusal: str
    is_late: bool = False
    is_free: bool = True
    claim: int = 0
    fingerprint: str = ""


class _Begins(msgspec.Struct, frozen=True):
    """What a rank says where a journal begins. `after`: the step that it goes on from; `lag_steps`: as it was told;
    `node`: of its replica, "" without one.
    """

    refusal: str
    after: int = 0
    lag_steps: int = 1
    keys: bytes = b""
    lengths: bytes = b""
    proven: int = 0
    node: str = ""


class _Begun(msgspec.Struct, frozen=True):
    """Rank 0's answer. `refusal`: why there is no journal; `port`: where replicas meet; 0, and why, if they cannot."""

    refusal: str
    id: str = ""
    number: int = 0
    checkpoint: str | None = None
    parent: str | None = None
    alike: bool = False
    port: int = 0
    why_no_replicas: str = ""


class _Ended(msgspec.Struct, frozen=True):
    """Rank 0's answer. `refusal`: why the step is in no journal; `whole`: the next one is to be saved whole, too."""

    refusal: str
    whole: bool = False


class Invited(Protocol):
    """The replica of this rank's state, which has to find those of others (pipeline/replica_link.py)."""

    @property
    def node(self) -> str: ...
    def invite(self, nodes: Sequence[str], /) -> tuple[int, str]: ...
    def meet_at(self, port: int, why_not: str, /) -> None: ...


class JournalRanks:
    """One rank's side. Of `begin` and `end_step`, all ranks make the same calls in the same order.

    replica  of this rank's state, if it has one
    """

    def __init__(self, shared: Shared) -> None:
        group = shared.group
        self.replica: Invited | None = None
        self._group = RankGroup(group.deadline_s, f"{shared.store.location} (journal)", shared.turn)

    def comes_to(self, step: int) -> None:
        """This rank was told to save `step`: tell the ranks that wait for it. On the caller's thread."""
        self._group.comes_to(step)

    def begin(
        self, step: int, mine: tuple[Opening, Stepped] | str | Exception, number: Callable[[], int]
    ) -> Joint:
        """Agree on a journal whose first step is `step`.

        mine    the opening as this rank would write it alone; or why it cannot; or its failure
        number  of the journal; called on rank 0
        raises  ReplayError if some rank cannot; RankError
        """
        node = "" if self.replica is None else self.replica.node
        words = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(_begins(mine, node))

        def decide(said: Sequence[bytes]) -> Decision:
            return _begin([msgspec.msgpack.decode(one, type=_Begins) for one in said], mine, number, self._invite)

        agreed = self._group.agreement.agree(f"the journal that begins with step {step}", words, decide, position=step)
        begun = msgspec.msgpack.decode(agreed.common, type=_Begun)
        if begun.refusal:
            raise refused(step, begun.refusal)
        assert isinstance(mine, tuple), "what one rank cannot do, none does"
        if self.replica is not None:
            self.replica.meet_at(begun.port, begun.why_no_replicas)
        opening, stepped = mine
        owner, holders = np.frombuffer(agreed.own, "<i4").reshape(2, -1)
        ends = [*stepped.starts[1:], len(owner)]
        opening = replace(
            opening, id=begun.id, number=begun.number, checkpoint=begun.checkpoint, parent=begun.parent,
            owners=tuple(tuple(owner[a:b].tolist()) for a, b in zip(stepped.starts, ends, strict=True)),
        )
        return Joint(opening, stepped, Owners(owner, holders), begun.alike)

    def _invite(self, nodes: Sequence[str]) -> tuple[int, str]:
        """On rank 0."""
        return (0, "rank 0 has none: give every_step=Replica(...) on all ranks") if self.replica is None else (
            self.replica.invite(nodes)
        )

    def end_step(self, step: int, mine: Said | Exception) -> bool:
        """Commit a step that all ranks have. Returns whether all are to save the next one whole as well.

        raises  ReplayError if some rank cannot replay it; RankError, CollisionError; `mine`, if it is an error
        """
        words = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(mine)

        def decide(said: Sequence[bytes]) -> Decision:
            return Decision(msgspec.msgpack.encode(_end([msgspec.msgpack.decode(one, type=Said) for one in said])))

        agreed = self._group.agreement.agree(f"step {step} of the journal", words, decide, position=step)
        ended = msgspec.msgpack.decode(agreed.common, type=_Ended)
        if ended.refusal:
            raise refused(step, ended.refusal)
        return ended.whole

    def end(self, *, wait: bool) -> None:
        """Make no more agreements. Rank 0 leaves last."""
        if wait:
            self._group.leave()
        else:
            self._group.abandon()


def refused(step: int, why: str) -> ReplayError:
    return ReplayError(
        f"step {step} is in no journal, as it could not be replayed", reason=why,
        next="nothing: the next step is saved whole. If that happens often, save less often without every_step",
    )


def _begins(mine: tuple[Opening, Stepped] | str, node: str) -> _Begins:
    if isinstance(mine, str):
        return _Begins(mine)
    opening, stepped = mine
    return _Begins(
        "", opening.after, opening.torn_max, stepped.keys.astype("<u8").tobytes(),
        stepped.lengths.astype("<u8").tobytes(), stepped.proven, node,
    )


def _begin(
    said: Sequence[_Begins], mine: object, number: Callable[[], int], invite: Callable[[Sequence[str]], tuple[int, str]]
) -> Decision:
    """On rank 0: name the journal, and share out what the ranks log."""
    refusal = _first([one.refusal for one in said])
    others = [rank for rank, one in enumerate(said) if one.lag_steps != said[0].lag_steps]
    if not refusal and others:
        refusal = f"rank {others[0]} has lag_steps={said[others[0]].lag_steps}, and rank 0 {said[0].lag_steps}"
    others = [rank for rank, one in enumerate(said) if one.after != said[0].after]
    if not refusal and others:
        refusal = f"rank {others[0]} goes on from step {said[others[0]].after}, and rank 0 from step {said[0].after}"
    if refusal:
        return Decision(msgspec.msgpack.encode(_Begun(refusal)))
    assert isinstance(mine, tuple), "rank 0 did not refuse"
    opening: Opening = mine[0]
    shared_out = share_out(
        [np.frombuffer(one.keys, "<u8").astype(np.uint64) for one in said],
        [np.frombuffer(one.lengths, "<u8").astype(np.uint64) for one in said],
    )
    alike = all((one.keys, one.proven) == (said[0].keys, said[0].proven) for one in said)
    nodes = [one.node for one in said]
    port, why = invite(nodes) if any(nodes) else (0, "")
    begun = _Begun("", opening.id, number(), opening.checkpoint, opening.parent, alike, port, why)
    return Decision(
        msgspec.msgpack.encode(begun),
        [np.stack([one.rank, one.holders]).astype("<i4").tobytes() for one in shared_out],
    )


def _end(said: Sequence[Said]) -> _Ended:
    """On rank 0."""
    refusal = _first([one.refusal for one in said])
    if not refusal and sum(one.claim for one in said) % (1 << 64):
        refusal = "a parameter had a gradient on some of the ranks that hold it, and not on all"
    if refusal:
        return _Ended(refusal)
    for rank, one in enumerate(said):
        if one.fingerprint != said[0].fingerprint:
            raise CollisionError(
                f"the state of rank {rank} differs from that of rank 0, though both hold the same tensors",
                next="find out what has made the replicas differ; the next step is saved whole, and names the tensors",
            )
    return _Ended("", any(one.is_late for one in said) and all(one.is_free for one in said))


def _first(refusals: Sequence[str]) -> str:
    ranks = [rank for rank, why in enumerate(refusals) if why]
    if not ranks:
        return ""
    more = f", and {len(ranks) - 1} more ranks" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}: {refusals[ranks[0]]}"


class WholeSaves:
    """How many of the next saves are whole, because nothing leads to them. Equal on all ranks: each counts the same
    calls, and knows how steps have ended. Where they are given up again and again, more and more saves are whole.
    """

    def __init__(self) -> None:
        self._left, self._last = 1, 0

    def begin(self, left: int) -> None:
        """After a load, or a rewind."""
        self._left, self._last = left, 0

    def note(self, *, failed: bool) -> None:
        """How the last step of the journal has ended."""
        self._last = min(2 * self._last or 1, JOURNAL_WHOLE_STEPS_MAX) if failed else 0
        self._left = max(self._left, self._last)

    def take(self) -> bool:
        """Whether the save that begins now is whole."""
        if not self._left:
            return False
        self._left -= 1
        return True
