"""Two Checkpointers of one process and one store, by any spelling of its path: the second waits for the first."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flowstone as fs
from flowstone.commit import publish
from flowstone.save.saves import Saves

STEPS = {"as it was": lambda path: path, "relative": lambda path: Path(os.path.relpath(path)),
         "with a link": lambda path: path.parent / "link" / path.name,
         "by another way": lambda path: path.parent / "run" / ".." / path.name}


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No save is committed before this is set."""
    proceed, publish_now = threading.Event(), publish.publish

    def late(*value: Any) -> Any:
        assert proceed.wait(60)
        return publish_now(*value)

    monkeypatch.setattr(publish, "publish", late)
    return proceed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    return tmp_path / "run"


def newest(ckpt: fs.Checkpointer) -> int:
    result = ckpt.latest()
    return 0 if result is None else result.step


def loaded(ckpt: fs.Checkpointer) -> int:
    return ckpt.load(state(0)).step


@pytest.mark.parametrize("verb", [newest, loaded])
@pytest.mark.parametrize("spelling", STEPS)
def test_the_second_one_sees_what_the_first_has_in_flight(
    run: Path, held: threading.Event, verb: Callable[[fs.Checkpointer], int], spelling: str
) -> None:
    first = fs.Checkpointer(run)
    first.save(1, state(1))
    first.save(2, state(2))
    second = fs.Checkpointer(STEPS[spelling](run))
    threading.Timer(0.2, held.set).start()  # without the wait there is nothing yet: the commits are held
    assert verb(second) == 2
    first.close()
    second.save(3, state(3))
    second.close()
    assert fs.open(run).step == 3


def test_a_cell_that_is_run_again_after_an_interrupt_goes_on_from_the_saves_in_flight(
    run: Path, held: threading.Event
) -> None:
    kept: list[fs.Checkpointer] = []

    def cell(*, is_interrupted: bool) -> int:
        kept[:] = [fs.Checkpointer(run)]  # the one before is referenced no more, but by its saves
        begins = newest(kept[0])
        for step in (begins + 1, begins + 2):
            kept[0].save(step, state(step))
        if is_interrupted:
            raise KeyboardInterrupt
        return begins

    with pytest.raises(KeyboardInterrupt):
        cell(is_interrupted=True)
    threading.Timer(0.2, held.set).start()
    assert cell(is_interrupted=False) == 2
    kept[0].close()
    assert fs.open(run).step == 4


def test_one_of_several_tiers_is_the_same_store(run: Path, tmp_path: Path, held: threading.Event) -> None:
    with fs.Checkpointer([run, tmp_path / "far"]) as first:
        first.save(1, state(1))
        threading.Timer(0.2, held.set).start()
        assert newest(fs.Checkpointer(run)) == 1


def test_another_store_is_not_waited_for(run: Path, tmp_path: Path, held: threading.Event) -> None:
    first = fs.Checkpointer(run)
    first.save(1, state(1))
    assert newest(fs.Checkpointer(tmp_path / "other")) == 0
    held.set()
    first.close()


def test_a_save_that_failed_is_raised_by_the_first_one_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*value: Any) -> Any:
        raise OSError("no")

    first = fs.Checkpointer(run)
    monkeypatch.setattr(publish, "publish", refused)
    first.save(1, state(1))
    assert newest(fs.Checkpointer(run)) == 0
    with pytest.raises(fs.SaveFailedError):
        first.close()


def test_in_a_callback_of_the_first_the_second_one_waits_for_nothing(run: Path) -> None:
    seen: list[int] = []

    def on_event(event: object) -> None:
        if isinstance(event, fs.Committed):
            seen.append(newest(fs.Checkpointer(run)))

    with fs.Checkpointer(run, on_event=on_event) as first:
        first.save(1, state(1)).committed.result()
    assert seen == [1]


def test_a_callback_of_the_first_may_ask_the_second_one_while_that_waits_for_the_first(run: Path) -> None:
    seen: list[int] = []
    second, asks = fs.Checkpointer(run), threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, fs.Written) and not seen:
            assert asks.wait(60)
            seen.append(newest(second))

    def look(where: Any, *value: Any) -> Any:
        asks.set()  # the second one waits for this save from here on
        return await_ends(where, *value)

    await_ends = Saves.await_ends
    with pytest.MonkeyPatch.context() as patch, fs.Checkpointer(run, on_event=on_event) as first:
        patch.setattr(Saves, "await_ends", look)
        first.save(1, state(1))
        asking = threading.Thread(target=lambda: seen.append(newest(second)), daemon=True)
        asking.start()
        asking.join(30)
        assert not asking.is_alive(), "both wait for each other"
    assert seen == [0, 1]


def test_a_forked_child_does_not_wait_for_its_parents_saves(run: Path, held: threading.Event) -> None:
    first = fs.Checkpointer(run)
    first.save(1, state(1))
    child = os.fork()
    if child == 0:
        os._exit(newest(fs.Checkpointer(run)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.set()
    first.close()


def test_another_thread_may_make_checkpointers_while_one_looks_for_saves_in_flight(run: Path, tmp_path: Path) -> None:
    made = [fs.Checkpointer(run), fs.Checkpointer(tmp_path / "other")]

    def look(frame: FrameType, _: str, __: object) -> Any:
        if "weakref" in frame.f_code.co_filename:  # between any two lines of what goes through them
            sys.settrace(None)
            made.append(fs.Checkpointer(tmp_path / str(len(made))))
            sys.settrace(look)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        assert newest(made[0]) == 0
    finally:
        sys.settrace(before)
    assert len(made) > 2
