"""Agreement: every rank sends a message, rank 0 decides, all ranks learn the decision, or the failure and its origin.

    up    each rank posts its message; in a tree, so that each rank reads only a few messages:
          rank r collects from fan*r + 1 ... fan*r + fan
    down  rank 0 posts its decision, one part for all ranks and one for each

A rank that failed posts its failure instead; so does a rank that has waited too long for another one. A rank that has
waited too long for rank 0 claims the decision; rank 0 claims it too before it decides. So there is one verdict, and
every live rank learns the same. There are no collectives, and every wait has a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from flowstone.config import DEADLINE_S, LEAVE_S, POLL_S, REJOIN_S, REMINDER_S, SILENCE_S, TREE_FAN
from flowstone.errors import FlowstoneError, RankError
from flowstone.ranks.kv_store import KeyValueStore, Mailbox
from flowstone.ranks.wire import Decision, Exchange, Side, TooLateError, Verdict

if TYPE_CHECKING:
    from flowstone.ranks.heartbeat import Heartbeat

_Said = TypeVar("_Said")


class Encoding(msgspec.Struct, Generic[_Said], frozen=True):
    """How a rank's message is encoded on its way to rank 0. Rank 0's own message is not sent, so it is not encoded."""

    encode: Callable[[_Said], bytes]
    decode: Callable[[bytes], _Said]


class Agreed(msgspec.Struct, frozen=True):
    """What a rank has learnt: `common` for all; `own` is for this rank, empty if there is none."""

    common: bytes
    own: bytes


class Timeouts(msgspec.Struct, frozen=True):
    """In seconds: limit for all ranks to agree, limit without a heartbeat, time between log lines on missing ranks."""

    deadline_s: float = DEADLINE_S
    silence_s: float = SILENCE_S
    reminder_s: float = REMINDER_S


DEFAULT_TIMEOUTS = Timeouts()


class Agreement:
    """One rank's side of a job's agreements. All ranks make the same ones in the same order. One thread at a time.

    A job of one rank agrees with itself, without a key-value store. Checkpointers of several ranks find each other at
    their first agreement: those that agree at the same time, and save into the same place, form a group. A rank may
    have other Checkpointers that never join a group; calls that other ranks did not make are skipped.
    """

    def __init__(
        self, kv_store: KeyValueStore | None, rank: int, size: int, *, timeouts: Timeouts = DEFAULT_TIMEOUTS,
        fan: int = TREE_FAN, label: str | None = None, heartbeat: Heartbeat | None = None,
    ) -> None:
        """`label`: the location that the Checkpointer saves into; None: the key-value store belongs to exactly these
        ranks, which are a group without meeting first.
        """
        assert kv_store is not None or size == 1, "ranks need something to talk over"
        self.rank, self.size = rank, size
        self.mailbox = None if kv_store is None else Mailbox(kv_store)
        self._heartbeat, self._label = heartbeat, label
        self._deadline_s = timeouts.deadline_s
        self._side: Side | None = None
        if kv_store is not None and self.mailbox is not None:
            from flowstone.ranks.failure_detector import FailureDetector  # several ranks alone need it

            detector = FailureDetector(kv_store, label=label or "", silence_s=timeouts.silence_s)
            serial = 1 if heartbeat is None else heartbeat.serial
            self._side = Side(
                self.mailbox, detector, rank, size, fan, timeouts.deadline_s, timeouts.reminder_s, serial
            )
            if label is None:
                detector.serials = [1] * size
        self._group: str | None = "" if label is None else None  # prefix of all keys
        self._number = 0
        self._meeting = ""  # the meeting that this rank is in, or was in when it was interrupted
        self._decided: list[Exchange] = []  # on rank 0: exchanges whose verdict a rank may still have to read
        self._unread: set[str] = set()  # keys where late ranks post messages that will not be read any more

    @contextlib.contextmanager
    def pressing(self) -> Iterator[None]:
        """While inside, a caller is held up: ranks that live and have not called get only a short time."""
        if self._side is None:
            yield
            return
        self._side.pressed = True
        try:
            yield
        finally:
            self._side.pressed = False

    @overload
    def agree(
        self, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision], *,
        position: int | None = None,
    ) -> Agreed: ...
    @overload
    def agree(
        self, phase: str, mine: _Said | Exception, decide: Callable[[Sequence[_Said]], Decision], *,
        position: int | None = None, encoding: Encoding[_Said],
    ) -> Agreed: ...
    def agree(
        self, phase: str, mine: _Said | Exception, decide: Callable[[Sequence[_Said]], Decision], *,
        position: int | None = None, encoding: Encoding[_Said] | None = None,
    ) -> Agreed:
        """Send `mine`, a message or a failure of this rank; learn what rank 0 decides from all messages.

        phase       what the ranks agree on, for error messages; the same on every rank
        decide      called on rank 0 only, with the messages in rank order
        position    place of this agreement in the order of such agreements, to find ranks that are out of sync
        encoding    for messages that are not bytes; rank 0's own message is passed to `decide` as it is
        raises      RankError, the same on every rank: the first failure of a rank or of `decide`, or a rank that is
        silent or late. On the rank where the failure happened, the original error
        """
        if self._side is None:
            if isinstance(mine, Exception):
                raise mine
            decision = decide([mine])
            return Agreed(decision.common, decision.each[0] if decision.each else b"")
        try:
            if self._heartbeat is not None:
                self._heartbeat.waits = self._group is None
            words, decide_from = self._encoded(mine, decide, encoding or _AS_IT_IS)
            one, verdict = self._exchange(self._side, phase, words, decide_from, position)
            own_part = one.own() if verdict.has_each else b""
        except FlowstoneError:
            raise
        except RuntimeError as error:  # torch raises it for any failure; a signal handler may too
            self.leave_call(error)
            raise RankError(
                f"the ranks can no longer talk to each other, in '{phase}'", rank=0, phase=phase, undecided=True,
                reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
                next="look at the log of rank 0, or of the agent that hosts the job's key-value store",
            ) from error
        except Exception as error:
            self.leave_call(error)
            raise
        if verdict.failure is not None:
            own = words if isinstance(words, Exception) else one.refusal
            if own is not None and verdict.failure.rank == self.rank and not verdict.failure.is_silence:
                raise own
            raise verdict.failure.error() from own
        return Agreed(verdict.common, own_part)

    def _encoded(
        self, mine: _Said | Exception, decide: Callable[[Sequence[_Said]], Decision], encoding: Encoding[_Said]
    ) -> tuple[bytes | Exception, Callable[[Sequence[bytes]], Decision]]:
        """What this rank posts. On rank 0, which posts nothing: how to decide from what the others post."""
        if isinstance(mine, Exception):
            return mine, lambda _: Decision()  # if a rank has failed, nothing is decided
        if self.rank == 0:
            return b"", lambda posted: decide([mine, *map(encoding.decode, posted[1:])])
        try:
            return encoding.encode(mine), lambda _: Decision()
        except Exception as error:  # report it: the other ranks must not wait for a message that cannot be encoded
            return error, lambda _: Decision()

    def _exchange(
        self, side: Side, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision],
        position: int | None,
    ) -> tuple[Exchange, Verdict]:
        """Take part in the next agreement. Skip those where the other ranks gave up a call that this rank did not make.

        That may have been another call of the same verb: then they are in the next call already, or will come to it.
        Else this rank is too late for its own call, and gets that error.
        """
        while True:
            counter = f"meet/{hashlib.blake2b((self._label or '').encode(), digest_size=8).hexdigest()}"
            if self._meeting and (left := Exchange(side, self._meeting, phase, position, counter)).is_over():
                self._join(side, left.learn())  # the others have met this rank, which was interrupted in the meeting
            if self._group is None:
                one = Exchange(side, self._enter(side.mailbox, counter, phase), phase, position, counter)
            else:
                self._number += 1
                one = Exchange(side, f"{self._group}{self._number}", phase, position)
            is_late = one.is_over()
            verdict = self._settle(one, mine, decide, is_late)
            self._join(side, verdict)
            failure = verdict.failure
            if failure is not None and failure.left:
                side.detector.has_left(failure.rank, failure.left)
            if failure is None or not verdict.passes_over(self.rank, position):
                return one, verdict
            # Saves are identified by step and try: a rank that is late for the first must not join the second.
            may_be_another = is_late and position is None
            if failure.phase == phase and not (may_be_another and self._is_missed(side, phase)):
                return one, verdict

    def _join(self, side: Side, verdict: Verdict) -> None:
        """Join the group, if the verdict is that the ranks have met."""
        self._meeting = ""
        if verdict.group:
            self._group, side.detector.serials = f"{verdict.group}/", verdict.serials
            if self._heartbeat is not None:
                self._heartbeat.group, self._heartbeat.waits = verdict.group, False

    def _is_missed(self, side: Side, phase: str) -> bool:
        """Whether the others are in their next call, and this call is that one: then they gave up an earlier one."""
        if self._group is None:
            return False  # a rank that meets the others again comes to the same meeting as they do
        following = Exchange(side, f"{self._group}{self._number + 1}", phase)
        since = time.monotonic()
        while not following.is_over():
            if following.is_awaited():
                return True
            if time.monotonic() - since > REJOIN_S:
                return False
            time.sleep(POLL_S / 10)
        return True

    def _enter(self, mailbox: Mailbox, counter: str, phase: str) -> str:
        """The key of the next meeting. One Checkpointer of a rank at a time."""
        since = time.monotonic()
        while (name := f"{counter}/{mailbox.count(counter)}") != self._meeting:  # or the one that this rank left
            if mailbox.claim(f"{name}/in/{self.rank}"):
                break
            waited_s = time.monotonic() - since
            if waited_s > self._deadline_s:
                raise RankError(
                    f"another Checkpointer of {self._label} on this rank waits for other ranks ({waited_s:.0f} s)",
                    rank=self.rank, phase=phase, next="use one Checkpointer for each path, the same on all ranks",
                )
            time.sleep(POLL_S)
        self._meeting = name
        return name

    def _settle(
        self, one: Exchange, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision], is_late: bool
    ) -> Verdict:
        if is_late:
            if self.rank == 0:
                self._decided.append(one)
            return one.learn()
        said = one.collect(mine)
        self._remove_unread()
        self._unread.update(one.unread())
        if self.rank == 0:
            if len({found.rank for found in said}) == self.size:  # all ranks have read the previous decision
                self._clear()
            self._decided.append(one)
            if one.claim():
                one.reach_decision(said, decide)
        return one.learn()

    def leave_call(self, error: BaseException) -> None:
        """`error` has ended the last call on this rank alone: tell the ranks that wait for it at once."""
        if self._heartbeat is not None:
            self._heartbeat.leave(error)

    def leave(self) -> None:
        """Make no more agreements. Rank 0, whose process may host the key-value store, waits a while until all others
        have left.
        """
        if self.mailbox is None or self._group is None:
            return
        if self.rank != 0:
            self.mailbox.post(f"{self._group}bye/{self.rank}", b"")
            return
        def tick(_: list[str], waited_s: float) -> None:
            if waited_s > LEAVE_S:
                raise TooLateError(None)

        with contextlib.suppress(TooLateError):
            byes = [f"{self._group}bye/{r}" for r in range(1, self.size)]
            self.mailbox.await_posted(byes, tick=tick, since=time.monotonic())

    def _remove_unread(self) -> None:
        assert self.mailbox is not None
        for key in [key for key in self._unread if self.mailbox.is_posted(key)]:
            self.mailbox.remove(key)
            self._unread.discard(key)

    def _clear(self) -> None:
        for one in self._decided:
            one.clear()
        self._decided.clear()


def _as_it_is(message: bytes) -> bytes:
    return message


_AS_IT_IS: Encoding[Any] = Encoding(_as_it_is, _as_it_is)
