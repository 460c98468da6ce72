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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowstone.config import DEADLINE_S, HEARTBEAT_S, LEAVE_S, SILENCE_S, TREE_FAN
from flowstone.errors import RankError
from flowstone.ranks.board import Board, Mail
from flowstone.ranks.exchange import Decision, Exchange, TooLateError, Verdict
from flowstone.ranks.pulse import Hearing


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
        self._decided: list[Exchange] = []  # on rank 0: those whose verdict somebody may still have to read
        self._unheard: set[str] = set()  # where ranks that were too late post what nobody reads any more

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
        one = Exchange(
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
        self, one: Exchange, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]
    ) -> Verdict:
        said = one.collect(mine)
        self._take_down_unheard()
        self._unheard.update(one.unheard())
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
                raise TooLateError(None)

        with contextlib.suppress(TooLateError):
            self.mail.await_posted([f"bye/{r}" for r in range(1, self.size)], tick=tick, since=time.monotonic())

    def _take_down_unheard(self) -> None:
        assert self.mail is not None
        for key in [key for key in self._unheard if self.mail.is_posted(key)]:
            self.mail.remove(key)
            self._unheard.discard(key)

    def _clear(self) -> None:
        for one in self._decided:
            one.clear()
        self._decided.clear()
