"""The group of a job's ranks: decisions that all ranks make together. A group of one rank decides at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from flowstone.config import HEARTBEAT_S, SILENCE_S
from flowstone.errors import CancelledError, NoCheckpointError, NotAStoreError, RankError
from flowstone.log import log
from flowstone.ranks.agreement import Agreement, Timeouts
from flowstone.ranks.exchange import Decision
from flowstone.ranks.failure import error_text
from flowstone.ranks.kv_store import KeyValueStore


class Job(msgspec.Struct, frozen=True):
    """A job: this process's rank, the number of ranks, and the key-value store that they share (None in a job of one
    rank).
    """

    rank: int = 0
    size: int = 1
    kv_store: KeyValueStore | None = None


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    dist: Any = sys.modules.get("torch.distributed")  # if torch.distributed was never imported, the process is no rank
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def this_job() -> Job:
    """The job according to torch.distributed; a process outside of a group is a job of one rank.

    The key-value store is a part of the job's own store, under a prefix. A separate connection is used, so that
    these calls do not delay those of torch. All Checkpointers of the job use the same prefix, and those of a group find
    each other at their first agreement.
    """
    rank, size = rank_and_size()
    if size == 1:
        return Job()
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    own = c10d._get_default_store().clone()  # torch has no public name for the default store
    # the limit of each call, in case the process that hosts the store is frozen
    own.set_timeout(timedelta(seconds=SILENCE_S))
    return Job(rank, size, cast("KeyValueStore", c10d.PrefixStore("flowstone", own)))


if TYPE_CHECKING:
    from flowstone.ranks.heartbeat import Activity, Heartbeat

_ABSENT = {kind.__name__: kind for kind in (NoCheckpointError, NotAStoreError)}


def error_for_others(verb: str, error: BaseException) -> Exception:
    """The error that the other ranks get if `error` ends the call of `verb` on this rank."""
    if isinstance(error, Exception):
        return error
    return CancelledError(f"{verb}() was interrupted: {error_text(error)}", next=f"call {verb}() again on every rank")


class VerbCalls(Protocol):
    """The calls of verbs (save, load, ...) on this rank.

    calls  number of calls so far
    last   verb of the last call
    verb   verb of the running call; None if no call runs
    """

    calls: int
    last: str
    verb: str | None


class RankGroup:
    """The group of a job's ranks, for one of them. All ranks make the same calls in the same order. For one thread at a
    time.

    agreement  makes the agreements; a group of one rank agrees with itself
    """

    def __init__(self, deadline_s: float, label: str, calls: VerbCalls, *, alone: bool = False) -> None:
        """Send heartbeats of this rank from now on, until `leave`.

        label  location of the Checkpointer's store
        alone  this process is a group of one, even if its job has several ranks
        """
        job = Job() if alone else this_job()
        self.deadline_s, self.alone = deadline_s, alone
        self._calls, self._highest = calls, -1
        self.rank, self.size = job.rank, job.size
        silence_s = min(SILENCE_S, deadline_s / 2)
        heartbeat_s = min(HEARTBEAT_S, silence_s / 10)
        self._heartbeat: Heartbeat | None = None
        if job.kv_store is not None:
            from flowstone.ranks.heartbeat import Heartbeat  # imported here: a single rank needs none

            self._heartbeat = Heartbeat(job.kv_store, job.rank, label, self._activity, every_s=heartbeat_s)
        self.agreement = Agreement(
            job.kv_store, job.rank, job.size, timeouts=Timeouts(deadline_s, silence_s), label=label,
            heartbeat=self._heartbeat
        )

    def announce_step(self, step: int) -> None:
        """Report in the next heartbeat that this rank saves `step`."""
        self._highest = max(step, self._highest)

    def _activity(self) -> Activity:
        from flowstone.ranks.heartbeat import Activity

        calls = self._calls
        return Activity(calls.calls, calls.last, calls.verb is not None, self._highest)

    def is_known_everywhere(self, mine: bool) -> bool:
        """Whether `mine`, a fact on this rank, is known to be true on all ranks without an agreement. True only if
        `mine` is true and the group has one rank.
        """
        return mine and self.size == 1

    def short_wait(self) -> AbstractContextManager[None]:
        """Context without long waits for ranks that are alive, but make no call: see `Agreement.short_wait`."""
        return self.agreement.short_wait()

    def decide_on_rank_zero(self, phase: str, look: Callable[[], Sequence[int]]) -> list[int]:
        """Call `look` on rank 0 only, and return its result on all ranks. So only rank 0 lists the checkpoints.

        raises  the error of `look` on rank 0, and RankError on other ranks. But NoCheckpointError and NotAStoreError
                are raised on every rank, so that all can start a new training
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

    def confirm_all(self, phase: str, error: Exception | None = None) -> None:
        """Return if no rank has an error. Otherwise raise `error`, or RankError for the error of another rank."""
        self.agreement.agree(phase, b"" if error is None else error, lambda _: Decision())

    def decide_from_all(
        self, phase: str, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]
    ) -> bytes:
        """Send `mine` to rank 0, and return what rank 0 decides from the messages of all ranks: the same on all ranks.

        raises  `mine`, if it is an error, or RankError for the error of another rank
        """
        return self.agreement.agree(phase, mine, decide).common

    def gather_on_node(self, phase: str, node: str, mine: bytes | Exception) -> list[tuple[int, bytes]]:
        """Exchange messages between the ranks of this node: returns (rank, message) for each non-empty message, in rank
        order.

        raises  `mine`, if it is an error, or RankError for the error of another rank
        """

        def group(messages: Sequence[bytes]) -> Decision:
            nodes: dict[str, list[tuple[int, bytes]]] = {}
            names = []
            for rank, message in enumerate(messages):
                name, words = msgspec.msgpack.decode(message, type=tuple[str, bytes])
                names.append(name)
                nodes.setdefault(name, []).extend([(rank, words)] if words else [])
            packed = {name: msgspec.msgpack.encode(entries) for name, entries in nodes.items()}
            return Decision(b"", [packed[name] for name in names])

        words = mine if isinstance(mine, Exception) else msgspec.msgpack.encode((node, mine))
        agreed = self.agreement.agree(phase, words, group)
        return msgspec.msgpack.decode(agreed.own, type=list[tuple[int, bytes]])

    def abandon(self) -> None:
        """Stop the heartbeat, so that no rank waits for a Checkpointer that no longer exists. Returns immediately."""
        if self._heartbeat is not None:
            self._heartbeat.stop(wait=False)

    def leave(self) -> None:
        """Leave the group. Rank 0 leaves last, since its process may host the key-value store."""
        if self._heartbeat is not None:
            # closed first, so that it reports the end of this rank to ranks that still wait for it
            self._heartbeat.close()
        try:
            self.agreement.leave()
        except RuntimeError as error:  # raised by torch: the process that hosts the key-value store has ended
            log.debug("left the group without notice: %s", error)
