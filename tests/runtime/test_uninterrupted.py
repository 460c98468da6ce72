"""Sections that no signal handler interrupts, whatever it raises, at whichever line."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.runtime import signal_shield
from flowstone.runtime.signal_shield import Latch, SignalShield
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from flowstone.store.directories import directory
from interrupts import Struck, struck

MIB = 1 << 20
PATIENCE_S = 60.0  # for what is to happen at once


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """Each line is a commit of its own."""
    return Path(mkdtemp(dir=memory_path))


def nothing() -> None: ...


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_act_happens_on_a_thread_of_its_own_and_its_result_and_its_error_come_back() -> None:
    names = SignalShield().run(lambda: [threading.current_thread().name], first=nothing)
    assert names == ["flowstone-act"]
    with pytest.raises(ZeroDivisionError):
        SignalShield().run(lambda: 1 // 0, first=nothing)


def test_a_thread_of_acts_that_dies_before_its_first_act_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError("the act never happens")

    monkeypatch.setattr(signal_shield, "request_short_slice", lambda: 1 // 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(int(PATIENCE_S))
    try:
        assert SignalShield().run(lambda: 7, first=nothing) == 7
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_acts_of_one_owner_happen_on_one_thread_which_ends_with_it_and_holds_nothing_meanwhile() -> None:
    class Held: ...

    acts, held = SignalShield(), Held()
    seen = weakref.ref(held)
    first = acts.run(threading.current_thread, first=nothing)
    assert acts.run(lambda held=held: threading.current_thread(), first=nothing) is first  # type: ignore[misc]
    del held
    assert seen() is None
    acts.run(acts.end, first=nothing)
    first.join(PATIENCE_S)
    assert not first.is_alive()
    second = acts.run(threading.current_thread, first=nothing)
    assert second is not first
    del acts
    second.join(PATIENCE_S)
    assert not second.is_alive()


def test_what_came_of_an_act_whose_caller_was_interrupted_is_held_by_nobody() -> None:
    """Also not by its thread, which may be kept from going on just then."""

    class Held: ...

    acts, begun, may_go_on, seen = SignalShield(), threading.Event(), threading.Event(), []
    acts.run(nothing, first=nothing)

    class Slow(Latch):
        is_struck = False

        def wait(self, timeout_s: float | None = None) -> bool:
            if not self.is_struck:
                self.is_struck = begun.wait(PATIENCE_S)
                raise Struck
            return super().wait(timeout_s)

        def open(self) -> None:
            super().open()
            may_go_on.wait(PATIENCE_S)

    def act() -> Held:
        held = Held()
        seen.append(weakref.ref(held))
        begun.set()
        return held

    with mock.patch("flowstone.runtime.signal_shield.Latch", Slow), pytest.raises(Struck):
        acts.run(act, first=nothing)
    try:
        assert seen[0]() is None
    finally:
        may_go_on.set()


def test_an_act_that_was_handed_to_a_thread_which_has_ended_is_done_all_the_same() -> None:
    acts = SignalShield()
    thread = acts.run(threading.current_thread, first=nothing)
    acts.end()
    thread.join(PATIENCE_S)
    with mock.patch.object(acts, "_started", return_value=thread):
        assert acts.run(lambda: 7, first=nothing) == 7


def test_a_forked_child_has_a_thread_of_its_own_for_acts() -> None:
    acts = SignalShield()
    acts.run(nothing, first=nothing)
    child = os.fork()
    if child == 0:
        os._exit(acts.run(lambda: 7, first=nothing))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_act_is_a_plain_call_where_no_thread_can_be_started() -> None:
    with mock.patch("threading.Thread.start", side_effect=RuntimeError):
        assert SignalShield().run(threading.current_thread, first=nothing) is threading.current_thread()


def test_a_checkpointer_has_one_thread_for_acts_until_it_is_closed_or_nobody_holds_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for closes in (True, False):
        checkpointer = fs.Checkpointer(tmp_path / str(closes), budget_bytes=32 * MIB)
        for step in range(3):
            checkpointer.save(step, {"x": torch.ones(1000)}).committed.result(60)
        (thread,) = (item for item in set(threading.enumerate()) - before if item.name == "flowstone-act")
        if closes:
            checkpointer.close()
        else:
            checkpointer.wait()
        del checkpointer
        gc.collect()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_on_any_other_thread_an_act_is_a_plain_call() -> None:
    names: list[str] = []
    thread = threading.Thread(
        target=lambda: names.append(SignalShield().run(lambda: threading.current_thread().name, first=nothing)),
        name="own"
    )
    thread.start()
    thread.join(PATIENCE_S)
    assert names == ["own"]


@pytest.mark.parametrize("is_started", [False, True])
def test_whoever_is_interrupted_goes_on_when_the_act_is_over_or_before_it_has_begun(is_started: bool) -> None:
    """At any instruction: it happens once, whole, or not at all, and never behind its caller's back."""
    went = {"not at all": 0, "whole": 0}
    for instant in range(1, 400, 5):
        steps: list[str] = []
        acts, proceed = SignalShield(), threading.Event()
        if is_started:
            acts.run(nothing, first=nothing)
        threading.Timer(0.005, proceed.set).start()

        def act(steps: list[str] = steps, proceed: threading.Event = proceed) -> None:
            steps.append("begun")
            proceed.wait(PATIENCE_S)
            steps.append("over")

        try:
            struck(partial(acts.run, act, first=nothing), instant, of=("signal_shield.py",), opcodes=True)
        except Struck:
            seen = tuple(steps)
            assert seen in ((), ("begun", "over"))
            proceed.wait(PATIENCE_S)
            assert seen == tuple(steps)
            went["whole" if seen else "not at all"] += 1
    assert min(went.values()) > 2, went


def test_a_latch_is_open_for_all_whoever_is_interrupted_at_it() -> None:
    latch = Latch()
    assert not latch.wait(0.001)
    threading.Timer(0.02, latch.open).start()
    for line in range(1, 12):
        try:
            struck(latch.wait, line)
        except Struck:
            continue
    others = [threading.Thread(target=latch.wait) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(PATIENCE_S)
        assert not other.is_alive()
    assert latch.wait()


def test_a_close_that_is_interrupted_at_any_line_can_be_done_again_and_gives_the_store_back(tmp_path: Path) -> None:
    state, struck_at = {"x": torch.ones(1000)}, 0
    with fs.Checkpointer(tmp_path, budget_bytes=32 * MIB) as checkpointer:
        checkpointer.save(0, state)
    opened = descriptors()
    for step, line in enumerate([*range(1, 40, 2), *range(40, 120, 10)], 1):
        checkpointer = fs.Checkpointer(tmp_path, budget_bytes=32 * MIB)
        checkpointer.save(step, state)
        try:
            struck(checkpointer.close, line)
        except Struck:
            struck_at += 1
            checkpointer.close()
    assert struck_at > 20
    assert descriptors() <= opened
    assert fs.open(tmp_path).step == step


def test_a_first_save_that_is_interrupted_while_it_locks_the_store_keeps_nobody_out(tmp_path: Path) -> None:
    """Nor a second try of the same Checkpointer, nor the next one."""
    state, struck_at = {"x": torch.ones(1000)}, 0
    for step, line in enumerate(range(1, 40, 2), 1):
        with fs.Checkpointer(tmp_path, budget_bytes=32 * MIB, on_error="continue") as checkpointer:
            try:
                struck(checkpointer._saves.sole_writer.check, line)
            except Struck:
                struck_at += 1
            checkpointer.save(step, state).committed.result(60)
    assert struck_at > 5
    assert fs.open(tmp_path).step == step


def test_a_verb_on_the_thread_of_an_act_is_refused_at_once(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as checkpointer, pytest.raises(fs.BusyError):
        checkpointer._verb_lock.uninterrupted(checkpointer.latest)


# Saves

CONDUCTOR = (
    "checkpointer.py", "ownership.py", "conductor.py", "signal_shield.py", "verb_lock.py", "in_flight.py", "futures.py",
    "pending_save.py", "sole_writer.py", "skip_notifier.py", "fencing.py",
)


class Training:
    """A state that knows at which step it was, and a Checkpointer whose captures stay behind until a thread waits."""

    def __init__(self, path: Path, *, has_optimizer: bool = True) -> None:
        self.path = path
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "note": ["of", 0]}
        if has_optimizer:
            self.state["optimizer"] = self.optimizer
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.opened, self.threads = descriptors(), set(threading.enumerate())

    def at(self, step: int) -> dict[str, Any]:
        with torch.no_grad():
            self.model.weight.fill_(step)
        self.state["note"] = ["of", step]
        return self.state

    def checkpointer(self) -> fs.Checkpointer:
        return fs.Checkpointer(self.path, budget_bytes=32 * MIB, on_error="continue", saves_in_flight=8)

    def check_nothing_is_left(self) -> None:
        """Once it is closed: neither drafts, nor descriptors, nor threads; and what was committed is right."""
        assert not list(self.path.glob(".saving-*"))
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(PATIENCE_S)  # it may be about to end
            assert not thread.is_alive(), thread
        assert descriptors() <= self.opened
        for path in self.path.glob("step-*"):
            saved = fs.open(path)
            assert saved.objects["note"] == ["of", saved.step]
            assert saved.read("model.weight").unique().tolist() == [float(saved.step)]


@pytest.fixture
def slow_captures() -> Iterator[None]:
    """A capture that nothing expedites never ends."""
    with mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
        yield


def struck_again_and_again(training: Training, instants: Iterable[int], **how: Any) -> int:
    """Save once at each instant, with one Checkpointer; how many of those were struck."""
    struck_at = 0
    with training.checkpointer() as checkpointer:
        checkpointer.save(0, training.at(0)).committed.result(60)
        for step, instant in enumerate(instants, 1):
            state = training.at(step)
            try:
                struck(lambda step=step, state=state: checkpointer.save(step, state), instant, **how)  # type: ignore[misc]
            except Struck:
                struck_at += 1
            training.optimizer.step()
        checkpointer.wait()
        assert not list(training.path.glob(".saving-*"))
        last = checkpointer.save(100_000, training.at(100_000))
        training.optimizer.step()
        assert last.committed.result(60).step == 100_000
    training.check_nothing_is_left()
    return struck_at


@pytest.mark.usefixtures("slow_captures")
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_save_that_is_interrupted_at_any_line_of_ours_is_committed_whole_or_leaves_nothing(
    tmp_path: Path, has_optimizer: bool
) -> None:
    training = Training(tmp_path / "run", has_optimizer=has_optimizer)
    assert struck_again_and_again(training, range(1, 300, 1 if has_optimizer else 4), of=CONDUCTOR) > 35


@pytest.mark.usefixtures("slow_captures")
def test_a_save_that_is_interrupted_between_two_instructions_likewise(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    instants = range(1, 1500, 23)
    assert struck_again_and_again(training, instants, of=("ownership.py", "signal_shield.py"), opcodes=True) > 10


@pytest.mark.usefixtures("slow_captures")
def test_a_save_that_is_interrupted_anywhere_else_likewise(tmp_path: Path) -> None:
    assert struck_again_and_again(Training(tmp_path / "run"), range(1, 3000, 71)) > 20


def test_a_first_save_that_is_interrupted_is_committed_whole_or_leaves_nothing(tmp_path: Path) -> None:
    struck_at = 0
    with Training(tmp_path / "run").checkpointer() as checkpointer:  # a process opens what watches memory once
        checkpointer.save(1, {"x": torch.ones(MIB)}, fence="manual")
    for line in range(1, 320, 16):
        training = Training(tmp_path / str(line))
        with training.checkpointer() as checkpointer:
            try:
                struck(lambda: checkpointer.save(1, training.at(1)), line, of=CONDUCTOR)  # noqa: B023
            except Struck:
                struck_at += 1
            training.optimizer.step()
            checkpointer.save(2, training.at(2)).committed.result(60)
        training.check_nothing_is_left()
    assert struck_at > 10


@pytest.mark.usefixtures("slow_captures")
def test_the_step_of_a_save_that_was_interrupted_can_be_saved_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    with training.checkpointer() as checkpointer:
        with mock.patch("flowstone.save.pending_save.encode_sections", side_effect=KeyboardInterrupt), pytest.raises(
            KeyboardInterrupt
        ):
            checkpointer.save(1, training.at(1))
        assert not list(training.path.glob(".saving-*"))
        saved = checkpointer.save(1, training.at(1))
        training.optimizer.step()
        assert saved.committed.result(60).step == 1
    training.check_nothing_is_left()


@pytest.mark.usefixtures("slow_captures")
def test_who_is_interrupted_once_more_before_a_save_is_given_up_leaves_that_to_the_thread_that_ends_saves(
    tmp_path: Path
) -> None:
    training = Training(tmp_path / "run")
    with training.checkpointer() as checkpointer:
        checkpointer.save(1, training.at(1)).committed.result(60)
        acts = [checkpointer._verb_lock.uninterrupted, mock.Mock(side_effect=KeyboardInterrupt)]
        with (
            mock.patch.object(checkpointer._verb_lock, "uninterrupted", lambda act: acts.pop(0)(act)),
            mock.patch("flowstone.save.pending_save.encode_sections", side_effect=Struck),
            pytest.raises(KeyboardInterrupt),
        ):
            checkpointer.save(2, training.at(2))
        training.optimizer.step()
        checkpointer.wait()
        assert not list(training.path.glob(".saving-*"))
    training.check_nothing_is_left()
    assert fs.open(training.path).step == 1


def test_who_is_interrupted_while_an_ended_save_is_accounted_for_learns_of_it_later(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path, budget_bytes=32 * MIB) as checkpointer:
        with mock.patch("flowstone.commit.publish.publish", side_effect=fs.StorageError("no", errno=5)):
            checkpointer.save(1, {"x": torch.ones(10)}).captured.result()
            with mock.patch("flowstone.save.in_flight.catalog.steps", side_effect=Struck), pytest.raises(Struck):
                checkpointer.wait()
        with pytest.raises(fs.SaveFailedError):
            checkpointer.wait()


def test_a_directory_that_is_opened_is_closed_whenever_that_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    before, struck_at = descriptors(), 0

    def look() -> None:
        with directory(tmp_path, "a/b"):
            nothing()

    for instant in range(1, 150):
        try:
            struck(look, instant, of=("directories.py", "descriptors.py"), opcodes=True)
        except Struck:
            struck_at += 1
        assert descriptors() == before
    assert struck_at > 50


def test_nothing_is_raised_where_the_collector_would_lose_it() -> None:
    called: list[str] = []

    def callback(phase: str, _: object) -> None:
        called.append(phase)

    gc.collect()  # what others have left has finalizers of its own
    gc.callbacks.append(callback)
    try:
        assert struck(lambda: bool(gc.collect()) or True, 3), "a line and a return of its own, and nothing else"
    finally:
        gc.callbacks.remove(callback)
    assert called == ["start", "stop"]
