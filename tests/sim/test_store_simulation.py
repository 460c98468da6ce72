"""A job is cut off from a store, at each call that changes it; then the promises of docs/ORDERING.md hold.

The store is in memory, with both ways to commit, and durable when a call returns, so a job leaves exactly the changes
that it has made. Only the simulated disk (sim_disk.py) loses names and blocks that were not synced. It has the tests of
power losses, syncs, the engine's own errors and the order of ranks' changes.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in the stubs

import flowstone as fs
from flowstone.commit import catalog, removal
from flowstone.commit.entries import EntryKind, parse_entry
from flowstone.errors import FlowstoneError, StepExistsError, StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.ranks import Job as RankJob
from flowstone.ranks import group as rank_group
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.store.wrap import FaultInjectingStore

CHANGES = frozenset({"make_directory", "put", "rename", "remove", "lock", "write", "written"})
ELEMENTS = 24_000
OPTIONS = {"budget_bytes": 16 << 20, "engine": fs.EngineOptions(request_bytes=2 << 20, workers=1)}


@dataclass(slots=True, eq=False)
class Connection:
    """Counts the changes that stores make, and cuts them off at one: before it, or after it as its answer is lost.

    for_ever  nothing comes through after that; else that call alone fails
    """

    at: int | None = None
    after: bool = False
    for_ever: bool = True
    count: int = 0
    is_cut: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)

    def store(
        self, contents: SharedMemoryDirectory, *, atomic_rename: bool, location: str = "store"
    ) -> FaultInjectingStore:
        return FaultInjectingStore(
            MemoryStore(contents, location=location, atomic_rename=atomic_rename), self._before, self._after
        )

    def _before(self, verb: str, path: str) -> StorageError | None:
        with self.guard:
            if verb in ("unlock", "close"):
                return None  # the process ends, and so does its lock
            if self.is_cut and self.for_ever:
                return self._lost(verb, path)
            if verb in CHANGES:
                self.count += 1
                if self.count - 1 == self.at and not self.after:
                    self.is_cut = True
                    return self._lost(verb, path)
            return None

    def _after(self, verb: str, path: str) -> StorageError | None:
        with self.guard:
            if verb in CHANGES and self.after and not self.is_cut and self.at is not None and self.count > self.at:
                self.is_cut = True
                return self._lost(verb, path)
            return None

    def _lost(self, verb: str, path: str) -> StorageError:
        return StorageError(f"cannot {verb} {path}: the store is out of reach", errno=errno.ETIMEDOUT)


@dataclass(slots=True)
class Told:
    """What the user has been told: steps that were committed, and begun; and the step of a rewind."""

    committed: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    rewinding: int | None = None


def _state(step: int) -> dict[str, object]:
    return {"weights": torch.full((ELEMENTS,), float(step)), "step": step}


def _save(checkpointer: fs.Checkpointer, events: Told, step: int) -> None:
    events.begun.append(step)
    checkpointer.save(step, _state(step)).committed.result()
    events.committed.append(step)


def _saves(*steps: int) -> Callable[[fs.Checkpointer, Told], None]:
    def act(checkpointer: fs.Checkpointer, events: Told) -> None:
        for step in steps:
            _save(checkpointer, events, step)

    return act


def _rewind(checkpointer: fs.Checkpointer, events: Told) -> None:
    events.rewinding = 1
    checkpointer.rewind(1)
    events.committed = [1]
    _save(checkpointer, events, 2)


@dataclass(frozen=True, slots=True)
class Scenario:
    act: Callable[[fs.Checkpointer, Told], None]
    before: tuple[int, ...] = ()
    keep: int | None = None


SCENARIOS = {
    "first_save": Scenario(_saves(1)), "second_save": Scenario(_saves(2), (1,)),
    "retention": Scenario(_saves(3, 4), (1, 2), keep=1), "rewind": Scenario(_rewind, (1, 2, 3)),
}


def _prepared(scenario: Scenario, *, atomic_rename: bool) -> tuple[SharedMemoryDirectory, Told]:
    contents, events = SharedMemoryDirectory(), Told()
    with fs.Checkpointer(Connection().store(contents, atomic_rename=atomic_rename), **OPTIONS) as earlier:  # type: ignore[arg-type]
        _saves(*scenario.before)(earlier, events)
    return contents, events


def _play(scenario: Scenario, connection: Connection, *, atomic_rename: bool) -> None:
    """The scenario with that connection; what it leaves keeps the promises, and the next job goes on."""
    contents, reported = _prepared(scenario, atomic_rename=atomic_rename)
    checkpointer = fs.Checkpointer(
        connection.store(contents, atomic_rename=atomic_rename), keep=scenario.keep, on_error="continue",
        **OPTIONS,  # type: ignore[arg-type]
    )
    with suppress(StorageError, StepExistsError):
        scenario.act(checkpointer, reported)
    if connection.is_cut and not connection.for_ever and reported.begun:
        with suppress(StepExistsError):  # the same step again, in the same process
            _save(checkpointer, reported, reported.begun[-1])
    with suppress(StorageError):
        checkpointer.close()
    _check(contents, reported, atomic_rename=atomic_rename, keep=scenario.keep)


def _check(contents: SharedMemoryDirectory, events: Told, *, atomic_rename: bool, keep: int | None = None) -> None:
    store = MemoryStore(contents, location="store", atomic_rename=atomic_rename)
    _check_steps(store, events)
    step = 1 + max([*events.begun, 0])
    with fs.Checkpointer(store, keep=keep, **OPTIONS) as after:  # type: ignore[arg-type]
        _save(after, events, step)
        after.wait()
        state = _state(0)
        assert after.load(state).step == step
    _check_steps(store, events)
    for name in store.names():
        entry = parse_entry(name)
        assert entry is None or entry.leftover is None, f"the next writer has not swept {name}"
        if entry is not None and entry.kind is EntryKind.STEP:
            assert store.exists(f"{name}/manifest.json"), f"the next writer has not swept {name}"


def _check_steps(store: MemoryStore, events: Told) -> None:
    steps = catalog.steps(store)
    assert set(steps) <= set(events.begun), f"{steps} were not all begun: {events.begun}"
    for step in steps:
        checkpoint = fs.open(store, step=step)
        verified = checkpoint.inspect()
        assert verified.sound, f"step {step} is not sound: {verified.findings}"
        assert not verified.extra, f"step {step} holds {verified.extra}"
        assert (checkpoint.read("weights") == step).all(), f"step {step} is a mixture"
    if events.committed:
        least = max(events.committed) if events.rewinding is None else events.rewinding
        assert steps, "nothing is left"
        assert steps[-1] >= least, f"step {least} was committed, and the newest is {steps[-1]}"


@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
@pytest.mark.parametrize("mode", ["before", "after", "once"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_that_is_cut_off_leaves_the_previous_step_or_the_new_one(
    name: str, mode: str, atomic_rename: bool
) -> None:
    scenario = SCENARIOS[name]
    whole = Connection()
    _play(scenario, whole, atomic_rename=atomic_rename)
    assert whole.count > 5
    for index in range(whole.count):
        connection = Connection(index, after=mode != "before", for_ever=mode != "once")
        try:
            _play(scenario, connection, atomic_rename=atomic_rename)
        except AssertionError as error:
            raise AssertionError(f"cut {mode} change {index} of {name}: {error}") from error
        assert connection.is_cut


# Mutants: the simulation can fail.


def _is_found_out(scenario: str, mode: str = "before") -> bool:
    try:
        test_a_job_that_is_cut_off_leaves_the_previous_step_or_the_new_one(scenario, mode, False)
    except (AssertionError, FlowstoneError):
        return True
    return False


def test_a_removal_that_leaves_the_manifest_for_last_is_found_out() -> None:
    last = lambda names: sorted(names, key=lambda name: name == MANIFEST_NAME)  # noqa: E731
    with mock.patch.object(removal, "_manifest_first", last):
        assert _is_found_out("rewind")


def test_leftovers_that_are_not_swept_are_found_out() -> None:
    with mock.patch.object(catalog, "_leftover_reason", return_value=""):
        assert _is_found_out("second_save")


# Several ranks


def _group(
    contents: SharedMemoryDirectory, connection: Connection, ranks: int, *, atomic_rename: bool
) -> list[fs.Checkpointer]:
    """A Checkpointer of each rank of a job, on a thread's worth of store each."""
    board = HashStore()
    group = []
    for rank in range(ranks):
        with mock.patch.object(rank_group, "this_job", lambda rank=rank: RankJob(rank, ranks, board)):
            group.append(fs.Checkpointer(
                connection.store(contents, atomic_rename=atomic_rename), keep=2, on_error="continue", deadline_s=20.0,
                **OPTIONS,  # type: ignore[arg-type]
            ))
    return group


def _each(group: list[fs.Checkpointer], act: Callable[[int, fs.Checkpointer], object]) -> list[BaseException | None]:
    """What all ranks do at once; what each of them raised."""
    outcomes: list[BaseException | None] = [None] * len(group)

    def run(rank: int) -> None:
        try:
            act(rank, group[rank])
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _part(step: int, rank: int, ranks: int) -> Mapping[str, object]:
    """Rows of one tensor, a replica of another."""
    rows = ELEMENTS // ranks
    shard = fs.Shard(torch.full((rows,), float(step)), (ELEMENTS,), (rank * rows,))
    return {"weights": shard, "step": step, "bias": torch.full((50,), float(step))}


@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
def test_several_ranks_save_and_load_in_one_process(atomic_rename: bool) -> None:
    contents, ranks = SharedMemoryDirectory(), 3
    group = _group(contents, Connection(), ranks, atomic_rename=atomic_rename)

    def act(rank: int, checkpointer: fs.Checkpointer) -> None:
        for step in (1, 2, 3):
            checkpointer.save(step, _part(step, rank, ranks), fence="manual").committed.result()
        state = _part(0, rank, ranks)
        assert checkpointer.load(state).step == 3
        assert (state["weights"].tensor == 3).all()  # type: ignore[attr-defined]
        checkpointer.close()

    assert _each(group, act) == [None] * ranks
    store = MemoryStore(contents, location="store", atomic_rename=atomic_rename)
    assert catalog.steps(store) == (2, 3)
    assert fs.open(store).manifest.ranks == ranks
    assert fs.open(store).verify().sound


@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
@pytest.mark.parametrize("position", [2, 5, 8, 9, 10, 11, 12, 13])
def test_ranks_that_are_cut_off_leave_the_previous_step_or_the_new_one(position: int, atomic_rename: bool) -> None:
    contents, ranks, events = SharedMemoryDirectory(), 2, Told()
    group = _group(contents, Connection(position, after=bool(position % 2)), ranks, atomic_rename=atomic_rename)

    def act(rank: int, checkpointer: fs.Checkpointer) -> None:
        for step in (1, 2):
            if rank == 0:
                events.begun.append(step)
            checkpointer.save(step, _part(step, rank, ranks), fence="manual").committed.result()
            if rank == 0:
                events.committed.append(step)

    outcomes = _each(group, act)
    assert all(error is None or isinstance(error, FlowstoneError) for error in outcomes)
    for checkpointer in reversed(group):
        with suppress(FlowstoneError):
            checkpointer.close()
    _check(contents, events, atomic_rename=atomic_rename)
