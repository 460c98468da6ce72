"""The log: no thread of Flowstone waits for a lock of `logging`, which an error in a signal handler may leave held."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.events.phases import Event
from flowstone.log import _Lines, _Log, log


@contextmanager
def left_locked() -> Iterator[None]:
    """As after an error between `_acquireLock()` and its `try`, on this thread: of the module, and of each handler."""
    locks = [logging._lock, *(h.lock for h in logging.root.handlers if h.lock)]  # type: ignore[attr-defined]
    for lock in locks:
        lock.acquire()
    try:
        yield
    finally:
        for lock in reversed(locks):
            lock.release()


def on_a_thread_of_ours(act: Callable[[], object]) -> float:
    """How long `act` takes there, in seconds; at most 60."""
    started = time.monotonic()
    thread = threading.Thread(target=act, name="flowstone-commit_0", daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return time.monotonic() - started


def is_written(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    """Whether a line with these words comes: one that was not waited for comes when it can."""
    deadline = time.monotonic() + 60
    while not (result := any(words in line for line in caplog.messages)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


LOCKED = '''
import logging, sys, threading
import torch
import flowstone as fs

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)

def raises(event):
    raise ValueError(type(event).__name__)

def state():
    return {"model": torch.nn.Linear(64, 64), "step": 7}

for lock in [logging._lock, *(handler.lock for handler in logging.root.handlers)]:
    lock.acquire()  # and never released
with fs.Checkpointer(sys.argv[1], keep=1, on_event=raises) as checkpointer:
    for step in 1, 2, 3:
        assert checkpointer.save(step, state()).committed.result(60).step == step
    checkpointer.load(state())
print("ended")
'''


def test_a_process_whose_main_thread_left_the_locks_locked_saves_loads_and_ends(tmp_path: Path) -> None:
    """In a new process, where modules that make their own loggers are still to be imported."""
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ended"), done.stderr


def test_a_save_that_fails_while_the_locks_are_left_locked_raises(
    store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **more: object) -> None:
        raise fs.StorageError("cannot write manifest.json", errno=5, next="check the disk")

    caplog.set_level(logging.DEBUG, "flowstone")  # the level's cache is empty now: asking `logging` would lock
    monkeypatch.setattr("flowstone.commit.publish.publish", fails)
    with fs.Checkpointer(store) as checkpointer, left_locked():
        save = checkpointer.save(1, {"x": torch.ones(8)})
        with pytest.raises(fs.StorageError, match=r"cannot write manifest\.json"):
            save.committed.result(60)
    assert is_written(caplog, "cannot write manifest.json")


def test_only_the_first_line_is_waited_for_and_all_come_in_order(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"line {number}" for number in range(5)]
    with left_locked():
        took = on_a_thread_of_ours(lambda: [log.warning(line) for line in lines])
        assert caplog.messages == []
    assert took < 10
    assert is_written(caplog, lines[-1])
    assert caplog.messages == lines


def test_lines_beyond_a_thousand_are_dropped_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    with left_locked():
        on_a_thread_of_ours(lambda: [log.warning("%d", number) for number in range(3000)])
    assert is_written(caplog, "999")
    on_a_thread_of_ours(lambda: log.warning("last"))
    assert is_written(caplog, "last")
    assert 1000 < len(caplog.messages) < 1010


def test_a_line_is_there_before_what_comes_after_it_and_says_where_it_is_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told(event: Event) -> None:
        raise ValueError("of the user's")

    root = logging.getLogger("flowstone")
    seen = list[int]()

    def act() -> None:
        log.warning("%s and %d", "one", 2)
        seen.append(len(caplog.records))

    on_a_thread_of_ours(act)
    log.warning("of this thread")
    ours, direct = caplog.records
    assert seen == [1], "written when the call returned"
    assert (ours.getMessage(), ours.name, ours.funcName, ours.threadName) == (
        "one and 2", root.name, "act", "flowstone-commit_0",
    )  # fmt: skip
    assert ours.pathname == direct.pathname == __file__
    assert (direct.threadName, direct.funcName) == (threading.current_thread().name, sys._getframe().f_code.co_name)


def test_an_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def act() -> None:
        try:
            raise ValueError("of the user's")
        except ValueError:
            log.exception("on_event raised")

    on_a_thread_of_ours(act)
    assert "on_event raised" in caplog.text
    assert "ValueError: of the user's" in caplog.text


def test_a_line_carries_what_its_caller_adds_on_any_thread(caplog: pytest.LogCaptureFixture) -> None:
    on_a_thread_of_ours(lambda: log.warning("of a thread of ours", extra={"step": 7}))
    log.warning("of this thread", extra={"step": 7})
    assert [(record.getMessage(), vars(record)["step"]) for record in caplog.records] == [
        ("of a thread of ours", 7), ("of this thread", 7)
    ]


def test_two_logs_have_lines_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """One whose line cannot be written holds up no line of the other."""
    stuck, other = logging.getLogger("flowstone.stuck"), logging.getLogger("flowstone.other")
    held = threading.Event()
    stuck.addFilter(lambda record: held.wait(60))
    try:
        on_a_thread_of_ours(lambda: _Log(stuck).warning("late"))
        took = on_a_thread_of_ours(lambda: _Log(other).warning("at once"))
        assert caplog.messages == ["at once"]
        assert took < 10
    finally:
        held.set()
        stuck.filters.clear()
    assert is_written(caplog, "late")


def test_levels_are_those_of_the_standard_logger(caplog: pytest.LogCaptureFixture) -> None:
    standard = logging.getLogger("flowstone")
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
    try:
        for level in (logging.NOTSET, *levels):
            for disabled_below in (logging.NOTSET, *levels):
                standard.setLevel(level)
                logging.disable(disabled_below)
                assert [log.isEnabledFor(level) for level in levels] == [standard.isEnabledFor(lvl) for lvl in levels]
    finally:
        standard.setLevel(logging.NOTSET)
        logging.disable(logging.NOTSET)


def test_a_filter_that_raises_does_not_end_the_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(record: logging.LogRecord) -> bool:
        raise ValueError("of a filter")

    standard = logging.getLogger("flowstone")
    standard.addFilter(raises)
    try:
        on_a_thread_of_ours(lambda: log.warning("lost"))
    finally:
        standard.removeFilter(raises)
    on_a_thread_of_ours(lambda: log.warning("there"))
    assert caplog.messages == ["there"]
    assert "ValueError: of a filter" in capsys.readouterr().err


def test_a_forked_child_writes_its_lines() -> None:
    on_a_thread_of_ours(lambda: log.warning("the parent's thread of lines runs"))
    assert _Lines.THREAD in {thread.name for thread in threading.enumerate()}
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        logging.getLogger("flowstone").addHandler(logging.StreamHandler(os.fdopen(writes, "w")))
        on_a_thread_of_ours(lambda: log.warning("the child's"))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        assert file.read() == "the child's\n"
    assert os.waitpid(child, 0)[1] == 0
