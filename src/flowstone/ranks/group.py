"""The rank group: decisions that the N ranks of a job make together, N at least 1. A group of one decides at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

from flowstone.config import HEARTBEAT_S, SILENCE_S
from flowstone.errors import CancelledError, NoCheckpointError, NotAStoreError, RankError
from flowstone.log import log
from flowstone.ranks.agreement import Agreement, Timeouts
from flowstone.ranks.failure import name_of
from flowstone.ranks.job import Job, this_job
from flowstone.ranks.wire import Decision

if TYPE_CHECKING:
    from flowstone.ranks.heartbeat import Activity, Heartbeat

_ABSENT = {one.__name__: one for one in (NoCheckpointError, NotAStoreError)}


def error_for_others(verb: str, error: BaseException) -> Exception:
    """The error that the other ranks get when a call ends here: an interrupt ends this call alone."""
    if isinstance(error, Exception):
        return error
    return CancelledError(f"{verb}() was interrupted: {name_of(error)}", next=f"call {verb}() again on every rank")


class Calls(Protocol):
    """Which call of a verb this rank is in.

    calls  how many were begun; `last` is the last of them, `verb` the one that is running
    """

    calls: int
    last: str
    verb: str | None


class RankGroup:
    """This rank's side of the group. Every rank calls the same, in the same order; one thread at a time.

    agreement  how the ranks agree; a group of one agrees with itself
    """

    def __init__(self, deadline_s: float, label: str, calls: Calls, *, alone: bool = False) -> None:
        """Reports this rank to the others from now on, until `leave`.

        label  location that is saved into
        alone  this process is a group of one, whatever job it is in
        """
        job = Job() if alone else this_job()
        self.deadline_s, self.alone = deadline_s, alone
        self._calls, self._highest = calls, -1
        self.rank, self.size = job.rank, job.size
        silence_s = min(SILENCE_S, deadline_s / 2)
        heartbeat_s = min(HEARTBEAT_S, silence_s / 10)
        self._heartbeat: Heartbeat | None = None
        if job.kv_store is not None:
            from flowstone.ranks.heartbeat import Heartbeat  # several ranks alone have one

            self._heartbeat = Heartbeat(job.kv_store, job.rank, label, self._activity, every_s=heartbeat_s)
        self.agreement = Agreement(
            job.kv_store, job.rank, job.size, timeouts=Timeouts(deadline_s, silence_s), label=label,
            heartbeat=self._heartbeat
        )

    def comes_to(self, step: int) -> None:
        """This rank was told to save `step`: tell the ranks that wait for it."""
        self._highest = max(step, self._highest)

    def _activity(self) -> Activity:
        from flowstone.ranks.heartbeat import Activity

        calls = self._calls
        return Activity(calls.calls, calls.last, calls.verb is not None, self._highest)

    def certain(self, mine: bool) -> bool:
        """Whether `mine` is known to hold on every rank: never in a group of several, before the ranks are asked."""
        return mine and self.size == 1

    def pressing(self) -> AbstractContextManager[None]:
        """While inside, the caller is held up by the other ranks: see `Agreement.pressing`."""
        return self.agreement.pressing()

    def decide(self, phase: str, look: Callable[[], Sequence[int]]) -> list[int]:
        """The result of `look` on rank 0, for all ranks: one rank decides which checkpoints exist.

        raises  the error of `look` on rank 0, RankError elsewhere; but NoCheckpointError on every rank, so that all
                may start from the beginning
        """
        try:
            agreed = self.agreement.agree(phase, b"", lambda _: Decision(msgspec.json.encode(list(look()))))
        except RankError as error:
            absent = _ABSENT.get(error.kind)
            if absent is None:
                raise
            facts = {name: fact for name, fact in error.facts.items() if name not in ("phase", "kind")}
            raise absent(error.message.removeprefix("rank 0 failed: "), **facts) from error
        return msgspec.json.decode(agreed.common, type=list[int])

    def confirm(self, phase: str, error: Exception | None = None) -> None:
        """Go on only if all ranks do. Raises `error`, or RankError for the error of another rank."""
        self.agreement.agree(phase, b"" if error is None else error, lambda _: Decision())

    def ask(self, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]) -> bytes:
        """What rank 0 decides from the messages of all ranks; the same result on all of them.

        raises  `mine`, if it is an error, or RankError for the error of another rank
        """
        return self.agreement.agree(phase, mine, decide).common

    def near(self, phase: str, node: str, mine: bytes | Exception) -> list[tuple[int, bytes]]:
        """Messages of the ranks of this node that sent one: (rank, message), in rank order.

        raises  `mine`, if it is an error, or RankError for the error of another rank
        """

        def group(said: Sequence[bytes]) -> Decision:
            nodes: dict[str, list[tuple[int, bytes]]] = {}
            names = []
            for rank, one in enumerate(said):
                name, words = msgspec.msgpack.decode(one, type=tuple[str, bytes])
                names.append(name)
                nodes.setdefault(name, []).extend([(rank, words)] if words else [])
            packed = {name: msgspec.msgpack.encode(those) for name, those in nodes.items()}
            return Decision(b"", [packed[name] for name in names])

        words = mine if isinstance(mine, Exception) else msgspec.msgpack.encode((node, mine))
        agreed = self.agreement.agree(phase, words, group)
        return msgspec.msgpack.decode(agreed.own, type=list[tuple[int, bytes]])

    def abandon(self) -> None:
        """This rank's Checkpointer is gone: tell the others not to wait for it. Returns at once."""
        if self._heartbeat is not None:
            self._heartbeat.stop(wait=False)

    def leave(self) -> None:
        """The end. Rank 0 leaves last, since its process may host the key-value store."""
        if self._heartbeat is not None:
            self._heartbeat.close()  # first: ranks that still wait for this one learn that it does not come
        try:
            self.agreement.leave()
        except RuntimeError as error:  # torch's: the process that hosts the key-value store has ended
            log.debug("left without a word: %s", error)
