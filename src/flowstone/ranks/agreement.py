"""Agreement: every rank sends a message, rank 0 decides, and all ranks get the decision. If a rank fails, all ranks get
its failure instead.

    up    each rank posts its message; in a tree, so that each rank reads only a few messages:
          rank r collects from fan*r + 1 ... fan*r + fan
    down  rank 0 posts its decision: a part for all ranks, and a part for each rank

A rank that failed posts its failure instead of its message. A rank that has waited too long for another also posts the
failure of that rank. A rank that has waited too long for rank 0 claims the right to decide, with an atomic counter;
rank 0 also claims that right before it decides. So there is only one outcome, the same for every live rank. No
collective operation is used, and every wait has a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from flowstone.config import DEADLINE_S, LEAVE_S, POLL_S, REJOIN_S, REMINDER_S, SILENCE_S, TREE_FAN
from flowstone.errors import FlowstoneError, RankError
from flowstone.ranks.exchange import AgreementOutcome, Decision, Exchange, ExchangeSide, TooLateError
from flowstone.ranks.kv_store import KeyValueStore, Mailbox

if TYPE_CHECKING:
    from flowstone.ranks.heartbeat import Heartbeat

_Message = TypeVar("_Message")


class MessageEncoding(msgspec.Struct, Generic[_Message], frozen=True):
    """How a rank's message is encoded on its way to rank 0. Rank 0's own message is not sent, so it is not encoded."""

    encode: Callable[[_Message], bytes]
    decode: Callable[[bytes], _Message]


class AgreementResult(msgspec.Struct, frozen=True):
    """The result of an agreement. `common`: the part for all ranks. `own`: the part for this rank, empty if there is
    none.
    """

    common: bytes
    own: bytes


class Timeouts(msgspec.Struct, frozen=True):
    """The time limits of agreements, in seconds.

    deadline_s  limit of one agreement
    silence_s   limit without a heartbeat of an awaited rank
    reminder_s  time between two log lines that name missing ranks
    """

    deadline_s: float = DEADLINE_S
    silence_s: float = SILENCE_S
    reminder_s: float = REMINDER_S


DEFAULT_TIMEOUTS = Timeouts()


class Agreement:
    """Takes part in a job's agreements for one rank. All ranks make the same agreements in the same order. For one
    thread at a time.

    A job of one rank agrees with itself, without a key-value store. Checkpointers of several ranks find each other at
    their first agreement, the meeting: Checkpointers whose stores have the same location, and that agree at the same
    time, form a group. A rank may have other Checkpointers that never join a group. If only some ranks make a call
    (save, load, ...), its agreements fail on these ranks. The other ranks then skip these agreements, so that all ranks
    continue with the same one.
    """

    def __init__(
        self, kv_store: KeyValueStore | None, rank: int, size: int, *, timeouts: Timeouts = DEFAULT_TIMEOUTS,
        fan: int = TREE_FAN, label: str | None = None, heartbeat: Heartbeat | None = None,
    ) -> None:
        """`label`: the location of the Checkpointer's store. None: only these ranks use the key-value store, so they
        form a group without a meeting.
        """
        assert kv_store is not None or size == 1, "several ranks need a key-value store"
        self.rank, self.size = rank, size
        self.mailbox = None if kv_store is None else Mailbox(kv_store)
        self._heartbeat, self._label = heartbeat, label
        self._deadline_s = timeouts.deadline_s
        self._side: ExchangeSide | None = None
        if kv_store is not None and self.mailbox is not None:
            from flowstone.ranks.failure_detector import FailureDetector  # imported here: a single rank needs none

            detector = FailureDetector(kv_store, label=label or "", silence_s=timeouts.silence_s)
            serial = 1 if heartbeat is None else heartbeat.serial
            self._side = ExchangeSide(
                self.mailbox, detector, rank, size, fan, timeouts.deadline_s, timeouts.reminder_s, serial
            )
            if label is None:
                detector.join([1] * size)
        # prefix of all keys of the group; None before the meeting
        self._group: str | None = "" if label is None else None
        self._number = 0
        self._meeting = ""  # the meeting that this rank is in, or was in when an exception ended its call
        self._decided: list[Exchange] = []  # on rank 0: exchanges whose outcome some rank may not have read yet
        self._unread: set[str] = set()  # keys where late ranks may post messages that will not be read

    def short_wait(self) -> contextlib.AbstractContextManager[None]:
        """Context for a wait that blocks the caller: this rank does not wait long for ranks that are alive, but have
        not made the call.
        """
        return contextlib.nullcontext() if self._side is None else self._side.short_wait()

    @overload
    def agree(
        self, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision], *,
        position: int | None = None,
    ) -> AgreementResult: ...
    @overload
    def agree(
        self, phase: str, mine: _Message | Exception, decide: Callable[[Sequence[_Message]], Decision], *,
        position: int | None = None, encoding: MessageEncoding[_Message],
    ) -> AgreementResult: ...
    def agree(
        self, phase: str, mine: _Message | Exception, decide: Callable[[Sequence[_Message]], Decision], *,
        position: int | None = None, encoding: MessageEncoding[_Message] | None = None,
    ) -> AgreementResult:
        """Send `mine`, a message or a failure of this rank; return what rank 0 decides from all messages.

        phase     the subject of the agreement, for error messages; the same on every rank
        decide    called on rank 0 only, with the messages in rank order
        position  number of this agreement among agreements of its kind, to find ranks that are out of sync
        encoding  for messages that are not bytes; rank 0's own message is passed to `decide` without encoding
        raises    RankError, the same on every rank: the first failure of a rank or of `decide`, or a rank that is
                  silent or late. On the rank where the failure happened: the original error
        """
        if self._side is None:
            if isinstance(mine, Exception):
                raise mine
            decision = decide([mine])
            return AgreementResult(decision.common, decision.each[0] if decision.each else b"")
        try:
            if self._heartbeat is not None and self._group is None:
                self._heartbeat.begin_meeting()
            words, decide_from = self._encoded(mine, decide, encoding or _AS_IT_IS)
            exchange, verdict = self._exchange(self._side, phase, words, decide_from, position)
            own_part = exchange.read_own_part() if verdict.has_each else b""
        except FlowstoneError:
            raise
        except RuntimeError as error:  # torch raises RuntimeError for any failure; a signal handler may raise it, too
            self.report_interrupted_call(error)
            raise RankError(
                f"the ranks can no longer reach the job's key-value store, in '{phase}'", rank=0, phase=phase,
                undecided=True, reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
                next="look at the log of rank 0, or of the torchrun agent that hosts the store",
            ) from error
        except Exception as error:
            self.report_interrupted_call(error)
            raise
        if verdict.failure is not None:
            own = words if isinstance(words, Exception) else exchange.refusal
            if own is not None and verdict.failure.rank == self.rank and not verdict.failure.is_silence:
                raise own
            raise verdict.failure.error() from own
        return AgreementResult(verdict.common, own_part)

    def _encoded(
        self, mine: _Message | Exception, decide: Callable[[Sequence[_Message]], Decision],
        encoding: MessageEncoding[_Message]
    ) -> tuple[bytes | Exception, Callable[[Sequence[bytes]], Decision]]:
        """Returns the message that this rank posts, and the function that decides. Rank 0 posts no message; its
        function decides from the decoded messages of all ranks.
        """
        if isinstance(mine, Exception):
            return mine, lambda _: Decision()  # never called with success: if a rank has failed, there is no decision
        if self.rank == 0:
            return b"", lambda posted: decide([mine, *map(encoding.decode, posted[1:])])
        try:
            return encoding.encode(mine), lambda _: Decision()
        except Exception as error:  # post the error: other ranks must not wait for a message that cannot be encoded
            return error, lambda _: Decision()

    def _exchange(
        self, side: ExchangeSide, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision],
        position: int | None,
    ) -> tuple[Exchange, AgreementOutcome]:
        """Take part in the next agreement. Skip agreements of a call that this rank did not make, and that timed out on
        the other ranks.

        If the other ranks are now in the call that this rank has made, or will make it, this rank joins them. Otherwise
        this rank is too late for its own call, and gets the error of that call.
        """
        while True:
            counter = f"meet/{hashlib.blake2b((self._label or '').encode(), digest_size=8).hexdigest()}"
            if self._meeting and (interrupted := Exchange(side, self._meeting, phase, position, counter)).is_over():
                # other ranks have completed the meeting in which this rank was interrupted
                self._join(side, interrupted.read_outcome())
            if self._group is None:
                exchange = Exchange(side, self._enter(side.mailbox, counter, phase), phase, position, counter)
            else:
                self._number += 1
                exchange = Exchange(side, f"{self._group}{self._number}", phase, position)
            is_late = exchange.is_over()
            verdict = self._settle(exchange, mine, decide, is_late)
            self._join(side, verdict)
            failure = verdict.failure
            if failure is not None and failure.left:
                side.detector.note_left_call(failure.rank, failure.left)
            if failure is None or not verdict.may_be_skipped_by(self.rank, position):
                return exchange, verdict
            # Saves are identified by step and attempt: a rank that is late for one save must not join the next.
            may_be_another = is_late and position is None
            if failure.phase == phase and not (may_be_another and self._is_missed(side, phase)):
                return exchange, verdict

    def _join(self, side: ExchangeSide, verdict: AgreementOutcome) -> None:
        """Join the group, if the outcome says that the ranks have met in it."""
        self._meeting = ""
        if verdict.group:
            self._group = f"{verdict.group}/"
            side.detector.join(verdict.serials)
            if self._heartbeat is not None:
                self._heartbeat.join(verdict.group)

    def _is_missed(self, side: ExchangeSide, phase: str) -> bool:
        """Whether the other ranks are already in the call that this rank has made, after an earlier call, which this
        rank did not make, has timed out.
        """
        if self._group is None:
            return False  # in a new meeting, all ranks are in the same call
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
        """The key of the next meeting. Only one Checkpointer of a rank may be in a meeting at a time."""
        since = time.monotonic()
        # or it is the meeting that this rank left
        while (name := f"{counter}/{mailbox.add_to_counter(counter)}") != self._meeting:
            if mailbox.claim(f"{name}/in/{self.rank}"):
                break
            waited_s = time.monotonic() - since
            if waited_s > self._deadline_s:
                raise RankError(
                    f"another Checkpointer of {self._label} on this rank has been waiting for other ranks for "
                    f"{waited_s:.0f} s", rank=self.rank, phase=phase,
                    next="use one Checkpointer for each path, the same on all ranks",
                )
            time.sleep(POLL_S)
        self._meeting = name
        return name

    def _settle(
        self, exchange: Exchange, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision], is_late: bool
    ) -> AgreementOutcome:
        if is_late:
            if self.rank == 0:
                self._decided.append(exchange)
            return exchange.read_outcome()
        messages = exchange.collect_messages(mine)
        self._remove_unread()
        self._unread.update(exchange.unread_keys())
        if self.rank == 0:
            if len({message.rank for message in messages}) == self.size:  # all ranks have read the previous decision
                self._clear()
            self._decided.append(exchange)
            if exchange.claim_decision():
                exchange.reach_decision(messages, decide)
        return exchange.read_outcome()

    def report_interrupted_call(self, error: BaseException) -> None:
        """Report at once that `error` has ended the last call on this rank alone: others may wait for this rank."""
        if self._heartbeat is not None:
            self._heartbeat.report_interrupted_call(error)

    def leave(self) -> None:
        """Make no more agreements. Rank 0 waits for the other ranks to leave, for a limited time, since its process may
        host the key-value store.
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
        for exchange in self._decided:
            exchange.clear()
        self._decided.clear()


def _as_it_is(message: bytes) -> bytes:
    return message


_AS_IT_IS: MessageEncoding[Any] = MessageEncoding(_as_it_is, _as_it_is)
