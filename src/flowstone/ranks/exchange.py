"""One agreement in progress: the messages of all ranks go up a tree to rank 0, and rank 0's decision goes down to all
ranks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from flowstone.config import DEADLINE_MARGIN_S, NOTICE_S, UNANSWERED_S
from flowstone.log import log
from flowstone.ranks.failure import Failure, failure_of, first_failure, own_failure, ranks_text
from flowstone.ranks.kv_store import Mailbox

if TYPE_CHECKING:
    from flowstone.ranks.failure_detector import FailureDetector, Liveness

_RECHECK_S = 1.0  # seconds between two reads of the heartbeats of missing ranks
# how many heartbeats one rank reads; ranks further down the tree are watched by their parents in the tree
_HEARD_MAX = 64
_LOGS = "look at the logs of those ranks; the other ranks continue, and may save again"
_AGAIN = "make this call again on every rank, or end the job"
_EVERY_RANK = (
    "make this call on every rank, with Checkpointers of the same path; for a rank that saves or loads by itself, "
    "construct a Checkpointer with alone=True"
)


class RankMessage(msgspec.Struct, frozen=True):
    rank: int
    phase: str
    payload: bytes
    failure: Failure | None = None
    position: int | None = msgspec.field(default=None, name="place")
    serial: int = 1


class AgreementOutcome(msgspec.Struct, frozen=True):
    """The outcome of an exchange, the same for all ranks: the decision, or the failure.

    group    name of the group once its ranks have met, else ""
    serials  for each rank, the number of its Checkpointer in the group
    unheard  ranks that sent no message. If such a rank makes another call, the failure does not concern that rank
    """

    common: bytes = b""
    has_each: bool = False
    failure: Failure | None = None
    group: str = ""
    serials: list[int] = []
    unheard: list[int] = []

    def may_be_skipped_by(self, rank: int, position: int | None) -> bool:
        """Whether the failure may be that of a call that `rank` does not make, so that `rank` can skip it. False if
        the other ranks are past the call that `rank` makes: that call has then failed.
        """
        if self.failure is None:
            return False
        ahead = self.failure.ahead
        is_lost = ahead is not None and position is not None and position <= ahead
        return self.failure.is_absence or (rank in self.unheard and not is_lost)


class Decision(msgspec.Struct, frozen=True):
    """Rank 0's decision: `common` is for all ranks; `each` has a part for each rank, or is empty."""

    common: bytes = b""
    each: Sequence[bytes] = ()


class ExchangeSide(msgspec.Struct, eq=False):
    """What all exchanges (agreements in progress) of one rank have in common.

    serial   number of this rank's Checkpointer
    is_short_wait  whether to wait only a short time for ranks that live, but have not made the call; set while a
                   caller is blocked
    passive  ranks that were alive, but had not made a call when a wait for them timed out -> their `Liveness.mark` then
    """

    mailbox: Mailbox
    detector: FailureDetector
    rank: int
    size: int
    fan: int
    deadline_s: float
    reminder_s: float
    serial: int = 1
    is_short_wait: bool = False
    passive: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)

    @contextmanager
    def short_wait(self) -> Iterator[None]:
        """Context in which `is_short_wait` is set."""
        self.is_short_wait = True
        try:
            yield
        finally:
            self.is_short_wait = False


class Exchange:
    """One agreement in progress.

    meeting  name of the meeting, if this agreement is the ranks' first; otherwise ""
    """

    def __init__(
        self, side: ExchangeSide, name: str, phase: str, position: int | None = None, meeting: str | None = None
    ) -> None:
        self._mailbox, self._detector, self._name, self._phase = side.mailbox, side.detector, name, phase
        self._rank, self._size, self._fan = side.rank, side.size, side.fan
        self._deadline_s, self._position, self._meeting, self._side = side.deadline_s, position, meeting, side
        self._since = time.monotonic()
        self._logged_s = min(NOTICE_S, side.reminder_s) - side.reminder_s
        self._checked_s = 0.0
        self.refusal: Exception | None = None  # the error with which rank 0's decision failed
        self._parts_posted = 0  # number of messages that were posted for a single rank each
        self._is_decided = False  # also True if another rank is about to decide
        self._read_from: dict[int, int] = {}  # child in the tree -> length of its message, which was read

    def is_over(self) -> bool:
        """Whether the agreement was decided before this rank took part."""
        return self._mailbox.is_posted(self._decision_key())

    def is_awaited(self) -> bool:
        """Whether rank 0, or a rank that waits for rank 0, has sent a message of the same phase to this agreement."""
        if self._rank != 0:
            return self._mailbox.is_posted(self._presence_key(0))
        keys = map(self._message_key, self._children(0))
        posted = [self._mailbox.read(key) for key in keys if self._mailbox.is_posted(key)]
        return any(
            msgspec.msgpack.decode(encoded, type=list[RankMessage])[0].phase == self._phase for encoded in posted
        )

    # The way up

    def collect_messages(self, mine: bytes | Exception) -> list[RankMessage]:
        """Returns the messages of this rank and of all ranks below it in the tree. All ranks but rank 0 post them to
        their parent in the tree.
        """
        failure = own_failure(self._rank, self._phase, mine) if isinstance(mine, Exception) else None
        payload = b"" if isinstance(mine, Exception) else mine
        messages = [RankMessage(self._rank, self._phase, payload, failure, self._position, self._side.serial)]
        children = self._children(self._rank)
        if children:
            self._mailbox.post(self._presence_key(self._rank), b"")
            messages += self._collect_from_children(children)
        if self._rank != 0:
            self._mailbox.post(self._message_key(self._rank), msgspec.msgpack.encode(messages))
            self._remove_read()
        return messages

    def _collect_from_children(self, children: Sequence[int]) -> list[RankMessage]:
        messages: list[RankMessage] = []
        try:
            keys = [self._message_key(child) for child in children]
            self._mailbox.await_posted(keys, tick=self._tick_up, since=self._since)
        except TooLateError as error:
            if error.failure is not None:
                messages.append(
                    RankMessage(self._rank, self._phase, b"", error.failure, self._position, self._side.serial)
                )
        for child in children:
            if self._mailbox.is_posted(self._message_key(child)):  # the message stays until this rank removes it
                encoded = self._mailbox.read(self._message_key(child))
                self._read_from[child] = len(encoded)
                messages += msgspec.msgpack.decode(encoded, type=list[RankMessage])
        return messages

    def _remove_read(self) -> None:
        """Remove the messages of this rank's children in the tree. Called once this rank's own message is posted; until
        then other ranks may read them.
        """
        for child, length in self._read_from.items():
            self._mailbox.remove(self._message_key(child), length)

    def unread_keys(self) -> list[str]:
        """Keys at which ranks below this one in the tree may still post messages that no rank will read."""
        return [self._message_key(child) for child in self._children(self._rank) if child not in self._read_from]

    def _tick_up(self, missing: list[str], waited_s: float) -> None:
        # The limit is shorter for ranks further down the tree, so that they time out first, and report the missing
        # ranks.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * self._height(self._rank)
        due = waited_s >= limit_s
        if not due and not self._is_check_due(waited_s):
            return
        late = [r for key in missing for r in self._missing_below(int(key.rpartition("/")[2]))]
        liveness = [self._detector.liveness_of(rank, self._position) for rank in late[:_HEARD_MAX]]
        if self._mailbox.is_posted(self._decision_key()):
            raise TooLateError(None)  # other ranks have timed out and decided, so their decision counts
        failure = self._hopeless_wait(liveness, late, waited_s)
        if failure is None and due:
            failure = self._timeout_failure(liveness, late, waited_s)
        if failure is not None:
            raise TooLateError(failure)
        self._log_waiting(f"waiting for {ranks_text(late)}", waited_s, liveness)

    def _hopeless_wait(self, liveness: Sequence[Liveness], late: Sequence[int], waited_s: float) -> Failure | None:
        """The failure that makes further waiting useless (such as a dead rank); None if there is none."""
        silent = {state.rank: state.silent_s for state in liveness if state.prospect == "silent"}
        if silent:
            words = f"nothing heard from {ranks_text(list(silent))} for {max(silent.values()):.0f} s"
            return self._silence(list(silent), words)
        is_long = waited_s >= UNANSWERED_S
        hopeless = ("closed", "elsewhere") if is_long else ("closed",)
        gone = [state for state in liveness if state.prospect in hopeless]
        if gone:
            words = f"rank {gone[0].rank} {gone[0].text}, and will not reach '{self._phase}'"
            return self._silence([state.rank for state in gone], words, _EVERY_RANK)
        left = [state for state in liveness if state.prospect == "left"]
        if left:
            words = f"rank {left[0].rank} {left[0].text}, and will not reach '{self._phase}'"
            return msgspec.structs.replace(self._silence([left[0].rank], words, _AGAIN), left=left[0].call)
        idle = is_long and bool(liveness) and all(state.prospect == "idle" for state in liveness)
        passive = self._side.passive
        if idle and (self._side.is_short_wait or all(passive.get(state.rank) == state.mark for state in liveness)):
            return self._timeout_failure(liveness, late, waited_s)
        return None

    def _timeout_failure(self, liveness: Sequence[Liveness], late: Sequence[int], waited_s: float) -> Failure:
        idle = [state for state in liveness if state.prospect == "idle"]
        self._side.passive.update({state.rank: state.mark for state in idle})
        words = f"{ranks_text(late)} did not reach '{self._phase}' in {waited_s:.0f} s"
        if not idle:
            return self._silence(late, words)
        return self._silence(late, f"{words}; rank {idle[0].rank} {idle[0].text}", _EVERY_RANK)

    def _missing_below(self, rank: int) -> list[int]:
        """Of `rank` and the ranks below it in the tree, those that have sent nothing yet. `rank` itself is left out if
        it takes part already, and only waits for ranks below it.
        """
        children = self._children(rank)
        is_here = bool(children) and self._mailbox.is_posted(self._presence_key(rank))
        late = [child for child in children if not self._mailbox.is_posted(self._message_key(child))]
        below = [missing for child in late for missing in self._missing_below(child)]
        return below if is_here and below else [rank, *below]

    # The way down

    def claim_decision(self) -> bool:
        """Claim the right to decide. Returns True if this rank decides. Returns False if another rank has decided, or
        has timed out.
        """
        self._is_decided = True
        return self._mailbox.claim(self._claim_key)

    def reach_decision(self, messages: Sequence[RankMessage], decide: Callable[[Sequence[bytes]], Decision]) -> None:
        """Rank 0 decides, and posts the decision."""
        failures = [message.failure for message in messages if message.failure is not None]
        failure = self._out_of_sync(messages) or first_failure(failures)
        decision = Decision()
        if failure is None:
            try:
                decision = decide([message.payload for message in sorted(messages, key=lambda message: message.rank)])
                assert len(decision.each) in (0, self._size), "a part for each rank, or no parts"
            except Exception as error:
                self.refusal, failure = error, failure_of(0, self._phase, error)
                decision = Decision()
        for rank, part in enumerate(decision.each):
            self._mailbox.post(self._decision_key(rank), part)
        self._parts_posted = len(decision.each)
        serials = {message.rank: message.serial for message in messages}
        unheard = [rank for rank in range(self._size) if rank not in serials]
        verdict = AgreementOutcome(decision.common, bool(decision.each), failure, unheard=unheard)
        if self._meeting is not None and not unheard:
            group = secrets.token_hex(4)
            verdict = msgspec.structs.replace(verdict, group=group, serials=[serials[r] for r in range(self._size)])
        self._post_verdict(verdict)

    def _post_verdict(self, verdict: AgreementOutcome) -> None:
        if self._meeting is not None:
            # done first, so that ranks that arrive from now on enter the next meeting
            self._mailbox.add_to_counter(self._meeting, 1)
        self._mailbox.post(self._decision_key(), msgspec.msgpack.encode(verdict))

    def clear(self) -> None:
        """Remove the decision that was posted."""
        for rank in range(self._parts_posted):
            self._mailbox.remove(self._decision_key(rank))
        self._mailbox.remove(self._decision_key())
        self._mailbox.unclaim(self._claim_key)

    def read_outcome(self) -> AgreementOutcome:
        """Read rank 0's decision. This rank's own message is not removed here: its parent in the tree may still read
        it, and removes it afterwards.
        """
        try:
            self._mailbox.await_posted([self._decision_key()], tick=self._tick_down, since=self._since)
            verdict = msgspec.msgpack.decode(self._mailbox.read(self._decision_key()), type=AgreementOutcome)
        except TooLateError as error:  # a rank has claimed the right to decide, and is gone, so the outcome is unknown
            verdict = AgreementOutcome(failure=error.failure and msgspec.structs.replace(error.failure, undecided=True))
        if self._children(self._rank):
            self._mailbox.remove(self._presence_key(self._rank), 0)
        if self._rank == 0:
            self._remove_read()
        return verdict

    def read_own_part(self) -> bytes:
        return self._mailbox.read(self._decision_key(self._rank))

    def _tick_down(self, _: list[str], waited_s: float) -> None:
        # This rank's limit is the longest, so that rank 0 times out earlier, and reports why.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * (self._height(0) + 2)
        if self._is_decided:
            limit_s += self._deadline_s
        due = waited_s >= limit_s
        if not due and not self._is_check_due(waited_s):
            return
        liveness = [self._detector.liveness_of(0, self._position)]
        if self._mailbox.is_posted(self._decision_key()):
            return
        failure = self._hopeless_wait(liveness, [0], waited_s)
        if failure is None and due:
            words = f"rank 0 did not decide on '{self._phase}' in {waited_s:.0f} s"
            failure = self._silence([0], words)
        if failure is None:
            self._log_waiting("waiting for rank 0 to decide", waited_s, liveness)
        elif self._is_decided:
            raise TooLateError(failure)
        elif self.claim_decision():
            self._post_verdict(AgreementOutcome(failure=failure))

    # Failures and log lines

    def _out_of_sync(self, messages: Sequence[RankMessage]) -> Failure | None:
        """The failure of a rank that makes another call than rank 0: its phase differs from rank 0's. None if all make
        the same call.
        """
        for message in messages:
            if message.phase != self._phase:
                return Failure(
                    message.rank, self._phase, "RankError",
                    f"rank {message.rank} is in '{message.phase}' while rank 0 is in '{self._phase}': "
                    "make the same calls, in the same order, on all ranks", is_silence=True,
                    ahead=_furthest_position(messages),
                )
        return None

    def _silence(self, ranks: Sequence[int], words: str, remedy: str = _LOGS) -> Failure:
        return Failure(
            ranks[0], self._phase, "RankError", words, 0, {"next": remedy}, is_silence=True, is_absence=True
        )

    def _is_check_due(self, waited_s: float) -> bool:
        """Whether it is time to check for missing ranks. `waited_s`: seconds waited so far."""
        if waited_s - self._checked_s < _RECHECK_S:
            return False
        self._checked_s = waited_s
        return True

    def _log_waiting(self, waiting: str, waited_s: float, liveness: Sequence[Liveness]) -> None:
        if waited_s - self._logged_s < self._side.reminder_s:
            return
        self._logged_s = waited_s
        described = [state for state in liveness if state.text]
        words = f": rank {described[0].rank} {described[0].text}" if described else ""
        if any(state.prospect in ("idle", "elsewhere") for state in described):
            words += f". If that rank never makes this call: {_EVERY_RANK}"
        log.warning("rank %d, %s: %s (%.0f s)%s", self._rank, self._phase, waiting, waited_s, words)

    # The tree

    def _children(self, rank: int) -> range:
        return range(self._fan * rank + 1, min(self._fan * rank + self._fan + 1, self._size))

    def _height(self, rank: int) -> int:
        """The number of levels of the tree below `rank`."""
        height, first = 0, rank
        while first * self._fan + 1 < self._size:
            first = first * self._fan + 1
            height += 1
        return height

    def _message_key(self, rank: int) -> str:
        return f"{self._name}/up/{rank}"

    def _presence_key(self, rank: int) -> str:
        """The key that exists once `rank` takes part. Rank 0's key contains its phase, because rank 0 posts no
        message that would tell it.
        """
        suffix = f"/{hashlib.blake2b(self._phase.encode(), digest_size=8).hexdigest()}" if rank == 0 else ""
        return f"{self._name}/here/{rank}{suffix}"

    @property
    def _claim_key(self) -> str:
        return f"{self._name}/claim"

    def _decision_key(self, rank: int | None = None) -> str:
        return f"{self._name}/down" if rank is None else f"{self._name}/down/{rank}"


class TooLateError(Exception):
    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


def _furthest_position(messages: Sequence[RankMessage]) -> int | None:
    """The highest position of any rank, if all ranks make the same kind of agreement, but at different positions; else
    None.
    """
    positions = {message.position for message in messages}
    return None if None in positions or len(positions) < 2 else max(
        position for position in positions if position is not None
    )
