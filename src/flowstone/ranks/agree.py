"""Agreement: every rank says something, rank 0 decides, all learn it. Or all learn what went wrong, and where.

    up    each rank posts what it says; in a tree, so that nobody reads more than a few messages:
          rank r collects from fan*r + 1 ... fan*r + fan
    down  rank 0 posts what it has decided, for all and for each

A rank that failed posts its failure instead, and so does one that has waited too long for another. Who has waited too
long for rank 0 claims the decision, which rank 0 does, too, before it decides: so there is one verdict, and every rank
that lives learns the same. There are no collectives, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flowstone.config import DEADLINE_MARGIN_S, DEADLINE_S, HEARTBEAT_S, LEAVE_S, SILENCE_S, TREE_FAN
from flowstone.errors import FlowstoneError, RankError
from flowstone.ranks.board import Board, Mail
from flowstone.ranks.pulse import Hearing

_log = logging.getLogger(__name__)
_RECHECK_S = 1.0  # of the pulses of those that are waited for


class _Failure(msgspec.Struct, frozen=True):
    """What went wrong on a rank, in words and numbers that every rank understands."""

    rank: int
    phase: str
    kind: str
    message: str
    errno: int = 0
    facts: dict[str, str] = {}
    is_silence: bool = False  # somebody else has waited for `rank` in vain
    undecided: bool = False  # known to one rank alone: who was to decide is gone
    ahead: int | None = None

    def error(self) -> RankError:
        said = f"rank {self.rank} failed: {self.message}"
        words = self.message if self.is_silence else said
        return RankError(
            words, rank=self.rank, phase=self.phase, errno=self.errno, kind=self.kind, undecided=self.undecided,
            ahead=self.ahead,
            **{name: fact for name, fact in self.facts.items() if name not in ("rank", "phase", "errno", "kind")},
        )


class _Said(msgspec.Struct, frozen=True):
    rank: int
    phase: str
    payload: bytes
    failure: _Failure | None = None
    place: int | None = None


class _Verdict(msgspec.Struct, frozen=True):
    common: bytes = b""
    has_each: bool = False
    failure: _Failure | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What rank 0 has decided: `common` for all, and something of its own `each` rank, if anything."""

    common: bytes = b""
    each: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a rank has learnt; `own` is empty where nothing was decided for each."""

    common: bytes
    own: bytes


class Agreement:
    """One rank's side of a job's agreements. All ranks come by the same ones in the same order. One thread at a time.

    A job of one rank agrees with itself, without a board.
    """

    def __init__(
        self, board: Board | None, rank: int, size: int, *, deadline_s: float = DEADLINE_S,
        silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S, fan: int = TREE_FAN,
    ) -> None:
        assert board is not None or size == 1, "ranks need something to talk over"
        self.rank, self.size = rank, size
        self.mail = None if board is None else Mail(board)
        self._hearing = None if board is None else Hearing(board, silence_s=silence_s)
        self._deadline_s, self._heartbeat_s, self._fan = deadline_s, heartbeat_s, fan
        self._number = 0
        self._decided: list[_Exchange] = []  # on rank 0: those whose verdict somebody may still have to read

    def agree(
        self, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision], *,
        place: int | None = None,
    ) -> Agreed:
        """Say `mine`, a message or what has failed here, and learn what rank 0 makes of what all have said.

        phase       what is being agreed on, for errors; the same on every rank
        decide      on rank 0 only; from what each rank has said, in their order
        place       where this stands in the order of such agreements, for ranks that have come out of step
        raises      RankError, the same on every rank: the first failure, of a rank or of `decide`; a rank that is
                    silent or late. Where it happened, the very error that it was
        """
        if self.mail is None:
            if isinstance(mine, Exception):
                raise mine
            decision = decide([mine])
            return Agreed(decision.common, decision.each[0] if decision.each else b"")
        self._number += 1
        one = _Exchange(
            self.mail, self._hearing, f"{self._number}", phase, self.rank, self.size, self._fan,
            self._deadline_s, self._heartbeat_s, place,
        )
        try:
            verdict = self._settle(one, mine, decide)
            own_part = one.own() if verdict.has_each else b""
        except RuntimeError as error:  # torch's, of every kind
            raise RankError(
                f"the ranks cannot talk to each other any more, in '{phase}'", rank=0, phase=phase, undecided=True,
                reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
                next="look at the logs of rank 0, or of the agent that keeps the job's store",
            ) from error
        if verdict.failure is not None:
            own = mine if isinstance(mine, Exception) else one.refusal
            if own is not None and verdict.failure.rank == self.rank and not verdict.failure.is_silence:
                raise own
            raise verdict.failure.error() from own
        return Agreed(verdict.common, own_part)

    def _settle(
        self, one: _Exchange, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]
    ) -> _Verdict:
        said = one.collect(mine)
        if self.rank == 0:
            if len({found.rank for found in said}) == self.size:  # all have read what was decided before
                self._clear()
            self._decided.append(one)
            if one.claim():
                one.judge(said, decide)
        return one.learn()

    def leave(self) -> None:
        """No more agreements. Rank 0, whose process may hold the board, waits a while until all others have left."""
        if self.mail is None:
            return
        if self.rank != 0:
            self.mail.post(f"bye/{self.rank}", b"")
            return
        def tick(_: list[str], waited_s: float) -> None:
            if waited_s > LEAVE_S:
                raise _TooLateError(None)

        with contextlib.suppress(_TooLateError):
            self.mail.await_posted([f"bye/{r}" for r in range(1, self.size)], tick=tick, since=time.monotonic())

    def _clear(self) -> None:
        for one in self._decided:
            one.clear()
        self._decided.clear()


class _Exchange:
    """One agreement under way."""

    def __init__(
        self, mail: Mail, hearing: Hearing | None, name: str, phase: str, rank: int, size: int, fan: int,
        deadline_s: float, heartbeat_s: float, place: int | None,
    ) -> None:
        assert hearing is not None
        self._mail, self._hearing, self._name, self._phase = mail, hearing, name, phase
        self._rank, self._size, self._fan = rank, size, fan
        self._deadline_s, self._heartbeat_s, self._place = deadline_s, heartbeat_s, place
        self._since = time.monotonic()
        self._told = self._looked = 0.0
        self.refusal: Exception | None = None  # of rank 0, to decide
        self._eaches = 0  # messages that were posted for one rank each
        self._is_decided = False  # or is about to be, by somebody else

    # Up

    def collect(self, mine: bytes | Exception) -> list[_Said]:
        """What this rank and all below it in the tree say. Passed on upwards, but by rank 0."""
        failure = _own_failure(self._rank, self._phase, mine) if isinstance(mine, Exception) else None
        said = [_Said(self._rank, self._phase, b"" if isinstance(mine, Exception) else mine, failure, self._place)]
        children = self._children(self._rank)
        if children:
            self._mail.post(self._here(self._rank), b"")
            said += self._hear(children)
        if self._rank != 0:
            self._mail.post(self._up(self._rank), msgspec.msgpack.encode(said))
        return said

    def _hear(self, children: Sequence[int]) -> list[_Said]:
        said: list[_Said] = []
        try:
            self._mail.await_posted([self._up(child) for child in children], tick=self._tick_up, since=self._since)
        except _TooLateError as error:
            if error.failure is not None:
                said.append(_Said(self._rank, self._phase, b"", error.failure))
        for child in children:
            if self._mail.is_posted(self._up(child)):
                said += msgspec.msgpack.decode(self._mail.read(self._up(child)), type=list[_Said])
        return said

    def _tick_up(self, missing: list[str], waited_s: float) -> None:
        # Those further down give up first, and say whom they miss.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * self._height(self._rank)
        due = waited_s >= limit_s
        if due or self._is_time(waited_s):
            late = [r for key in missing for r in self._missing_below(int(key.rpartition("/")[2]))]
            silent = {r: silent_s for r in late if (silent_s := self._hearing.silent_s(r)) is not None}
            if silent:
                words = f"nothing heard of {_ranks(list(silent))} for {max(silent.values()):.0f} s"
                raise _TooLateError(self._silence(list(silent), words))
            if self._mail.is_posted(self._down()):
                raise _TooLateError(None)  # others have given up, and decided: that is to be learnt
            if due:
                words = f"{_ranks(late)} did not come to '{self._phase}' in {waited_s:.0f} s"
                raise _TooLateError(self._silence(late, words))
            self._tell(f"waiting for {_ranks(late)}", waited_s)

    def _missing_below(self, rank: int) -> list[int]:
        """Ranks of a branch that have not said anything yet; the branch's root if all have."""
        children = self._children(rank)
        is_here = bool(children) and self._mail.is_posted(self._here(rank))
        late = [child for child in children if not self._mail.is_posted(self._up(child))]
        below = [missing for child in late for missing in self._missing_below(child)]
        return below if is_here and below else [rank, *below]

    # Down

    def claim(self) -> bool:
        """Whether it is this rank's to decide; else somebody else does, or has given up."""
        self._is_decided = True
        return self._mail.claim(self._claim)

    def judge(self, said: Sequence[_Said], decide: Callable[[Sequence[bytes]], Decision]) -> None:
        """Rank 0 decides, and posts it."""
        failure = self._astray(said) or _first([one.failure for one in said if one.failure is not None])
        decision = Decision()
        if failure is None:
            try:
                decision = decide([one.payload for one in sorted(said, key=lambda one: one.rank)])
                assert len(decision.each) in (0, self._size), "one for each rank, or none"
            except Exception as error:
                self.refusal, failure = error, _failure(0, self._phase, error)
                decision = Decision()
        for rank, message in enumerate(decision.each):
            self._mail.post(self._down(rank), message)
        self._eaches = len(decision.each)
        self._pronounce(_Verdict(decision.common, bool(decision.each), failure))

    def _pronounce(self, verdict: _Verdict) -> None:
        self._mail.post(self._down(), msgspec.msgpack.encode(verdict))

    def clear(self) -> None:
        """Take down what was decided."""
        for rank in range(self._eaches):
            self._mail.remove(self._down(rank))
        self._mail.remove(self._down())
        self._mail.unclaim(self._claim)

    def learn(self) -> _Verdict:
        """What rank 0 has decided; then this rank's own messages are not needed any more."""
        try:
            self._mail.await_posted([self._down()], tick=self._tick_down, since=self._since)
            verdict = msgspec.msgpack.decode(self._mail.read(self._down()), type=_Verdict)
        except _TooLateError as error:  # nobody will ever know: who was to decide has claimed it, and is gone
            verdict = _Verdict(failure=error.failure and msgspec.structs.replace(error.failure, undecided=True))
        for key in (self._up(self._rank), self._here(self._rank)):
            self._mail.remove(key)
        return verdict

    def own(self) -> bytes:
        return self._mail.read(self._down(self._rank))

    def _tick_down(self, _: list[str], waited_s: float) -> None:
        # The last to give up: rank 0 does before, and says why.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * (self._height(0) + 2)
        if self._is_decided:
            limit_s += self._deadline_s
        words = f"rank 0 did not decide on '{self._phase}' in {waited_s:.0f} s" if waited_s >= limit_s else None
        if self._is_time(waited_s):
            silent_s = self._hearing.silent_s(0)
            if silent_s is not None:
                words = f"nothing heard of rank 0 for {silent_s:.0f} s"
            self._tell("waiting for rank 0 to decide", waited_s)
        if words is None:
            return
        failure = self._silence([0], words)
        if self._is_decided:
            raise _TooLateError(failure)
        if self.claim():
            self._pronounce(_Verdict(failure=failure))

    # Words

    def _astray(self, said: Sequence[_Said]) -> _Failure | None:
        """A rank that agrees on something else than rank 0 does."""
        for one in said:
            if one.phase != self._phase:
                return _Failure(
                    one.rank, self._phase, "RankError",
                    f"rank {one.rank} is in '{one.phase}' while rank 0 is in '{self._phase}': "
                    "all ranks call the same, in the same order", is_silence=True, ahead=_foremost(said),
                )
        return None

    def _silence(self, ranks: Sequence[int], words: str) -> _Failure:
        facts = {"next": "look at the logs of those ranks; the job's other ranks go on, and may save again"}
        return _Failure(ranks[0], self._phase, "RankError", words, 0, facts, is_silence=True)

    def _is_time(self, waited_s: float) -> bool:
        """Whether it is time to look for those that are missing."""
        if waited_s - self._looked < _RECHECK_S:
            return False
        self._looked = waited_s
        return True

    def _tell(self, what: str, waited_s: float) -> None:
        if waited_s - self._told >= self._heartbeat_s:
            self._told = waited_s
            _log.warning("rank %d, %s: %s (%.0f s)", self._rank, self._phase, what, waited_s)

    # The tree

    def _children(self, rank: int) -> range:
        return range(self._fan * rank + 1, min(self._fan * rank + self._fan + 1, self._size))

    def _height(self, rank: int) -> int:
        """How many levels there are below a rank."""
        height, first = 0, rank
        while first * self._fan + 1 < self._size:
            first = first * self._fan + 1
            height += 1
        return height

    def _up(self, rank: int) -> str:
        return f"{self._name}/up/{rank}"

    def _here(self, rank: int) -> str:
        return f"{self._name}/here/{rank}"

    @property
    def _claim(self) -> str:
        return f"{self._name}/claim"

    def _down(self, rank: int | None = None) -> str:
        return f"{self._name}/down" if rank is None else f"{self._name}/down/{rank}"


class _TooLateError(Exception):
    def __init__(self, failure: _Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


def _own_failure(rank: int, phase: str, error: Exception) -> _Failure:
    """What has failed on a rank: if that is what it knows of another one, it is not the root cause."""
    failure = _failure(rank, phase, error)
    if isinstance(error, RankError):
        return msgspec.structs.replace(failure, rank=error.rank, is_silence=True)
    return failure


def _failure(rank: int, phase: str, error: Exception) -> _Failure:
    message = error.message if isinstance(error, FlowstoneError) else f"{type(error).__name__}: {error}"
    facts = {name: str(fact) for name, fact in error.facts.items()} if isinstance(error, FlowstoneError) else {}
    return _Failure(rank, phase, type(error).__name__, message, int(getattr(error, "errno", 0) or 0), facts)


def _foremost(said: Sequence[_Said]) -> int | None:
    """The furthest place, where all are on the same way and not at the same place."""
    places = {one.place for one in said}
    return None if None in places or len(places) < 2 else max(place for place in places if place is not None)


def _first(failures: Sequence[_Failure]) -> _Failure | None:
    """The root cause: a rank's own failure rather than that others waited for it; of several, the lowest rank's."""
    return min(failures, key=lambda one: (one.is_silence, one.rank), default=None)


def _ranks(ranks: Sequence[int]) -> str:
    """"rank 3", "ranks 3, 7", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
