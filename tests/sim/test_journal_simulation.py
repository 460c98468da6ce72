"""Stop, or fail, at every change of jobs that save every step: steps reported as durable load bit for bit.

After a failed change the same job continues to its end: the failure costs one step, or one group of steps, and one full
save. The job waits for each step or group, so that the numbers of changes do not depend on chance. An ordinary run has
every third loss of power, every fifth stop and error, and fewer of long scenarios. `make soak` has all.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from sim_disk import Disk, PowerLoss, Unsynced
from sim_world import STORE, engine, gathered

from flowstone import Checkpointer, Event, FlowstoneError, NotJournaled, Save
from flowstone.store.local import LocalStore
from flowstone.store.system import System
from forge import tensor_bytes

STEPS = 8
_SEEDS = {"power": lambda index: (index % 3, 3 + index), "kill": lambda index: (index,), "error": lambda i: (i % 2,)}


class Training:
    """A linear layer of 80 KiB (its gradient lies in a slot of its own) that learns by momentum, step by step alike."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(128, 160)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.progress = {"step": 0}

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(2, 128, generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.progress = {"step": step}

    def bits(self) -> bytes:
        slots = [self.optimizer.state[parameter].get("momentum_buffer") for parameter in self.model.parameters()]
        tensors = [*self.model.parameters(), *(slot for slot in slots if slot is not None)]
        return tensor_bytes(*tensors)


def undisturbed() -> dict[int, bytes]:
    """What the state is at each step."""
    training, result = Training(), {}
    for step in range(1, STEPS + 1):
        training.train_step(step)
        result[step] = training.bits()
    return result


@pytest.fixture(scope="module")
def reference() -> dict[int, bytes]:
    return undisturbed()


@dataclass
class Promised:
    """`durable`: the newest step that was reported durable, and not given up since; `begun`: the newest one begun.

    lowest     a rewind that was begun may have gone so far
    goes_on    after a failure; `failed`: steps that did
    unplanned  whole saves because the journal did not lead on
    """

    durable: int = 0
    begun: int = 0
    lowest: int = 0
    goes_on: bool = False
    failed: list[int] = field(default_factory=list)
    unplanned: int = 0


@dataclass(frozen=True)
class Scenario:
    """`every`: an ordinary run has one of so many changes."""

    name: str
    act: Callable[[Checkpointer, Promised], None]
    before: tuple[int, ...] = ()
    options: dict[str, object] = field(default_factory=dict)
    every: int = 1
    lose_max: int = 1  # steps that one failure may cost


def _go_on(checkpointer: Checkpointer, promised: Promised, *, to: int, group: int = 1) -> Training:
    """Load, and train. `group`: so many steps are saved before the first of them is waited for."""
    training, done = Training(), 0
    if checkpointer.latest() is not None:
        done = checkpointer.load(training.state()).step
    firsts = (*range(done + 1, min(done + 2, to + 1)), *range(done + 2, to + 1, group))
    for first in firsts:
        steps = range(first, 1 + (min(first + group - 1, to) if first > done + 1 else first))  # that begins the journal
        saves: list[Save] = []
        failures: list[FlowstoneError] = []
        with gathered(checkpointer) if len(steps) > 1 else nullcontext():
            for step in steps:
                training.train_step(step)
                promised.begun = max(promised.begun, step)
                with _told(failures, promised, step):
                    saves.append(checkpointer.save(step, training.state()))
        for save in saves:
            with _told(failures, promised, save.step):
                save.committed.result()
                promised.durable = save.step
        with _told(failures, promised, steps[-1]):
            checkpointer.wait()
        if failures and not promised.goes_on:
            raise failures[0]
    return training


@contextmanager
def _told(failures: list[FlowstoneError], promised: Promised, step: int) -> Iterator[None]:
    """A step may fail here, and training goes on."""
    try:
        yield
    except FlowstoneError as error:
        failures.append(error)
        promised.failed.append(step)


def _trains(to: int, group: int = 1) -> Callable[[Checkpointer, Promised], None]:
    return lambda checkpointer, promised: _go_on(checkpointer, promised, to=to, group=group) and None


def _rewinds(checkpointer: Checkpointer, promised: Promised) -> None:
    promised.lowest = promised.durable = 3
    checkpointer.rewind(3)
    promised.begun, promised.lowest = 3, 0
    _go_on(checkpointer, promised, to=5)


SCENARIOS = (
    Scenario("first", _trains(4)),
    Scenario("goes_on", _trains(5), (3,)),
    Scenario("lags", _trains(8, 3), (3,), {"lag_steps": 3, "budget_bytes": 64 << 20}, lose_max=3),
    Scenario("whole_ones_between", _trains(6), (3,), {"recovery_s": 1e-9, "keep": 1}, every=4),
    Scenario("rewind", _rewinds, (5,)),
)


def _checkpointer(sandbox: Path, system: System, number: int = 0, **options: object) -> Checkpointer:
    options = {"every_step": True, "budget_bytes": 4 << 20, **options}
    store = LocalStore(sandbox / STORE, engine(number), system)
    return Checkpointer(store, **options)  # type: ignore[arg-type]


def _play(scenario: Scenario, disk: Disk, number: int) -> Promised:
    before = max(scenario.before, default=0)
    promised = Promised(before, before, goes_on=disk.fail_at is not None)

    def told(event: Event) -> None:
        promised.unplanned += isinstance(event, NotJournaled)

    checkpointer = _checkpointer(disk.sandbox, disk, number, on_event=told, **scenario.options)
    with suppress(FlowstoneError, PowerLoss):
        scenario.act(checkpointer, promised)
    with suppress(FlowstoneError, PowerLoss):
        checkpointer.close()
    return promised


def _check(sandbox: Path, promised: Promised, reference: dict[int, bytes], number: int) -> None:
    """What loads is a step that may be there, bit for bit; and training goes on from it to the same end."""
    training = Training()
    with _checkpointer(sandbox, Unsynced(), number) as checkpointer:
        result = 0
        if checkpointer.latest() is not None:
            result = checkpointer.load(training.state()).step
        assert promised.durable <= result <= max(promised.begun, STEPS if promised.lowest else 0), (
            f"loads step {result}; {promised}"
        )
        assert result == 0 or training.bits() == reference[result], f"step {result} is not what it was"
        assert training.progress["step"] == result
    with _checkpointer(sandbox, Unsynced(), number) as checkpointer:
        _go_on(checkpointer, promised, to=STEPS)
    training = Training()
    with _checkpointer(sandbox, Unsynced(), number) as checkpointer:
        assert checkpointer.load(training.state()).step == STEPS
    assert training.bits() == reference[STEPS]
    left = [name for name in LocalStore(sandbox / STORE).names() if name.startswith((".saving", ".deleting"))]
    assert not left, f"not swept: {left}"


def _check_end(promised: Promised, scenario: Scenario, position: int) -> None:
    """Of a job that went on after one failure: how much that has cost it."""
    lost = {*promised.failed}
    assert len(lost) <= scenario.lose_max, f"error at change {position}: steps {sorted(lost)} have failed"
    assert promised.durable >= promised.begun - scenario.lose_max, f"error at change {position}: {promised}"
    assert promised.unplanned <= 1, f"error at change {position}: {promised.unplanned} whole saves follow"


def _cases(base: Path, scratch: Path, scenario: Scenario, changes: slice) -> Iterator[tuple[int, Path]]:
    """These of the scenario's changes, and for each a copy of the base to play it in."""
    shutil.copytree(base, scratch / "count")
    disk = Disk(scratch / "count")
    _play(scenario, disk, 0)
    for index in range(len(disk.changes))[changes]:
        sandbox = scratch / f"play{index}"
        shutil.copytree(base, sandbox)
        yield index, sandbox
        shutil.rmtree(sandbox)


def campaign(scenario: Scenario, mode: str, scratch: Path, reference: dict[int, bytes], changes: slice) -> None:
    """Play the scenario up to each of these changes, and look what there is."""
    base = scratch / "base"
    base.mkdir()
    for to in scenario.before:
        with _checkpointer(base, Unsynced()) as earlier:
            _go_on(earlier, Promised(), to=to)
    for offset, sandbox in _cases(base, scratch, scenario, changes):
        disk = Disk(sandbox)
        if mode == "error":
            disk.fail_at, disk.errno = offset, (errno.EIO, errno.ENOSPC)[offset % 2]
        else:
            disk.stop_at = offset
        promised = _play(scenario, disk, offset)
        if mode == "error" and scenario.act is not _rewinds:
            _check_end(promised, scenario, offset)
        for seed in _SEEDS[mode](offset):
            after = sandbox
            if mode == "power":
                after = scratch / f"after{offset}-{seed}"
                disk.after_power_loss(after, seed)
            elif mode == "kill":
                disk.restart(seed)
            try:
                _check(after, Promised(promised.durable, promised.begun, promised.lowest), reference, offset)
            except Exception as error:
                trace = "\n".join(map(str, disk.changes[: offset + 1]))
                raise AssertionError(f"{mode} at change {offset}, seed {seed}: {error}\n{trace}") from error
            if mode == "power":
                shutil.rmtree(after)


def played(scenario: Scenario, mode: str) -> slice:
    """The changes of an ordinary run."""
    every = scenario.every * (3 if mode == "power" else 5)
    return slice(list(_SEEDS).index(mode) % every, None, every)


EACH = pytest.mark.parametrize("mode", list(_SEEDS))
ALL = pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])


@EACH
@ALL
def test_a_step_that_was_durable_is_replayed_after_a_crash_at_a_change(
    scenario: Scenario, mode: str, scratch: Path, reference: dict[int, bytes]
) -> None:
    campaign(scenario, mode, scratch, reference, played(scenario, mode))


@pytest.mark.soak
@EACH
@ALL
def test_a_step_that_was_durable_is_replayed_after_a_crash_at_any_change(
    scenario: Scenario, mode: str, scratch: Path, reference: dict[int, bytes]
) -> None:
    campaign(scenario, mode, scratch, reference, slice(None))
