"""Files of expired steps are removed in the background: no commit, no step and no save waits for a slow file system.

Here it is as slow as each test needs.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.store.local import LocalStore
from flowstone.store.local_append import LocalAppendFile
from flowstone.store.system import System
from journaled import Training, steps_of

PATIENCE_S = 60.0


class SlowToRemove(System):
    """Removes no segment and no journal before it may."""

    def __init__(self) -> None:
        self.may_remove, self.is_asked = threading.Event(), threading.Event()
        self.removed: list[str] = []
        self.threads: set[str] = set()

    def unlink(self, path: Path, position: int | None = None) -> None:
        if path.parent.name.startswith((".deleting", ".saving-00000099")):
            self.threads.add(threading.current_thread().name.partition("_")[0])
            if path.name.startswith("rank-"):
                self.is_asked.set()
                assert self.may_remove.wait(PATIENCE_S)
                self.removed.append(path.parent.name)
        super().unlink(path, position)


@pytest.fixture
def slow() -> Iterator[SlowToRemove]:
    system = SlowToRemove()
    yield system
    system.may_remove.set()


def left(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_saves_are_committed_while_a_file_of_an_earlier_one_is_removed(tmp_path: Path, slow: SlowToRemove) -> None:
    state = {"w": torch.ones(100_000)}
    events: list[fs.Event] = []
    with fs.Checkpointer(LocalStore(tmp_path, system=slow), keep=1, on_event=events.append) as checkpointer:
        try:
            for step in range(1, 5):
                assert checkpointer.save(step, state).committed.result(PATIENCE_S).step == step
            assert slow.is_asked.wait(PATIENCE_S)
            assert slow.removed == []
        finally:
            slow.may_remove.set()
    assert steps_of(events, fs.Committed) == [1, 2, 3, 4]
    assert [event.name for event in events if isinstance(event, fs.Removed)] == [f"step-{n:08d}" for n in (1, 2, 3)]
    assert slow.threads == {"flowstone-remove"}
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]
    assert left(tmp_path) == [], "the end has waited for the removals"


def leave(root: Path) -> list[str]:
    """What a job leaves that is killed in a save, and while it removes. Returns the names."""
    names = [".deleting-00000002-0123456789abcdef", ".saving-00000099-0123456789abcdef"]
    for name in names:
        shutil.copytree(root / "step-00000001", root / name)
    return names


def test_the_first_save_is_committed_while_what_a_dead_job_left_is_removed(tmp_path: Path, slow: SlowToRemove) -> None:
    state = {"w": torch.ones(100_000)}
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    names, events = leave(tmp_path), list[fs.Event]()
    with fs.Checkpointer(LocalStore(tmp_path, system=slow), on_event=events.append) as checkpointer:
        try:
            for step in (2, 3):
                assert checkpointer.save(step, state).committed.result(PATIENCE_S).step == step
            assert slow.is_asked.wait(PATIENCE_S)
            assert sorted(left(tmp_path)) == names
        finally:
            slow.may_remove.set()
    assert [event.name for event in events if isinstance(event, fs.Removed)] == names
    assert slow.threads == {"flowstone-remove"}
    assert left(tmp_path) == [], "the end has waited for the sweep"
    assert steps_of(events, fs.Committed) == [2, 3]


def test_a_first_save_for_which_there_is_no_room_waits_for_the_sweep(
    tmp_path: Path, slow: SlowToRemove, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(100_000)}
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    leave(tmp_path)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 1 << 40 if len(slow.removed) == 2 else 1000)
    with fs.Checkpointer(LocalStore(tmp_path, system=slow)) as checkpointer:
        threading.Timer(0.2, slow.may_remove.set).start()
        checkpointer.save(2, state)
        assert len(slow.removed) == 2, "the call has waited"


def test_a_journal_that_begins_without_room_waits_for_the_sweep(
    tmp_path: Path, slow: SlowToRemove, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        for step in (1, 2):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    leave(tmp_path)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 1 << 40 if len(slow.removed) == 2 else 1000)
    with fs.Checkpointer(LocalStore(tmp_path, system=slow), every_step=True) as checkpointer:
        checkpointer.load(training.state())
        threading.Timer(0.2, slow.may_remove.set).start()
        training.train_step(3)
        save = checkpointer.save(3, training.state(3))
        assert len(slow.removed) == 2, "the call has waited"
        assert save.committed.result(PATIENCE_S).journal_step == 3


def test_a_sweep_whose_sync_fails_removes_nothing_and_the_next_job_does(tmp_path: Path) -> None:
    """A rename that made a leftover may not be durable."""
    class Refusing(System):
        def sync_directory(self, path: Path, fd: int | None = None) -> None:
            if threading.current_thread().name.startswith("flowstone-remove"):
                raise OSError(5, "no")
            super().sync_directory(path, fd)

    state = {"w": torch.ones(100_000)}
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    names = leave(tmp_path)
    events: list[fs.Event] = []
    with fs.Checkpointer(LocalStore(tmp_path, system=Refusing()), on_event=events.append) as checkpointer:
        assert checkpointer.save(2, state).committed.result(PATIENCE_S).step == 2
    assert sorted(left(tmp_path)) == names
    assert [event.name for event in events if isinstance(event, fs.RemovalFailed)] == names
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
    assert left(tmp_path) == []


def test_going_back_waits_for_what_is_being_removed(tmp_path: Path, slow: SlowToRemove) -> None:
    state = {"w": torch.ones(100_000)}
    with fs.Checkpointer(LocalStore(tmp_path, system=slow), keep=fs.Keep(last=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).committed.result(PATIENCE_S)
        assert slow.is_asked.wait(PATIENCE_S)
        threading.Timer(0.2, slow.may_remove.set).start()
        checkpointer.rewind(2)
        assert len(slow.removed) == 1


def test_a_save_for_which_there_is_no_room_waits_for_what_is_being_removed(
    tmp_path: Path, slow: SlowToRemove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that holds two steps and no third."""
    asked: list[int] = []

    def free_bytes(_: LocalStore) -> int:
        asked.append(len(slow.removed))
        return 1 << 40 if slow.removed else 1000

    state = {"w": torch.ones(100_000)}
    with fs.Checkpointer(LocalStore(tmp_path, system=slow), keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result(PATIENCE_S)
        assert slow.is_asked.wait(PATIENCE_S)
        monkeypatch.setattr(LocalStore, "free_bytes", free_bytes)
        threading.Timer(0.2, slow.may_remove.set).start()
        checkpointer.save(3, state)
        assert asked[0] == 0
        assert slow.removed, "the call has waited"


def test_no_file_is_removed_while_a_frame_is_written(
    tmp_path: Path, slow: SlowToRemove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sync would wait for the file system, and a step for that."""
    sync, may_sync, removing, syncs = LocalAppendFile.sync, threading.Event(), slow.may_remove, threading.Event()
    may_sync.set()
    removing.set()

    def held(appending: LocalAppendFile) -> None:
        syncs.set()
        assert may_sync.wait(PATIENCE_S)
        sync(appending)

    monkeypatch.setattr(LocalAppendFile, "sync", held)
    store, training = LocalStore(tmp_path, system=slow), Training()
    with fs.Checkpointer(store, every_step=True, keep=1) as checkpointer:
        try:
            for step in (1, 2):
                training.train_step(step)
                checkpointer.save(step, training.state(step)).committed.result(PATIENCE_S)
            syncs.clear()
            may_sync.clear()
            training.train_step(3)
            checkpointer.save(3, training.state(3))
            assert syncs.wait(PATIENCE_S)
            acted = threading.Event()
            threads = checkpointer._saves._saves._threads  # type: ignore[union-attr]
            threads.remove(lambda: None, [acted.set])
            assert not acted.wait(0.3)
        finally:
            may_sync.set()
        assert acted.wait(PATIENCE_S)


def test_a_removal_that_fails_is_told_and_the_next_one_is_made(tmp_path: Path) -> None:
    class Refusing(System):
        def unlink(self, path: Path, position: int | None = None) -> None:
            if path.parent.name.startswith(".deleting-00000001") and path.name.startswith("rank-"):
                raise OSError(5, "no")
            super().unlink(path, position)

    events: list[fs.Event] = []
    with fs.Checkpointer(LocalStore(tmp_path, system=Refusing()), keep=1, on_event=events.append) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(100_000)}).committed.result(PATIENCE_S)
    assert [event.name for event in events if isinstance(event, fs.RemovalFailed)] == ["step-00000001"]
    assert [event.name for event in events if isinstance(event, fs.Removed)] == ["step-00000002"]
    assert [name[:18] for name in left(tmp_path)] == [".deleting-00000001"]
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"w": torch.ones(3)})
    assert left(tmp_path) == []
