"""A journal that may lag by several steps.

`save` waits for the store only beyond that lag, one sync makes all waiting steps durable, and no more steps are lost
than documented.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_every_step import TRAININGS, loaded, steps_of

import flowstone as fs
from flowstone.journal import journals
from flowstone.store.local import LocalStore
from flowstone.store.local_append import LocalAppendFile
from journaled import Training, adamw, bits, run, same
from kill_loop import killed_until_it_ends

PATIENCE_S = 60.0


class HeldStore:
    """Syncs of journals wait until they may. `syncs`: how many were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sync, self.may_sync = LocalAppendFile.sync, threading.Event()
        self.syncs, self.asked = 0, threading.Event()
        self.may_sync.set()
        self.before: Callable[[], object] = lambda: None
        monkeypatch.setattr(LocalAppendFile, "sync", lambda appending: self.sync(appending))

    def sync(self, appending: LocalAppendFile) -> None:
        self.syncs += 1
        self.asked.set()
        self.before()
        assert self.may_sync.wait(PATIENCE_S)
        self._sync(appending)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.asked.clear()
        self.may_sync.clear()
        try:
            yield
        finally:
            self.may_sync.set()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HeldStore:
    return HeldStore(monkeypatch)


def steps(checkpointer: fs.Checkpointer, training: Training, *numbers: int) -> fs.Save:
    for step in numbers:
        training.train_step(step)
        save = checkpointer.save(step, training.state(step))
    return save


def under_way(checkpointer: fs.Checkpointer) -> int:
    """How many steps are not durable yet."""
    return sum(not one.over.is_open for one in tuple(checkpointer._saves._journaling._pending_frames))  # type: ignore[union-attr]


def in_time(act: Callable[[], object]) -> bool:
    """Whether `act` ends by itself; it is left behind if it does not, on a thread of its own."""
    ended = threading.Event()
    threading.Thread(target=lambda: (act(), ended.set()), daemon=True).start()
    return ended.wait(PATIENCE_S / 6)


def test_a_save_returns_once_the_step_that_many_before_is_durable_and_not_before(
    tmp_path: Path, store: HeldStore
) -> None:
    training, events, durable = Training(), list[fs.Event](), list[list[int]]()
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=3, on_event=events.append) as checkpointer:
        steps(checkpointer, training, 1, 2).committed.result()
        with store.held():
            assert in_time(lambda: steps(checkpointer, training, 3)), "it waits for nothing"
            assert store.asked.wait(PATIENCE_S), "the third is on its way"
            assert in_time(lambda: steps(checkpointer, training, 4, 5)), "nor do these, nor their optimizer"
            assert steps_of(events, fs.Journaled) == [2]
            before = store.syncs
            threading.Timer(0.3, lambda: (durable.append(steps_of(events, fs.Journaled)), store.may_sync.set())).start()
            steps(checkpointer, training, 6)
            assert durable == [[2]], "it has waited"
        checkpointer.wait()
        assert steps_of(events, fs.Journaled) == [2, 3, 4, 5, 6]
        assert store.syncs - before <= 2, "one sync for those that had waited, and one for the last if it came too late"
    synced = {event.step: event.synced for event in events if isinstance(event, fs.Journaled)}
    assert synced[3] == 1
    assert synced[4] == synced[5] >= 2
    again, report = loaded(tmp_path, {})
    assert report.step == 6
    assert same(bits(again), bits(training))


@pytest.mark.parametrize("like", TRAININGS.values(), ids=TRAININGS.keys())
def test_what_waits_is_what_the_step_was_whatever_the_loop_does_with_its_gradients(
    tmp_path: Path, store: HeldStore, like: dict[str, object]
) -> None:
    training, by_step = Training(**like), {}  # type: ignore[arg-type]
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=3) as checkpointer:
        steps(checkpointer, training, 1, 2, 3).committed.result()
        for first in (4, 7):
            with store.held():
                for step in range(first, first + 3):
                    steps(checkpointer, training, step)
                    by_step[step] = copy.deepcopy(bits(training))
            checkpointer.wait()
    for step, expected in by_step.items():
        again, report = loaded(tmp_path, like, step=step)
        assert (report.step, report.replay.exactness if report.replay else "") == (step, "exact")
        assert same(bits(again), expected)


@pytest.mark.parametrize("lag_steps", [1, 4])
def test_a_slow_store_is_asked_for_fewer_syncs_than_there_are_steps(
    tmp_path: Path, store: HeldStore, lag_steps: int
) -> None:
    """Here as slow as can be: a sync lasts until training waits for it."""
    training, is_over = Training(), False

    def as_slow_as_can_be() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while under_way(checkpointer) < lag_steps and not is_over and time.monotonic() < deadline:
            time.sleep(0.001)

    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=lag_steps) as checkpointer:
        steps(checkpointer, training, 1, 2).committed.result()
        before, store.before = store.syncs, as_slow_as_can_be
        steps(checkpointer, training, *range(3, 23))
        is_over = True
        checkpointer.wait()
        assert (store.syncs - before == 20) if lag_steps == 1 else (store.syncs - before <= 12)
    assert loaded(tmp_path, {})[1].step == 22


def test_with_a_lag_of_one_the_files_are_what_they_were(tmp_path: Path) -> None:
    for place, options in (("plain", {}), ("one", {"lag_steps": 1})):
        run(Training(), tmp_path / place, 1, 4, **options)  # type: ignore[arg-type]
        (journal,) = journals.list_journals(LocalStore(tmp_path / place))
        (file,) = (tmp_path / place).glob("journal-*/*.journal")
        assert b"lag_steps" not in file.read_bytes()
        assert journal.header.torn_max == 1
    run(Training(), tmp_path / "three", 1, 4, lag_steps=3)
    assert journals.list_journals(LocalStore(tmp_path / "three"))[0].header.torn_max == 3


def test_gradients_that_wait_stay_within_what_the_arena_leaves_of_the_budget(tmp_path: Path, store: HeldStore) -> None:
    def play(root: Path, budget_bytes: int, patience_s: float) -> bool:
        """Whether a save returns while the step before it is on its way."""
        saved: list[fs.Save] = []
        model = torch.nn.Linear(1500, 1500, bias=False)  # 9 MB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def one(step: int) -> fs.Save:
            model.weight.grad = torch.full_like(model.weight, step)
            optimizer.step()
            return checkpointer.save(step, {"model": model, "optimizer": optimizer})

        with fs.Checkpointer(root, every_step=True, lag_steps=3, budget_bytes=budget_bytes) as checkpointer:
            one(1).committed.result()
            one(2).committed.result()
            with store.held():
                one(3)
                assert store.asked.wait(PATIENCE_S)
                thread = threading.Thread(target=lambda: saved.append(one(4)))
                thread.start()
                thread.join(patience_s)
                result = bool(saved)
            thread.join()
        assert saved, "it did not fail"
        return result

    assert play(tmp_path / "wide", 1 << 30, PATIENCE_S)
    assert not play(tmp_path / "narrow", 32 << 20, 0.5)


def test_a_step_that_fails_takes_those_behind_it_along_and_is_raised_once_and_the_next_is_whole(
    tmp_path: Path, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, upset = LocalAppendFile.append, [False]

    def refusing(appending: LocalAppendFile, *given: Any, **named: Any) -> None:
        if upset[0]:
            upset[0] = False
            raise fs.StorageError("no", errno=5)
        append(appending, *given, **named)

    monkeypatch.setattr(LocalAppendFile, "append", refusing)
    training, events = Training(), list[fs.Event]()
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=4, on_event=events.append) as checkpointer:
        steps(checkpointer, training, 1, 2).committed.result()
        with store.held():
            steps(checkpointer, training, 3)
            assert store.asked.wait(PATIENCE_S)
            upset[0] = True
            behind = [steps(checkpointer, training, step) for step in (4, 5)]
        assert [save.committed.latch.wait(PATIENCE_S) for save in behind] == [True, True]
        with pytest.raises(fs.SaveFailedError, match="step 4"):
            checkpointer.save(6, training.state(6))
        steps(checkpointer, training, 7, 8)
        with pytest.raises(fs.StorageError, match="cannot be journaled"):
            behind[1].committed.result()
    assert steps_of(events, fs.Journaled) == [2, 3, 8]
    assert steps_of(events, fs.SaveFailed) == [4, 5]
    assert steps_of(events, fs.Committed) == [1, 7]
    again, report = loaded(tmp_path, {})
    assert report.step == 8
    assert same(bits(again), bits(training))


def test_a_sync_that_fails_fails_all_steps_that_it_was_for(
    tmp_path: Path, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, events = Training(), list[fs.Event]()
    with fs.Checkpointer(
        tmp_path, every_step=True, lag_steps=4, on_error="continue", on_event=events.append
    ) as checkpointer:
        steps(checkpointer, training, 1, 2).committed.result()
        with store.held():
            steps(checkpointer, training, 3)
            assert store.asked.wait(PATIENCE_S)
            steps(checkpointer, training, 4, 5)
            sync = store._sync

            def refusing(appending: LocalAppendFile) -> None:
                store._sync = sync
                if steps_of(events, fs.Journaled)[-1] == 3:
                    raise fs.StorageError("no", errno=5)
                sync(appending)
                store._sync = refusing

            store._sync = refusing
        checkpointer.wait()
        steps(checkpointer, training, 6, 7)
    assert steps_of(events, fs.SaveFailed) == [4, 5]
    assert steps_of(events, fs.Journaled) == [2, 3, 7]
    again, report = loaded(tmp_path, {})
    assert report.step == 7
    assert same(bits(again), bits(training))


def _frame(root: Path, number: int) -> tuple[Path, int, int]:
    """A step's frame: its file, where its payload ends, and its step."""
    (journal,) = journals.list_journals(LocalStore(root))
    place = journals.complete_frames(LocalStore(root), journal, 0)[number]
    (file,) = root.glob("journal-*/*.journal")
    return file, place.offset + place.frame.frame_bytes, place.step


@pytest.mark.parametrize(("number", "is_torn"), [(-1, True), (-2, True), (-3, True), (-4, False)])
def test_a_power_loss_may_tear_any_of_the_last_frames_and_what_is_before_that_is_damage(
    tmp_path: Path, number: int, is_torn: bool
) -> None:
    training, by_step = Training(), {}
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=3) as checkpointer:
        for step in range(1, 9):
            steps(checkpointer, training, step)
            by_step[step] = copy.deepcopy(bits(training))
    file, end, step = _frame(tmp_path, number)
    with file.open("r+b") as opened:
        opened.seek(end - 5000)
        opened.write(bytes(5000))
    if not is_torn:
        with pytest.raises(fs.DamagedError, match=f"step {step}"):
            loaded(tmp_path, {})
        assert loaded(tmp_path, {}, fallback=True)[1].step == step - 1
        return
    again, report = loaded(tmp_path, {})
    assert report.step == step - 1
    assert same(bits(again), by_step[step - 1])
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=3) as checkpointer:
        checkpointer.load(again.state())
        steps(checkpointer, again, step, step + 1)
    other, report = loaded(tmp_path, {})
    assert report.step == step + 1
    assert same(bits(other), bits(again))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_journal_that_is_being_made_is_not_removed_by_a_later_whole_save(
    tmp_path: Path, store: HeldStore, monkeypatch: pytest.MonkeyPatch, as_list: bool
) -> None:
    training, events, is_late, committed = Training(), list[fs.Event](), False, threading.Event()

    def on_event(event: fs.Event) -> None:
        events.append(event)
        if isinstance(event, fs.Committed) and event.step == 3:
            committed.set()

    path = [tmp_path] if as_list else tmp_path
    with fs.Checkpointer(path, every_step=True, lag_steps=4, keep=2, on_event=on_event) as checkpointer:
        monkeypatch.setattr(checkpointer._saves, "_is_late", lambda: is_late)
        steps(checkpointer, training, 1).committed.result()
        with store.held():
            steps(checkpointer, training, 2)
            assert store.asked.wait(PATIENCE_S), "its directory is there, and not yet durable"
            is_late = True
            steps(checkpointer, training, 3)
            is_late = False
            assert committed.wait(PATIENCE_S)
            deadline = time.monotonic() + 0.5  # in which retention would remove it
            while list(tmp_path.glob("journal-00000001-*")) and time.monotonic() < deadline:
                time.sleep(0.001)
        checkpointer.wait()
        steps(checkpointer, training, 4)
    assert steps_of(events, fs.SaveFailed) == []
    assert steps_of(events, fs.Journaled) == [2, 3, 4]
    assert not list(tmp_path.glob("journal-00000001-*")), "then it goes"
    assert loaded(tmp_path, {})[1].step == 4


KILLED_STEPS = 200  # four kills come long before the last one, however late this process is

IMPORTS = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1] / "support"]))
_KILLED = """
import os, sys, time
sys.path[:0] = sys.argv[2].split(os.pathsep)
import torch
torch.set_num_threads(1)
import flowstone as fs
from flowstone.store.local_append import LocalAppendFile
from journaled import Training, adamw
from test_every_step_lag import under_way
sync = LocalAppendFile.sync
def slow(appending):  # until several wait for it
    deadline = time.monotonic() + 5.0
    while under_way(checkpointer) < 4 and not is_over and time.monotonic() < deadline:
        time.sleep(0.001)
    sync(appending)
LocalAppendFile.sync = slow
training = Training(seed=0, width=300)
synced, is_over = 0, False
def told(event):
    global synced
    synced = max(synced, getattr(event, "synced", 0))
with fs.Checkpointer(sys.argv[1], every_step=True, lag_steps=4, recovery_s=1.0, keep=2, on_event=told) as checkpointer:
    done = 0
    if checkpointer.latest() is not None:
        done = checkpointer.load(training.state()).step
    print("loaded", done, flush=True)
    for step in range(done + 1, int(sys.argv[3]) + 1):
        training.train_step(step)
        save = checkpointer.save(step, training.state(step))
        if step == 1:
            save.committed.result()  # what all others begin with
        print("begun", step, flush=True)
    is_over = True
print("synced", synced, flush=True)
"""


def test_killed_at_any_instant_no_more_steps_are_lost_than_was_said_and_the_end_is_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), IMPORTS, str(KILLED_STEPS)]
    result = killed_until_it_ends(command, seed=7, lag_steps=4, pause_s=0.04)
    assert result["synced"] > 1, "one sync for several steps"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        like = {"make": adamw, "width": 300}
        undisturbed = Training(seed=0, **like)  # type: ignore[arg-type]
        for step in range(1, KILLED_STEPS + 1):
            undisturbed.train_step(step)
        expected = bits(undisturbed)
        actual, report = loaded(tmp_path, like)
        assert report.step == KILLED_STEPS
        assert same(bits(actual), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("lag_steps", [0, -1, True, 65, 1 << 70, 2.0, "2", None])
def test_a_lag_that_is_none_is_refused_with_what_to_do(tmp_path: Path, lag_steps: Any) -> None:
    with pytest.raises(fs.ArgumentError, match="lag_steps") as refused:
        fs.Checkpointer(tmp_path, every_step=True, lag_steps=lag_steps)
    assert "give " in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_lag_without_every_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.ArgumentError, match="needs every_step"):
        fs.Checkpointer(tmp_path, lag_steps=4)
    with fs.Checkpointer(tmp_path, lag_steps=1) as checkpointer:
        assert checkpointer.latest() is None
    with fs.Checkpointer(tmp_path, every_step=True, lag_steps=np.int64(2)) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.latest() is None


def test_show_tells_how_late_steps_may_be(tmp_path: Path) -> None:
    run(Training(), tmp_path, 1, 4, lag_steps=4)
    show = [sys.executable, "-m", "flowstone", "show", str(tmp_path)]
    stdout = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "each durable at most 4 steps later" in " ".join(stdout.split())
    as_json = subprocess.run([*show, "--json"], capture_output=True, text=True, check=True).stdout
    assert [journal["lag_steps"] for journal in json.loads(as_json)["journals"]] == [4]
