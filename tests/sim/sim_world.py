"""A job that saves into the simulated disk, the promises to its user, and their check."""

from __future__ import annotations

import errno
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from sim_disk import Disk, PowerLoss, Unsynced
from sim_turns import RankDisk

from flowstone import Checkpointer, Keep, NoCheckpointError, RankError, Save, StepExistsError, _native
from flowstone.commit import catalog, retention
from flowstone.commit.entries import SUPERSEDED, step_directory
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, StorageError
from flowstone.events.phases import Committed, Event
from flowstone.reading.checkpoint import Checkpoint
from flowstone.save.pending_plan import PendingPlan
from flowstone.store.base import Receipt
from flowstone.store.local import LocalStore
from flowstone.store.system import System

RESTING = 50  # the first step of a state with tensors that rest
DRIFTING = 70  # and of one with floats that change a little, their working copies, and copies that are equal to them
STORE = Path("runs/gpt")  # in the sandbox; neither directory is there before the first save
_MIB = 1 << 20
_URING = _native.has_io_uring()


def engine(number: int, **coding: Any) -> EngineOptions:
    """Small, so that a thousand of them start quickly; backends, and O_DIRECT, take turns."""
    backend = "io_uring" if number % 2 == 1 and _URING else "posix"
    direct = "auto" if number % 4 >= 2 else "off"
    return EngineOptions(backend=backend, direct=direct, queue_depth=2, request_bytes=2 * _MIB, workers=1, **coding)


def state(tag: str) -> dict[str, dict[str, object]]:
    """A state like no other tag's: one large tensor with a slot of its own, packed ones, objects.

    From step RESTING on with tensors that rest: one that never changes, and one that changes in its second chunk.
    """
    chance = torch.Generator().manual_seed(zlib.crc32(tag.encode()))
    changing = torch.randint(0, 256, (5_000,), generator=chance, dtype=torch.uint8)
    number, letter = tag[:-1], tag[-1:]
    rests = number.isdigit() and not letter.isdigit() and int(number) >= RESTING
    drifts = rests and int(number) >= DRIFTING
    return (_resting(changing) if rests else {}) | (_drifting(tag) if drifts else {}) | {
        "model": {
            "wide": torch.randn(90, 257, generator=chance),
            "narrow": torch.randn(33, generator=chance).to(torch.bfloat16),
            "mask": torch.randint(0, 2, (7, 3), generator=chance).bool(),
            "none": torch.zeros(0, 4),
        },
        "optimizer": {"moment": torch.randn(33, 5, generator=chance, dtype=torch.float64).t()},
        "progress": {"tag": tag, "tokens": zlib.crc32(tag.encode()) << 40, "seen": [tag, None, b"\0" * len(tag)]},
    }


def _resting(changing: torch.Tensor) -> dict[str, dict[str, object]]:
    partly = torch.cat([torch.zeros(_MIB, dtype=torch.uint8), changing])
    return {"resting": {"whole": torch.arange(20_000), "partly": partly}}


def _drifting(tag: str) -> dict[str, dict[str, object]]:
    chance = torch.Generator().manual_seed(1)
    master = torch.randn(300, 200, generator=chance) * 0.02 * (1 + 1e-5 * (zlib.crc32(tag.encode()) % 100))
    still = torch.randn(270_000, generator=chance)
    return {
        "master": {"weight": master, "still": still},
        "working": {"weight": master.bfloat16(), "still": still.bfloat16()}, "average": {"weight": master.clone()},
    }


@functools.lru_cache(maxsize=16)
def kept(tag: str) -> dict[str, dict[str, object]]:
    """`state(tag)`, to be saved, and not to be changed: thousands of cases ask for the same few."""
    return state(tag)


@functools.lru_cache(maxsize=16)
def expected(tag: str) -> dict[str, dict[str, object]]:
    """The same, which no save was given: one that changes what it saves is found out."""
    return state(tag)


def same(actual: object, expected: object) -> bool:
    """Whether two states are equal, to the bit."""
    if isinstance(expected, dict):
        return isinstance(actual, dict) and actual.keys() == expected.keys() and all(
            same(actual[key], expected[key]) for key in expected
        )
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return False
        return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    return type(actual) is type(expected) and actual == expected


@contextmanager
def gathered(checkpointer: Checkpointer) -> Iterator[None]:
    """The journal's thread begins with what is saved inside once all of it waits."""
    thread = checkpointer._saves._journaling._thread  # type: ignore[union-attr]
    may_begin = threading.Event()
    if thread is not None:
        thread.submit(may_begin.wait, 60.0)
    try:
        yield
    finally:
        may_begin.set()


@dataclass
class Oracle:
    """What the user of a store may rely on, told only by what the public face has reported.

    must     steps that were reported durable and not given up since, each with its tag
    may      all that was ever begun and not given up: the tags that a step may have
    newest   what may be the newest: (step, tag), or None for no checkpoint at all
    damaged  tags of checkpoints that a test has damaged
    """

    must: dict[int, str] = field(default_factory=dict)
    may: dict[int, set[str]] = field(default_factory=dict)
    newest: set[tuple[int, str] | None] = field(default_factory=lambda: {None})
    damaged: set[str] = field(default_factory=set)

    def begun(self, step: int, tag: str) -> None:
        self.may.setdefault(step, set()).add(tag)
        self.newest.add((step, tag))

    def committed(self, step: int, tag: str, verdicts: Sequence[retention.RetentionDecision]) -> None:
        self.must[step] = tag
        later = {item for item in self.newest if item is not None and item[0] > step}
        self.newest = {(step, tag), *later}
        for verdict in verdicts:
            if not verdict.keep:
                self.must.pop(verdict.step, None)

    def rewinding(self, target: int) -> None:
        self.newest |= {(step, tag) for step, tag in self.must.items() if step >= target}
        self.must = {step: tag for step, tag in self.must.items() if step <= target}

    def rewound(self, target: int) -> None:
        self.may = {step: tags for step, tags in self.may.items() if step <= target}
        self.newest = {(target, self.must[target])}

    def copy(self) -> Oracle:
        may = {step: set(tags) for step, tags in self.may.items()}
        return Oracle(dict(self.must), may, set(self.newest), set(self.damaged))

    def frozen(self) -> object:
        """Equal for equal ledgers, and can be a key."""
        may = frozenset((step, frozenset(tags)) for step, tags in self.may.items())
        return frozenset(self.must.items()), may, frozenset(self.newest), frozenset(self.damaged)


class Watching:
    """Knows the writes whose receipts were never taken; beside a store that writes."""

    _under_way: list[Any]

    def write(self, *arguments: Any, **more: Any) -> Any:
        writing = super().write(*arguments, **more)  # type: ignore[misc]
        if not hasattr(self, "_under_way"):
            self._under_way = []
        self._under_way.append(writing)
        receipt = writing.receipt

        def noted() -> Receipt:
            self._under_way.remove(writing)
            return receipt()

        writing.receipt = noted
        return writing

    def abandon(self) -> None:
        """The processes that began them are dead: wait for the engine, which is not."""
        for writing in getattr(self, "_under_way", ()):
            writing.stop()
        self._under_way = []


class WatchedStore(Watching, LocalStore):
    pass


class Alternation:
    """Lets the caller of a rank go on in the middle of what its writer's thread does; one of them acts at a time.

    change  before which of the changes that the writer makes; 0: before it does anything
    """

    def __init__(self, change: int) -> None:
        self._left = change
        self.to_caller, self._to_writer = threading.Event(), threading.Event()

    def before_change(self) -> None:
        if threading.current_thread().name.startswith("flowstone-commit"):
            self._left -= 1
            if self._left == 0:
                self.pause()

    def pause(self) -> None:
        """On the writer's thread."""
        self.to_caller.set()
        self._to_writer.wait()

    def proceed(self) -> None:
        self._to_writer.set()


class Job:
    """A process that saves, as far as one can be had inside a test.

    by_wait  learn of a failed save from the next call instead of from its future
    again    an earlier process was stopped at the same: steps that it left may be there
    part     what this process has of a state
    coding   how the engine encodes
    """

    def __init__(
        self, sandbox: Path, system: System, oracle: Oracle, *, keep: Keep | None = None, number: int = 0,
        attempt: str = "a", by_wait: bool = False, again: bool = False,
        part: Callable[[dict[str, dict[str, object]]], Mapping[str, object]] = dict,
        coding: Mapping[str, object] | None = None, **options: object,
    ) -> None:
        self.store = WatchedStore(sandbox / STORE, engine(number, **coding or {}), system)
        self.system, self.oracle, self.keep, self.by_wait = system, oracle, keep, by_wait
        self.attempt, self.again, self._part = attempt, again, part
        self.events: list[Event] = []
        self.fence: Literal["auto", "manual"] = "auto"
        self._before_wait: Callable[[], None] = lambda: None
        self._tags: dict[int, str] = {}
        self.checkpointer = Checkpointer(
            self.store, keep=keep, budget_bytes=4 * _MIB, engine=self.store.options, on_event=self._hear,
            **options,  # type: ignore[arg-type]
        )
        self._sweep_first()
        self._wait_with_power()

    def _wait_with_power(self) -> None:
        """A `save` that waits for its capture lets the thread go on that captures, and ends where the power does."""
        def wait(unplanned: PendingPlan, short_wait: object) -> None:
            self._before_wait()
            while not unplanned.released.wait(0.01):
                self._check_power()

        self.checkpointer._saves._ownership.await_release = wait  # type: ignore[method-assign]

    def _sweep_first(self) -> None:
        """What a dead job left goes before the first save goes on: the changes' numbers must not depend on chance."""
        writer, threads = self.checkpointer._store_writer, self.checkpointer._saves._threads
        sweep = writer.sweep

        def swept() -> None:
            sweep()
            threads.await_removals()

        writer.sweep = swept  # type: ignore[method-assign]

    def save(self, step: int) -> None:
        """Save and wait until nothing moves any more. Raises what the save did."""
        if self.again and self._whole(step):
            self.refused(step)
        else:
            self._save(step)

    def save_both(self, first: int, second: int, change: int) -> None:
        """The second begins before the first is committed. Raises the first of what goes wrong.

        change  that the first would make next, in the background; see Alternation
        """
        assert isinstance(self.system, RankDisk)
        alternation = Alternation(change)
        saves: list[Save] = []
        errors: list[FlowstoneError] = []
        if change == 0:
            self.checkpointer._saves._threads.writer.submit(alternation.pause)
        self.system.before_change, self._before_wait = alternation.before_change, alternation.proceed
        try:
            for step in (first, second):
                try:
                    saves.append(self._begin(step))
                except FlowstoneError as error:
                    errors.append(error)
                idle = self.checkpointer._saves._threads.writer.submit(int)
                while not (alternation.to_caller.is_set() or idle.done()):
                    self._check_power()
                    wait_futures([idle], timeout=0.01)
        finally:
            self.system.before_change = self._before_wait = lambda: None
            alternation.proceed()
        for save in saves:
            self._until_ended(save)
            try:
                save.committed.result()
            except FlowstoneError as error:
                errors.append(error)
        self.settle()
        for error in errors:
            raise error

    def _begin(self, step: int) -> Save:
        tag = self._tags[step] = f"{step}{self.attempt}"
        self.oracle.begun(step, tag)
        return self.checkpointer.save(step, self._part(kept(tag)), fence=self.fence)

    def _save(self, step: int) -> None:
        save = self._begin(step)
        self._until_ended(save)
        if self.by_wait:
            self.checkpointer.wait()
        else:
            save.committed.result()
        self.settle()

    def save_twice(self, step: int) -> None:
        """At once again, whatever has become of the first try. Raises what the second does."""
        with suppress(FlowstoneError):
            self.save(step)
        self.attempt += "+"
        try:
            self.save(step) if self.again else self._save(step)
        except (RankError, StorageError) as error:
            if error.errno == errno.EEXIST:
                raise AssertionError("the second try has met the files of the first") from error
            raise

    def refused(self, step: int) -> None:
        """A step that is there cannot be saved."""
        try:
            save = self.checkpointer.save(step, self._part(kept("refused")))
        except StepExistsError:
            return
        self._until_ended(save)
        failure = save.committed.exception()
        if isinstance(failure, RankError) and failure.kind == "StepExistsError":
            return  # rank 0 alone looks what there is
        raise AssertionError(f"step {step} could be saved over")

    def rewind(self, step: int) -> None:
        self.oracle.rewinding(step)
        self.checkpointer.rewind(step)
        self.oracle.rewound(step)

    def fall_back(self) -> None:
        """Load what can be loaded; the next save sets newer, damaged steps aside."""
        self.oracle.rewinding(self.checkpointer.load(state("blank"), fallback=True).step)

    def load(self) -> None:
        """The newest step, into a state of the same layout; nothing where a crash has left none."""
        latest = self.checkpointer.latest()
        if latest is not None:
            self.checkpointer.load(self._part(state(f"{latest.step}-")), step=latest.step)

    def wait(self) -> None:
        self.checkpointer.wait()

    def try_again(self, attempt: str) -> None:
        """The same once more, in the same process."""
        self.attempt, self.again = attempt, True

    def settle(self) -> None:
        """Wait for retention, which goes on after `committed`: the changes' numbers must not depend on chance."""
        self.drain()
        self._check_power()

    def drain(self) -> None:
        """Until the threads that commit and that remove have nothing left to do, or have lost their power."""
        threads = self.checkpointer._saves._threads
        threads.writer.submit(int).result()
        threads.await_removals()

    def _until_ended(self, save: Save) -> None:
        while not save.committed.done():
            self._check_power()  # a rank without power completes no future
            wait_futures([save.committed], timeout=0.01)

    def _check_power(self) -> None:
        if isinstance(self.system, (Disk, RankDisk)):
            self.system.check_power()

    def _hear(self, event: Event) -> None:
        """On the writer thread: a commit is on the oracle before retention begins, as it is told before that."""
        self.events.append(event)
        if isinstance(event, Committed):
            verdicts = retention.decide_retention(catalog.steps(self.store), self.keep)
            self.oracle.committed(event.step, self._tags[event.step], verdicts)

    def _whole(self, step: int) -> bool:
        if step not in catalog.steps(self.store):
            return False
        return tag_of(Checkpoint(self.store, step_directory(step), self.store.options)) not in self.oracle.damaged

    def abandon(self) -> None:
        """A rank without power does not wait any more."""
        for save in self.checkpointer._saves.in_flight:
            for future in (save.captured, save.committed):
                if not future.done():
                    future.set_exception(PowerLoss())
        self.store.abandon()

    def end(self) -> None:
        with suppress(FlowstoneError, PowerLoss):
            self.checkpointer.close()


@contextmanager
def job(sandbox: Path, system: System, oracle: Oracle, **options: object) -> Iterator[Job]:
    job = Job(sandbox, system, oracle, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        job.end()


def check(sandbox: Path, oracle: Oracle, *, number: int = 0, proceed: bool = True) -> None:
    """What is on disk keeps every promise of docs/ORDERING.md; AssertionError says which it breaks.

    proceed  also save once more, into the sandbox itself
    """
    oracle = oracle.copy()
    with job(sandbox, Unsynced(), oracle, number=number, attempt="z") as after:
        result = _load(after, oracle)
        assert result in oracle.newest, f"loads {result}, not one of {oracle.newest}"
        _check_steps(after.store, oracle)
        if not proceed:
            return
        after.save(1 + max([*oracle.may, *catalog.steps(after.store)], default=0))
        left = [n for n in after.store.names() if n.startswith(".") and not n.startswith(SUPERSEDED)]
        assert not left, f"the next writer has not swept {left}"
        result = _load(after, oracle)
        assert result in oracle.newest, f"after the next save loads {result}, not {oracle.newest}"
        _check_steps(after.store, oracle, inspect=False)  # the load has just verified the one that is new


def _load(after: Job, oracle: Oracle) -> tuple[int, str] | None:
    """What a fresh process loads: its step and tag, after comparing every bit with what was saved as that."""
    latest = after.checkpointer.latest()
    into = state("blank" if latest is None or latest.step < RESTING else f"{latest.step}-")
    try:
        report = after.checkpointer.load(into, fallback=bool(oracle.damaged))
    except NoCheckpointError:
        assert latest is None, f"latest() is {latest}, and nothing loads"
        return None
    tag = into["progress"]["tag"]
    assert isinstance(tag, str)
    assert same(into, expected(tag)), f"step {report.step} loads a mixture, or a state that was never saved"
    assert latest is not None, f"latest() is None, and step {report.step} loads"
    assert latest.step == report.step or tag_of(latest) in oracle.damaged, f"{latest}, but step {report.step} loads"
    return report.step, tag


def _check_steps(store: LocalStore, oracle: Oracle, *, inspect: bool = True) -> None:
    """Every step that has its name is whole and was begun; every step that must be there is."""
    steps = {}
    for step in catalog.steps(store):
        checkpoint = Checkpoint(store, step_directory(step), store.options)
        steps[step] = tag_of(checkpoint)
        assert steps[step] in oracle.may.get(step, ()), f"step {step} is {steps[step]}, not of {oracle.may.get(step)}"
        if inspect and steps[step] not in oracle.damaged:
            verified = checkpoint.inspect()
            assert verified.sound, f"step {step} is not sound: {verified.findings}"
            assert not verified.extra, f"step {step} holds {verified.extra}"
    for step, tag in oracle.must.items():
        assert steps.get(step) == tag, f"step {step} was durable as {tag}, and is {steps.get(step)}"


def tag_of(checkpoint: Checkpoint) -> str:
    progress = checkpoint.objects["progress"]
    assert isinstance(progress, dict)
    return str(progress["tag"])
