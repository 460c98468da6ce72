"""One agreement under way: what all ranks say goes up in a tree, and what rank 0 makes of it comes down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flowstone.config import DEADLINE_MARGIN_S
from flowstone.ranks.board import Mail
from flowstone.ranks.failure import Failure, failure_of, first_failure, own_failure, ranks_in_words
from flowstone.ranks.pulse import Hearing

_log = logging.getLogger(__name__)
_RECHECK_S = 1.0  # of the pulses of those that are waited for


class Said(msgspec.Struct, frozen=True):
    rank: int
    phase: str
    payload: bytes
    failure: Failure | None = None
    place: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    common: bytes = b""
    has_each: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What rank 0 has decided: `common` for all, and something of its own `each` rank, if anything."""

    common: bytes = b""
    each: Sequence[bytes] = ()


class Exchange:
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
        self._heard: dict[int, int] = {}  # children whose messages were read, and how long those were

    # Up

    def collect(self, mine: bytes | Exception) -> list[Said]:
        """What this rank and all below it in the tree say. Passed on upwards, but by rank 0."""
        failure = own_failure(self._rank, self._phase, mine) if isinstance(mine, Exception) else None
        said = [Said(self._rank, self._phase, b"" if isinstance(mine, Exception) else mine, failure, self._place)]
        children = self._children(self._rank)
        if children:
            self._mail.post(self._here(self._rank), b"")
            said += self._hear(children)
        if self._rank != 0:
            self._mail.post(self._up(self._rank), msgspec.msgpack.encode(said))
            self._take_down_heard()
        return said

    def _hear(self, children: Sequence[int]) -> list[Said]:
        said: list[Said] = []
        try:
            self._mail.await_posted([self._up(child) for child in children], tick=self._tick_up, since=self._since)
        except TooLateError as error:
            if error.failure is not None:
                said.append(Said(self._rank, self._phase, b"", error.failure))
        for child in children:
            if self._mail.is_posted(self._up(child)):  # and stays: we alone take it down
                message = self._mail.read(self._up(child))
                self._heard[child] = len(message)
                said += msgspec.msgpack.decode(message, type=list[Said])
        return said

    def _take_down_heard(self) -> None:
        """Not before ours is posted: until then, whoever looks for those that are late asks for our children's, too."""
        for child, length in self._heard.items():
            self._mail.remove(self._up(child), length)

    def unheard(self) -> list[str]:
        """Where children may still post what nobody will read."""
        return [self._up(child) for child in self._children(self._rank) if child not in self._heard]

    def _tick_up(self, missing: list[str], waited_s: float) -> None:
        # Those further down give up first, and say whom they miss.
        limit_s = self._deadline_s + DEADLINE_MARGIN_S * self._height(self._rank)
        due = waited_s >= limit_s
        if due or self._is_time(waited_s):
            late = [r for key in missing for r in self._missing_below(int(key.rpartition("/")[2]))]
            silent = {r: silent_s for r in late if (silent_s := self._hearing.silent_s(r)) is not None}
            if silent:
                words = f"nothing heard of {ranks_in_words(list(silent))} for {max(silent.values()):.0f} s"
                raise TooLateError(self._silence(list(silent), words))
            if self._mail.is_posted(self._down()):
                raise TooLateError(None)  # others have given up, and decided: that is to be learnt
            if due:
                words = f"{ranks_in_words(late)} did not come to '{self._phase}' in {waited_s:.0f} s"
                raise TooLateError(self._silence(late, words))
            self._tell(f"waiting for {ranks_in_words(late)}", waited_s)

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

    def judge(self, said: Sequence[Said], decide: Callable[[Sequence[bytes]], Decision]) -> None:
        """Rank 0 decides, and posts it."""
        failure = self._astray(said) or first_failure([one.failure for one in said if one.failure is not None])
        decision = Decision()
        if failure is None:
            try:
                decision = decide([one.payload for one in sorted(said, key=lambda one: one.rank)])
                assert len(decision.each) in (0, self._size), "one for each rank, or none"
            except Exception as error:
                self.refusal, failure = error, failure_of(0, self._phase, error)
                decision = Decision()
        for rank, message in enumerate(decision.each):
            self._mail.post(self._down(rank), message)
        self._eaches = len(decision.each)
        self._pronounce(Verdict(decision.common, bool(decision.each), failure))

    def _pronounce(self, verdict: Verdict) -> None:
        self._mail.post(self._down(), msgspec.msgpack.encode(verdict))

    def clear(self) -> None:
        """Take down what was decided."""
        for rank in range(self._eaches):
            self._mail.remove(self._down(rank))
        self._mail.remove(self._down())
        self._mail.unclaim(self._claim)

    def learn(self) -> Verdict:
        """What rank 0 has decided. This rank's own message is its parent's to take down, who may be reading it."""
        try:
            self._mail.await_posted([self._down()], tick=self._tick_down, since=self._since)
            verdict = msgspec.msgpack.decode(self._mail.read(self._down()), type=Verdict)
        except TooLateError as error:  # nobody will ever know: who was to decide has claimed it, and is gone
            verdict = Verdict(failure=error.failure and msgspec.structs.replace(error.failure, undecided=True))
        if self._children(self._rank):
            self._mail.remove(self._here(self._rank), 0)
        if self._rank == 0:
            self._take_down_heard()
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
            raise TooLateError(failure)
        if self.claim():
            self._pronounce(Verdict(failure=failure))

    # Words

    def _astray(self, said: Sequence[Said]) -> Failure | None:
        """A rank that agrees on something else than rank 0 does."""
        for one in said:
            if one.phase != self._phase:
                return Failure(
                    one.rank, self._phase, "RankError",
                    f"rank {one.rank} is in '{one.phase}' while rank 0 is in '{self._phase}': "
                    "all ranks call the same, in the same order", is_silence=True, ahead=_foremost(said),
                )
        return None

    def _silence(self, ranks: Sequence[int], words: str) -> Failure:
        facts = {"next": "look at the logs of those ranks; the job's other ranks go on, and may save again"}
        return Failure(ranks[0], self._phase, "RankError", words, 0, facts, is_silence=True)

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


class TooLateError(Exception):
    def __init__(self, failure: Failure | None) -> None:
        super().__init__("" if failure is None else failure.message)
        self.failure = failure


def _foremost(said: Sequence[Said]) -> int | None:
    """The furthest place, where all are on the same way and not at the same place."""
    places = {one.place for one in said}
    return None if None in places or len(places) < 2 else max(place for place in places if place is not None)
