"""One agreement under way: messages of all ranks go up in a tree, and rank 0's decision comes down."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from flowstone.config import DEADLINE_MARGIN_S, NOTICE_S, UNANSWERED_S
from flowstone.log import log
from flowstone.ranks.failure import Failure, failure_of, first_failure, own_failure, ranks_in_words
from flowstone.ranks.kv_store import Mailbox

if TYPE_CHECKING:
    from flowstone.ranks.failure_detector import FailureDetector, Liveness

_RECHECK_S = 1.0  # between two looks at the heartbeats of missing ranks
_HEARD_MAX = 64  # heartbeats that are read; ranks further down the tree are watched by their parents
_LOGS = "look at the logs of those ranks; the other ranks go on, and may save again"
_AGAIN = "make this call again on every rank, or end the job"
_EVERY_RANK = (
    "make this call on every rank, with Checkpointers of the same path; for a rank that saves or loads by itself, "
    "construct a Checkpointer with alone=True"
)


class Said(msgspec.Struct, frozen=True):
    rank: int
    phase: str
    payload: bytes
    failure: Failure | None = None
    position: int | None = msgspec.field(default=None, name="place")
    serial: int = 1


class Verdict(msgspec.Struct, frozen=True):
    """What all ranks learn, or the failure.

    group    name of the group once its ranks have met; `serials`: of each rank, which of its Checkpointers is in it
    unheard  ranks that sent nothing: the failure is not theirs if they have come for another call
    """

    common: bytes = b""
    has_each: bool = False
    failure: Failure | None = None
    group: str = ""
    serials: list[int] = []
    unheard: list[int] = []

    def passes_over(self, rank: int, position: int | None) -> bool:
        """Whether this may concern calls that `rank` does not make. Not if one is later than its own, which is lost."""
        if self.failure is None:
            return False
        ahead = self.failure.ahead
        is_lost = ahead is not None and position is not None and position <= ahead
        return self.failure.is_absence or (rank in self.unheard and not is_lost)


class Decision(msgspec.Struct, frozen=True):
    """Rank 0's decision: `common` for all ranks, and `each` with one part per rank, if any."""

    common: bytes = b""
    each: Sequence[bytes] = ()


class Side(msgspec.Struct, eq=False):
    """One rank's side of all its exchanges.

    serial   number of its Checkpointer
    pressed  a caller is held up: ranks that live and have not called get only a short time
    passive  ranks that were found not to have called, with the mark of their heartbeat then
    """

    mailbox: Mailbox
    detector: FailureDetector
    rank: int
    size: int
    fan: int
    deadline_s: float
    reminder_s: float
    serial: int = 1
    pressed: bool = False
    passive: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)


class Exchange:
    """One agreement under way.

    meeting  number of the meeting, if ranks meet here
    """

    def __init__(
        self, side: Side, name: str, phase: str, position: int | None = None, meeting: str | None = None
    ) -> None:
        self._mailbox, self._detector, self._name, self._phase = side.mailbox, side.detector, name, phase
        self._rank, self._size, self._fan = side.rank, side.size, side.fan
        self._deadline_s, self._position, self._meeting, self._side = side.deadline_s, position, meeting, side
        self._since = time.monotonic()
        self._logged_s = min(NOTICE_S, side.reminder_s) - side.reminder_s
        self._looked = 0.0
        self.refusal: Exception | None = None  # the error with which rank 0's decision failed
        self._eaches = 0  # number of messages posted for a single rank
        self._is_decided = False  # or another rank is about to decide
        self._read_from: dict[int, int] = {}  # children whose messages were read, and the messages' lengths

    def is_over(self) -> bool:
        """Whether it was decided before this rank came."""
        return self._mailbox.is_posted(self._down())

    def is_awaited(self) -> bool:
        """Whether rank 0 is in it, or a rank waits there for rank 0, and they agree on the same thing as this rank."""
        if self._rank != 0:
            return self._mailbox.is_posted(self._here(0))
        said = [self._mailbox.read(at) for at in map(self._up, self._children(0)) if self._mailbox.is_posted(at)]
        return any(msgspec.msgpack.decode(one, type=list[Said])[0].phase == self._phase for one in said)

    # Up

    def collect(self, mine: bytes | Exception) -> list[Said]:
        """Messages of this rank and of all ranks below it in the tree. Posts them to the parent, except on rank 0."""
        failure = own_failure(self._rank, self._phase, mine) if isinstance(mine, Exception) else None
        payload = b"" if isinstance(mine, Exception) else mine
        said = [Said(self._rank, self._phase, payload, failure, self._position, self._side.serial)]
        children = self._children(self._rank)
        if children:
            self._mailbox.post(self._here(self._rank), b"")
            said += self._hear(children)
        if self._rank != 0:
            self._mailbox.post(self._up(self._rank), msgspec.msgpack.encode(said))
            self._remove_read()
        return said

    def _hear(self, children: Sequence[int]) -> list[Said]:
        said: list[Said] = []
        try:
            self._mailbox.await_posted([self._up(child) for child in children], tick=self._tick_up, since=self._since)
        except TooLateError as error:
            if error.failure is not None:
                said.append(Said(self._rank, self._phase, b"", error.failure, self._position, self._side.serial))
        for child in children:
            if self._mailbox.is_posted(self._up(child)):  # the message stays until this rank removes it
                message = self._mailbox.read(self._up(child))
                self._read_from[child] = len(message)
                said += msgspec.msgpack.decode(message, type=list[Said])
        return said

    def _remove_read(self) -> None:
        """Remove the children's messages, once our own is posted: ranks looking for late ones read them until then."""
        for child, length in self._read_from.items():
            self._mailbox.remove(self._up(child), length)

    def unread(self) -> list[str]:
        """Keys where children may still post messages that will not be read."""
        return [self._up(child) for child in self._children(self._rank) if child not in self._read_from]

    def _tick_up(self, missing: list[str], waited_s: float) -> None:
        # Ranks further down give up first, and report the ranks that they miss.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * self._height(self._rank)
        due = waited_s >= limit_s
        if not due and not self._is_time(waited_s):
            return
        late = [r for key in missing for r in self._missing_below(int(key.rpartition("/")[2]))]
        liveness = [self._detector.of(rank, self._position) for rank in late[:_HEARD_MAX]]
        if self._mailbox.is_posted(self._down()):
            raise TooLateError(None)  # other ranks have given up, and decided: learn that instead
        failure = self._gone(liveness, late, waited_s)
        if failure is None and due:
            failure = self._did_not_come(liveness, late, waited_s)
        if failure is not None:
            raise TooLateError(failure)
        self._tell(f"waiting for {ranks_in_words(late)}", waited_s, liveness)

    def _gone(self, liveness: Sequence[Liveness], late: Sequence[int], waited_s: float) -> Failure | None:
        """The reason why waiting longer is useless, if there is one."""
        silent = {one.rank: one.silent_s for one in liveness if one.prospect == "silent"}
        if silent:
            words = f"nothing heard from {ranks_in_words(list(silent))} for {max(silent.values()):.0f} s"
            return self._silence(list(silent), words)
        is_long = waited_s >= UNANSWERED_S
        gone = [one for one in liveness if one.prospect == "closed" or (one.prospect == "elsewhere" and is_long)]
        if gone:
            words = f"rank {gone[0].rank} {gone[0].words}, and will not reach '{self._phase}'"
            return self._silence([one.rank for one in gone], words, _EVERY_RANK)
        left = [one for one in liveness if one.prospect == "left"]
        if left:
            words = f"rank {left[0].rank} {left[0].words}, and will not reach '{self._phase}'"
            return msgspec.structs.replace(self._silence([left[0].rank], words, _AGAIN), left=left[0].call)
        idle = is_long and bool(liveness) and all(one.prospect == "idle" for one in liveness)
        known = self._side.passive
        if idle and (self._side.pressed or all(known.get(one.rank) == one.mark for one in liveness)):
            return self._did_not_come(liveness, late, waited_s)
        return None

    def _did_not_come(self, liveness: Sequence[Liveness], late: Sequence[int], waited_s: float) -> Failure:
        idle = [one for one in liveness if one.prospect == "idle"]
        self._side.passive.update({one.rank: one.mark for one in idle})
        words = f"{ranks_in_words(late)} did not reach '{self._phase}' in {waited_s:.0f} s"
        if not idle:
            return self._silence(late, words)
        return self._silence(late, f"{words}: rank {idle[0].rank} {idle[0].words}", _EVERY_RANK)

    def _missing_below(self, rank: int) -> list[int]:
        """Ranks of a branch that have sent nothing yet; the branch's root if all have."""
        children = self._children(rank)
        is_here = bool(children) and self._mailbox.is_posted(self._here(rank))
        late = [child for child in children if not self._mailbox.is_posted(self._up(child))]
        below = [missing for child in late for missing in self._missing_below(child)]
        return below if is_here and below else [rank, *below]

    # Down

    def claim(self) -> bool:
        """Claim the decision. Returns whether this rank has it; if not, another rank decides, or has given up."""
        self._is_decided = True
        return self._mailbox.claim(self._claim)

    def reach_decision(self, said: Sequence[Said], decide: Callable[[Sequence[bytes]], Decision]) -> None:
        """Rank 0 decides, and posts the decision."""
        failure = self._out_of_sync(said) or first_failure([one.failure for one in said if one.failure is not None])
        decision = Decision()
        if failure is None:
            try:
                decision = decide([one.payload for one in sorted(said, key=lambda one: one.rank)])
                assert len(decision.each) in (0, self._size), "one for each rank, or none"
            except Exception as error:
                self.refusal, failure = error, failure_of(0, self._phase, error)
                decision = Decision()
        for rank, message in enumerate(decision.each):
            self._mailbox.post(self._down(rank), message)
        self._eaches = len(decision.each)
        serials = {one.rank: one.serial for one in said}
        unheard = [rank for rank in range(self._size) if rank not in serials]
        verdict = Verdict(decision.common, bool(decision.each), failure, unheard=unheard)
        if self._meeting is not None and not unheard:
            group = secrets.token_hex(4)
            verdict = msgspec.structs.replace(verdict, group=group, serials=[serials[r] for r in range(self._size)])
        self._post_verdict(verdict)

    def _post_verdict(self, verdict: Verdict) -> None:
        if self._meeting is not None:
            self._mailbox.count(self._meeting, 1)  # first: ranks that come from now on meet the others at the next one
        self._mailbox.post(self._down(), msgspec.msgpack.encode(verdict))

    def clear(self) -> None:
        """Remove the posted decision."""
        for rank in range(self._eaches):
            self._mailbox.remove(self._down(rank))
        self._mailbox.remove(self._down())
        self._mailbox.unclaim(self._claim)

    def learn(self) -> Verdict:
        """Rank 0's decision. The parent removes this rank's own message, since it may still be reading it."""
        try:
            self._mailbox.await_posted([self._down()], tick=self._tick_down, since=self._since)
            verdict = msgspec.msgpack.decode(self._mailbox.read(self._down()), type=Verdict)
        except TooLateError as error:  # unknowable: the rank that was to decide claimed the decision, and is gone
            verdict = Verdict(failure=error.failure and msgspec.structs.replace(error.failure, undecided=True))
        if self._children(self._rank):
            self._mailbox.remove(self._here(self._rank), 0)
        if self._rank == 0:
            self._remove_read()
        return verdict

    def own(self) -> bytes:
        return self._mailbox.read(self._down(self._rank))

    def _tick_down(self, _: list[str], waited_s: float) -> None:
        # This rank gives up last: rank 0 gives up earlier, and reports why.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * (self._height(0) + 2)
        if self._is_decided:
            limit_s += self._deadline_s
        due = waited_s >= limit_s
        if not due and not self._is_time(waited_s):
            return
        liveness = [self._detector.of(0, self._position)]
        if self._mailbox.is_posted(self._down()):
            return
        failure = self._gone(liveness, [0], waited_s)
        if failure is None and due:
            words = f"rank 0 did not decide on '{self._phase}' in {waited_s:.0f} s"
            failure = self._silence([0], words)
        if failure is None:
            self._tell("waiting for rank 0 to decide", waited_s, liveness)
        elif self._is_decided:
            raise TooLateError(failure)
        elif self.claim():
            self._post_verdict(Verdict(failure=failure))

    # Words

    def _out_of_sync(self, said: Sequence[Said]) -> Failure | None:
        """The failure of a rank that is out of sync: it agrees on something else than rank 0 does."""
        for one in said:
            if one.phase != self._phase:
                return Failure(
                    one.rank, self._phase, "RankError",
                    f"rank {one.rank} is in '{one.phase}' while rank 0 is in '{self._phase}': "
                    "call the same, in the same order, on all ranks", is_silence=True, ahead=_furthest_position(said),
                )
        return None

    def _silence(self, ranks: Sequence[int], words: str, remedy: str = _LOGS) -> Failure:
        return Failure(
            ranks[0], self._phase, "RankError", words, 0, {"next": remedy}, is_silence=True, is_absence=True
        )

    def _is_time(self, waited_s: float) -> bool:
        """Whether to look for missing ranks now."""
        if waited_s - self._looked < _RECHECK_S:
            return False
        self._looked = waited_s
        return True

    def _tell(self, what: str, waited_s: float, liveness: Sequence[Liveness]) -> None:
        if waited_s - self._logged_s < self._side.reminder_s:
            return
        self._logged_s = waited_s
        known = [one for one in liveness if one.words]
        words = f": rank {known[0].rank} {known[0].words}" if known else ""
        if any(one.prospect in ("idle", "elsewhere") for one in known):
            words += f". If it never does: {_EVERY_RANK}"
        log.warning("rank %d, %s: %s (%.0f s)%s", self._rank, self._phase, what, waited_s, words)

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
        """Key of this rank's presence. Rank 0's also names what it agrees on, so no rank reads a removed message."""
        what = f"/{hashlib.blake2b(self._phase.encode(), digest_size=8).hexdigest()}" if rank == 0 else ""
        return f"{self._name}/here/{rank}{what}"

    @property
    def _claim(self) -> str:
        return f"{self._name}/claim"

    def _down(self, rank: int | None = None) -> str:
        return f"{self._name}/down" if rank is None else f"{self._name}/down/{rank}"


class TooLateError(Exception):
    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


def _furthest_position(said: Sequence[Said]) -> int | None:
    """The furthest position, if all ranks make the same agreements and are not at the same one."""
    positions = {one.position for one in said}
    return None if None in positions or len(positions) < 2 else max(
        position for position in positions if position is not None
    )
