"""A job of several ranks that saves into the simulated disk: a Checkpointer for each, and a thread that uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from sim_disk import Disk, PowerLoss
from sim_turns import Freeze, RankDisk, RankStore, StillHeartbeat, Turns
from sim_world import Job, Oracle

import flowstone as fs
from flowstone import Keep
from flowstone.errors import FlowstoneError, RankError, SaveFailedError, StepExistsError
from flowstone.events.phases import Event
from flowstone.ranks import Job as RankJob
from flowstone.ranks import agreement, exchange, failure_detector, heartbeat, kv_store
from flowstone.ranks import group as rank_group

DEADLINE_S = 12.0  # of the simulation's own time


def part_of(whole: dict[str, dict[str, object]], rank: int, size: int) -> dict[str, object]:
    """What one rank has of a state: rows of one tensor, replicas of the rest, and something of its own."""
    wide = whole["model"]["wide"]
    rows = wide.shape[0]  # type: ignore[attr-defined]
    # The second has most of them: one segment with a slot of its own, others that are all packed.
    cuts = [0, *(rows - 10 * (size - 1 - index) for index in range(1, size)), rows] if size > 2 else [0, 15, rows]
    begin, stop = cuts[rank], cuts[rank + 1]
    shard = fs.Shard(wide[begin:stop].clone(), wide.shape, (begin, 0))  # type: ignore[index, attr-defined]
    return {**whole, "model": {**whole["model"], "wide": shard}, "own": fs.PerRank({"rank": rank})}


class GroupJob:
    """As sim_world.Job is, of several ranks."""

    def __init__(
        self, sandbox: Path, disk: Disk, oracle: Oracle, *, ranks: int, keep: Keep | None = None, number: int = 0,
        attempt: str = "a", by_wait: bool = False, again: bool = False, freeze: Freeze | None = None,
        coding: Mapping[str, object] | None = None,
    ) -> None:
        self.turns, self._number = Turns(ranks, disk, number=number, freeze=freeze), number
        values: dict[str, bytes] = {}
        self.members: list[Job] = []
        for rank in range(ranks):
            seen = RankStore(values, self.turns, rank)
            with mock.patch.object(rank_group, "this_job", lambda rank=rank, seen=seen: RankJob(rank, ranks, seen)):
                self.members.append(
                    Job(sandbox, RankDisk(disk, self.turns, rank), oracle, keep=keep, number=number, attempt=attempt,
                        by_wait=by_wait, again=again, deadline_s=DEADLINE_S, coding=coding,
                        part=lambda whole, rank=rank: part_of(whole, rank, ranks))
                )

    def save(self, step: int) -> None:
        self._each(lambda member: member.save(step))

    def load(self) -> None:
        self._each(lambda member: member.load())

    def save_twice(self, step: int) -> None:
        self._each(lambda member: member.save_twice(step))

    def save_both(self, first: int, second: int) -> None:
        """Each rank begins the second at a moment of its own."""
        changes = {id(member): (self._number + 5 * rank) % 16 for rank, member in enumerate(self.members)}
        self._each(lambda member: member.save_both(first, second, changes[id(member)]))

    def refused(self, step: int) -> None:
        self._each(lambda member: member.refused(step))

    def settle(self) -> None:
        for member in self.members:
            member.settle()

    def wait(self) -> None:
        for member in self.members:
            member.wait()

    def try_again(self, attempt: str) -> None:
        for member in self.members:
            member.try_again(attempt)

    @property
    def events(self) -> list[Event]:
        return [event for member in self.members for event in member.events]

    def _each(self, act: Callable[[Job], None]) -> None:
        """What all ranks do. Raises PowerLoss where one has lost its power, else what went wrong, where it began."""
        outcomes: list[BaseException | None] = [None] * len(self.members)

        def run(rank: int) -> None:
            member = self.members[rank]
            try:
                try:
                    act(member)
                finally:
                    member.drain()
            except BaseException as error:
                outcomes[rank] = error
            finally:
                self.turns.done(rank)

        self.turns.begin()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _check_one_verdict(outcomes)
        failures = [outcome for outcome in outcomes if outcome is not None]
        own = [failure for failure in failures if not isinstance(failure, FlowstoneError)]
        for error in [*own, *(failure for failure in failures if not isinstance(failure, RankError)), *failures]:
            raise error

    def end(self) -> None:
        self.turns.over()
        for member in reversed(self.members):  # rank 0 leaves last
            member.abandon()
            member.end()


def _check_one_verdict(outcomes: list[BaseException | None]) -> None:
    """All ranks get the same cause; and if one rank's save committed, no other rank's save failed."""
    lived = [outcome for outcome in outcomes if not isinstance(outcome, PowerLoss)]
    own = [c for c in map(_cause, lived) if c is not None and not isinstance(c, (RankError, StepExistsError))]
    assert len(own) < 2, f"one thing failed, and ranks were told different causes: {own}"
    sure = {error is None for error in lived if not (isinstance(error, RankError) and error.undecided)}
    assert len(sure) < 2, f"ranks were told different things: {outcomes}"


def _cause(error: BaseException | None) -> BaseException | None:
    """What a save failed of, where the next call tells of it."""
    return error.__cause__ if isinstance(error, SaveFailedError) else error


@contextmanager
def simulated_time(turns: Callable[[], Turns]) -> Iterator[None]:
    """Ranks that are threads: their time is that of `turns()`, and no heartbeat has a thread of its own."""
    clock = SimpleNamespace(monotonic=lambda: turns().monotonic(), sleep=lambda s: turns().sleep(s))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(heartbeat, "Heartbeat", StillHeartbeat))
        for module in (agreement, kv_store, exchange, failure_detector):
            stack.enter_context(mock.patch.object(module, "time", clock))
        yield


@contextmanager
def group(sandbox: Path, disk: Disk, oracle: Oracle, **options: object) -> Iterator[GroupJob]:
    with simulated_time(lambda: job.turns):
        job = GroupJob(sandbox, disk, oracle, **options)  # type: ignore[arg-type]
        try:
            yield job
        finally:
            job.end()
