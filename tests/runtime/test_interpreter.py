"""What Python has no public interface for: each of these tests fails on a release of Python without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowstone.ranks.heartbeat import user_code_line
from flowstone.runtime import interpreter

_ENDS = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from flowstone.runtime.interpreter import call_before_threads_end

over = threading.Event()
atexit.register(print, "atexit")
executor = ThreadPoolExecutor(1)
executor.submit(lambda: print("a thread ends:", over.wait(60)))
call_before_threads_end(over.set)
"""


def test_a_call_comes_before_python_waits_for_threads() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "a thread ends: True\natexit\n"


def test_without_the_hook_there_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(threading, "_register_atexit")
    interpreter.call_before_threads_end(pytest.fail)


def test_another_thread_sees_the_main_threads_frame() -> None:
    with ThreadPoolExecutor(1) as executor:
        frame = executor.submit(interpreter.main_frame).result()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "test_another_thread_sees_the_main_threads_frame" in names


def test_without_frames_of_other_threads_a_heartbeat_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_current_frames")
    assert user_code_line() == ""
