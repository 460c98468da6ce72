"""Two ranks that save every step, on a disk that fails or ends at a change, or with a rank that stops before it.

A stopped rank stays stopped until the other counts it as dead. Then both load the same step, bit for bit, and none
before the last step that was reported as durable to either of them.

An ordinary run has some of the changes, `make soak` all of them.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from sim_disk import Disk, PowerLoss
from sim_group import simulated_time
from sim_turns import Freeze, RankDisk, RankStore, Turns
from sim_world import STORE, WatchedStore, engine, gathered

import flowstone as fs
from flowstone import FlowstoneError, _native
from flowstone.ranks import Job as RankJob
from flowstone.ranks import group as rank_group
from forge import tensor_bytes

STEPS, RANKS = 8, 2
MODES = ("power", "kill", "error", "freeze")
_SEEDING = threading.Lock()


class Training:
    """Two layers of 80 KiB, equal on both ranks, by momentum, each logged by one; and a number of each rank."""

    def __init__(self, rank: int) -> None:
        with _SEEDING:  # ranks are threads here, and share torch's generator
            torch.manual_seed(3)
            self.model = torch.nn.Sequential(torch.nn.Linear(128, 160), torch.nn.Linear(160, 128))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.own = fs.PerRank({"step": 0, "rank": rank})

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "own": self.own}

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(2, 128, generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.own.value["step"] = step  # type: ignore[index]

    def bits(self) -> int:
        slots = [self.optimizer.state[parameter].get("momentum_buffer") for parameter in self.model.parameters()]
        tensors = [*self.model.parameters(), *(slot for slot in slots if slot is not None)]
        return _native.xxh3_64(tensor_bytes(*tensors))


def undisturbed() -> dict[int, int]:
    """What the state is at each step."""
    training, result = Training(0), {}
    for step in range(1, STEPS + 1):
        training.train_step(step)
        result[step] = training.bits()
    return result


@pytest.fixture(scope="module")
def reference() -> dict[int, int]:
    return undisturbed()


@dataclass
class Promised:
    """The newest step that a rank was told is durable, and the newest one that any has begun."""

    durable: int = 0
    begun: int = 0


class Ranks:
    """A job of two ranks on one disk."""

    def __init__(self, disk: Disk, number: int, freeze: Freeze | None, **options: object) -> None:
        self.turns, values = Turns(RANKS, disk, number=number, freeze=freeze), dict[str, bytes]()
        self.stores: list[WatchedStore] = []
        self.checkpointers: list[fs.Checkpointer] = []
        for rank in range(RANKS):
            seen = RankStore(values, self.turns, rank)
            job = RankJob(rank, RANKS, seen)
            with mock.patch.object(rank_group, "this_job", lambda job=job: job):
                self.stores.append(WatchedStore(disk.sandbox / STORE, engine(number), RankDisk(disk, self.turns, rank)))
                options = {"budget_bytes": 4 << 20, **options}
                self.checkpointers.append(
                    fs.Checkpointer(self.stores[-1], every_step=True, deadline_s=60.0, **options)  # type: ignore[arg-type]
                )

    def each(self, act: Callable[[int, fs.Checkpointer], object]) -> list[object]:
        """What all ranks do: for each what came of it, or what it raised."""
        outcomes: list[object] = [None] * RANKS

        def run(rank: int) -> None:
            try:
                outcomes[rank] = act(rank, self.checkpointers[rank])
            except BaseException as error:
                outcomes[rank] = error
            finally:
                self.turns.done(rank)

        self.turns.begin()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def proceed(self, rank: int, checkpointer: fs.Checkpointer, promised: Promised, to: int, group: int = 1) -> int:
        """Load what there is, and train. Each step is waited for, so that the changes' numbers do not depend on chance;
        or the first, which begins a journal, and then each `group` of them.

        returns  the step that was loaded
        """
        training, done = Training(rank), 0
        if checkpointer.latest() is not None:
            done = checkpointer.load(training.state()).step
        step = done
        while step < to:
            saves, stop = list[fs.Save](), min(step + group, to) if step > done else step + 1
            with gathered(checkpointer) if stop > step + 1 else nullcontext():
                while step < stop:
                    step += 1
                    training.train_step(step)
                    promised.begun = max(promised.begun, step)
                    saves.append(checkpointer.save(step, training.state()))
            for save in saves:
                while not save.committed.done():
                    self.turns.check(rank)  # a rank without power completes no future
                    wait_futures([save.committed], timeout=0.01)
                save.committed.result()
                promised.durable = max(promised.durable, save.step)
            threads = checkpointer._saves._saves._threads
            threads.writer.submit(int).result()
            threads.await_removals()
            self.turns.check(rank)
        return done

    def end(self) -> None:
        self.turns.over()
        for checkpointer, store in zip(reversed(self.checkpointers), reversed(self.stores), strict=True):
            for save in checkpointer._saves.in_flight:
                for future in (save.captured, save.committed):
                    if not future.done():
                        future.set_exception(PowerLoss())
            store.abandon()
            with suppress(FlowstoneError, PowerLoss):
                checkpointer.close()


@contextmanager
def ranks(disk: Disk, number: int, freeze: Freeze | None = None, **options: object) -> Iterator[Ranks]:
    with simulated_time(lambda: job.turns):
        job = Ranks(disk, number, freeze, **options)
        try:
            yield job
        finally:
            job.end()


@dataclass(frozen=True)
class Scenario:
    """Ranks that have saved `before` steps go on to step `to`.

    back     the step to which they rewind first; 0: they do not
    group    so many steps are saved before the first of them is waited for
    options  of their Checkpointers
    every    an ordinary run has one of so many changes
    """

    name: str
    before: int
    every: int
    back: int = 0
    to: int = 5
    group: int = 1
    options: Mapping[str, object] = field(default_factory=dict)


SCENARIOS = (
    Scenario("goes_on", 3, 10),
    Scenario("lags", 3, 10, to=7, group=3, options={"lag_steps": 3, "budget_bytes": 64 << 20}),
    Scenario("whole_ones_between", 3, 36, options={"recovery_s": 1e-9, "keep": 1}),
    Scenario("rewind", 5, 36, back=3),
)


def play(
    disk: Disk, number: int, promised: Promised, to: int, *, back: int = 0, group: int = 1,
    freeze: Freeze | None = None, options: Mapping[str, object] | None = None,
) -> None:
    """A job that may end early."""

    def act(rank: int, checkpointer: fs.Checkpointer) -> int:
        if back:
            checkpointer.rewind(back)
        return job.proceed(rank, checkpointer, promised, to, group)

    with ranks(disk, number, freeze, **options or {}) as job:
        for outcome in job.each(act):
            if isinstance(outcome, BaseException) and not isinstance(outcome, (FlowstoneError, PowerLoss)):
                raise outcome


def check(sandbox: Path, promised: Promised, reference: dict[int, int], number: int) -> None:
    """Both ranks load the same step, which may be there, bit for bit; and go on from it to the same end."""

    def loads(rank: int, checkpointer: fs.Checkpointer) -> tuple[int, int | None, object]:
        training = Training(rank)
        if checkpointer.latest() is None:
            return 0, None, 0
        step = checkpointer.load(training.state()).step
        return step, training.bits(), training.own.value["step"]  # type: ignore[index]

    with ranks(Disk(sandbox), number) as job:
        result = job.each(loads)
    assert result[0] == result[1], f"ranks load different things: {result}"
    step, bits, own = result[0]  # type: ignore[misc]
    assert promised.durable <= step <= promised.begun, f"loads step {step}; {promised}"
    assert (bits, own) == (reference.get(step), step), f"step {step} is not what it was"
    play(Disk(sandbox), number, Promised(), STEPS)
    with ranks(Disk(sandbox), number) as job:
        result = job.each(loads)
    assert result == [(STEPS, reference[STEPS], STEPS)] * 2
    left = [name for name in WatchedStore(sandbox / STORE, engine(0), Disk(sandbox)).names() if name[0] == "."]
    assert not [name for name in left if name.startswith((".saving", ".deleting"))], f"not swept: {left}"


def campaign(
    mode: str, scratch: Path, reference: dict[int, int], scenario: Scenario = SCENARIOS[0], *, every: int = 0
) -> None:
    """Something happens at each `every`-th of the changes of two ranks; 0: as in an ordinary run."""
    base, every = scratch / "base", every or scenario.every
    base.mkdir()
    play(Disk(base), 0, Promised(), scenario.before)
    shutil.copytree(base, scratch / "count")
    disk = Disk(scratch / "count")
    how = {"back": scenario.back, "group": scenario.group, "options": scenario.options}
    play(disk, 0, promised := Promised(), scenario.to, **how)  # type: ignore[arg-type]
    assert promised.durable == scenario.to
    assert sum("journal-" in change.path for change in disk.changes) > 20
    for at in range(MODES.index(mode) % every, len(disk.changes), every):
        sandbox = scratch / f"play{at}"
        shutil.copytree(base, sandbox)
        promised, hurt = Promised(scenario.back or scenario.before, scenario.before), Disk(sandbox)
        if mode == "error":
            hurt.fail_at, hurt.errno = at, (errno.EIO, errno.ENOSPC)[at % 2]
        elif mode != "freeze":
            hurt.stop_at, hurt.spares_others = at, mode == "kill"
        play(hurt, at, promised, scenario.to, freeze=Freeze(at) if mode == "freeze" else None, **how)  # type: ignore[arg-type]
        for seed in (at % 3, 3 + at) if mode == "power" else (at,):
            after = sandbox
            if mode == "power":
                after = scratch / f"after{at}-{seed}"
                hurt.after_power_loss(after, seed)
            elif mode == "kill":
                hurt.restart(seed)
            try:
                check(after, promised, reference, at)
            except Exception as error:
                trace = "\n".join(map(str, hurt.changes[: at + 1]))
                raise AssertionError(f"{mode} at change {at}, seed {seed}: {error}\n{trace}") from error
        shutil.rmtree(sandbox)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_both_ranks_load_the_newest_step_that_both_have_after_a_crash(
    scenario: Scenario, mode: str, scratch: Path, reference: dict[int, int]
) -> None:
    campaign(mode, scratch, reference, scenario)


def test_replicas_that_rewind_into_a_journal_go_on_from_there(scratch: Path, reference: dict[int, int]) -> None:
    """Each logs a part of what both have, so that the journal names an owner of each gradient."""
    base = scratch / "base"
    base.mkdir()
    play(Disk(base), 0, Promised(), 4)

    def back(rank: int, checkpointer: fs.Checkpointer) -> int:
        checkpointer.load(Training(rank).state(), step=3)
        checkpointer.rewind(3)
        latest = checkpointer.latest()
        return -1 if latest is None else latest.journal_step

    with ranks(Disk(base), 0) as job:
        assert job.each(back) == [3, 3]
    check(base, Promised(3, 3), reference, 1)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_both_ranks_load_the_newest_step_that_both_have_after_a_crash_at_any_change(
    scenario: Scenario, mode: str, scratch: Path, reference: dict[int, int]
) -> None:
    campaign(mode, scratch, reference, scenario, every=1)
