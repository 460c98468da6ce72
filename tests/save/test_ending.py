"""The end of a Checkpointer that is never closed: it releases its resources, and reports lost saves."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.commit import publish
from flowstone.store.local import LocalStore

Script = Callable[..., "subprocess.Popen[str]"]


def state(value: float = 1.0) -> dict[str, object]:
    return {"x": torch.full((1 << 16,), value)}


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("flowstone-")}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_checkpointer_that_nobody_holds_gives_back_lock_threads_and_memory(store: Path) -> None:
    gc.collect()
    before, open_before = our_threads(), descriptors()
    checkpointer = fs.Checkpointer(store)
    save = checkpointer.save(1, state())
    committed = save.committed.result()
    checkpointer.wait()
    assert our_threads() > before
    checkpointer._saves.sole_writer.drain()  # whose last work holds it
    arena, gone = checkpointer._saves.captures._arena, weakref.ref(checkpointer)
    assert arena is not None
    del checkpointer
    assert gone() is None, "without waiting for a collector: there is no cycle"
    assert arena.touched_bytes == 0, "closed"
    for thread in threading.enumerate():
        if thread.name.startswith("flowstone-") and thread.name not in before:
            thread.join(60)
    assert our_threads() == before
    assert descriptors() == open_before
    with fs.Checkpointer(store) as another:
        another.save(2, state())
    assert committed.read("x").sum() == 1 << 16, "what it has committed is read all the same"
    assert save.step == 1


def test_a_cell_that_is_run_twice_saves_twice(store: Path) -> None:
    for step in (1, 2, 3):  # the name holds the one before until the new one is made
        checkpointer = fs.Checkpointer(store)
        save = checkpointer.save(step, state())
    assert save.committed.result().step == 3
    checkpointer.close()


def test_a_cell_that_is_run_again_waits_for_the_save_of_the_one_before(store: Path) -> None:
    begun, proceed, real = threading.Event(), threading.Event(), publish.publish

    def publish_later(*args: object, **more: object) -> object:
        begun.set()
        assert proceed.wait(60)
        return real(*args, **more)  # type: ignore[arg-type]

    with mock.patch("flowstone.commit.publish.publish", publish_later):
        checkpointer = fs.Checkpointer(store)
        checkpointer.save(1, state())
        assert begun.wait(60)
        checkpointer = fs.Checkpointer(store)
        timer = threading.Timer(0.05, proceed.set)
        timer.start()
        checkpointer.save(2, state())
        timer.join()
    checkpointer.close()
    assert fs.open(store, 1).verify().sound
    assert fs.open(store).verify().step == 2


def test_a_cell_that_is_run_again_waits_while_another_thread_releases_the_one_before(store: Path) -> None:
    begun, resume, real = threading.Event(), threading.Event(), LocalStore.close

    def close_later(store: LocalStore) -> None:
        begun.set()
        assert resume.wait(60)
        real(store)

    def refused(*_: object) -> None:
        threading.Timer(0.05, resume.set).start()

    checkpointers = [fs.Checkpointer(store)]
    checkpointers[0].save(1, state()).committed.result()
    with (
        mock.patch.object(LocalStore, "close", close_later),
        mock.patch("flowstone.runtime.writer_lock.finish_saves_of_others", refused),
    ):
        last_holder = threading.Thread(target=checkpointers.clear)
        last_holder.start()
        assert begun.wait(60)
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.save(2, state())
        last_holder.join()
    assert fs.open(store).verify().step == 2


def test_another_checkpointer_of_this_process_is_named_where_it_was_made(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer, fs.Checkpointer(store) as other:
        checkpointer.save(1, {"x": 1})
        with pytest.raises(fs.LockedError) as caught:
            other.save(2, {"x": 2})
    assert caught.value.message == (
        f"cannot save into {store}: another Checkpointer of this process holds the lock"
    )
    line = test_another_checkpointer_of_this_process_is_named_where_it_was_made.__code__.co_firstlineno + 1
    assert str(caught.value.facts["holder"]).endswith(f"the Checkpointer made at {__file__}:{line}")
    assert "close() the other one" in str(caught.value.facts["next"])


def test_one_in_a_cycle_goes_when_its_store_is_wanted(store: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.checkpointer = fs.Checkpointer(store, on_event=self.on_event)

        def on_event(self, event: fs.Event) -> None: ...

    gc.disable()
    try:
        Trainer().checkpointer.save(1, state()).committed.result()
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.save(2, state())
    finally:
        gc.enable()
    assert fs.open(store).step == 2


def test_a_failed_save_that_is_kept_does_not_keep_its_checkpointer_nor_the_state(store: Path) -> None:
    with mock.patch("flowstone.commit.publish.publish", side_effect=fs.StorageError("no", next="-")):
        checkpointer = fs.Checkpointer(store)
        held = state()
        memory = weakref.ref(held["x"])  # type: ignore[arg-type]
        save = checkpointer.save(1, held)
        assert isinstance(save.committed.exception(), fs.StorageError)
    checkpointer._saves.sole_writer.drain()  # whose last work holds it
    gone = weakref.ref(checkpointer)
    del checkpointer, held
    gc.collect()
    assert (gone(), memory()) == (None, None)


def test_where_an_error_that_is_not_ours_came_from_is_told_by_a_note(store: Path) -> None:
    with mock.patch("flowstone.commit.publish.publish", side_effect=ZeroDivisionError("a mistake")):
        checkpointer = fs.Checkpointer(store)
        error = checkpointer.save(1, state()).committed.exception()
    assert isinstance(error, ZeroDivisionError)
    assert "in commit" in error.__notes__[0]
    checkpointer.close()


_LET_GO = """
import sys, shutil, threading, torch, flowstone as fs
from flowstone.commit import publish
from flowstone.store.local import LocalStore
real, gone = publish.publish, threading.Event()
def lose(*args, **more):
    gone.wait(60)
    shutil.rmtree(sys.argv[1])
    return real(*args, **more)
def work():
    checkpointer = fs.Checkpointer(sys.argv[1])
    checkpointer.save(1, {"x": torch.ones(3)}).committed.result()
    publish.publish = lose
    checkpointer.save(2, {"x": torch.ones(3)})
"""


def test_a_save_that_is_lost_after_nobody_holds_its_checkpointer_ends_the_process_with_1(
    store: Path, warm_script: Script
) -> None:
    text = _LET_GO + (
        "import time\n"
        "work()\n"
        "gone.set()\n"
        "while any(thread.name.startswith('flowstone-commit') for thread in threading.enumerate()): time.sleep(0.01)\n"
        "print('done')\n"
    )
    process = warm_script(text, store)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "done\n"), err
    assert err.startswith("flowstone: step 2 was not saved: ")
    assert "Traceback" not in err


_CHILD = _LET_GO + """
import multiprocessing
def child(how):
    global checkpointer
    if how == "held":
        checkpointer = fs.Checkpointer(sys.argv[1])
    elif how == "lost":
        publish.publish = lose
        checkpointer = fs.Checkpointer(sys.argv[1])
        gone.set()
    elif how == "let go":
        gone.set()
        work()
        return
    checkpointer.save(7, {"x": torch.ones(3)})
    print("end of child", flush=True)
process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[2],))
process.start()
process.join(60)
print(process.exitcode)
"""


@pytest.mark.parametrize("how", ["lost", "let go"])
def test_a_lost_last_save_of_a_child_of_multiprocessing_is_no_success(
    store: Path, warm_script: Script, how: str
) -> None:
    process = warm_script(_CHILD, store, how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "1", err
    assert " was not saved: " in err


def test_a_child_of_multiprocessing_waits_for_its_last_save(store: Path, warm_script: Script) -> None:
    out, err = warm_script(_CHILD, store, "held").communicate(timeout=120)
    assert out == "end of child\n0\n", err
    assert fs.open(store).verify().step == 7


def test_a_fork_of_what_nobody_holds_leaves_the_parents_alone(store: Path, warm_script: Script) -> None:
    text = (
        "import os, sys, torch, flowstone as fs\n"
        "checkpointer = fs.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'x': torch.ones(3)}).committed.result()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del checkpointer\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(checkpointer.save(2, {'x': torch.ones(3)}).committed.result().step)\n"
    )
    assert warm_script(text, store).communicate(timeout=120) == ("2\n", "")
