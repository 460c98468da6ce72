"""Threads that `save` waits for have short turns on the processor, and nothing that they start has."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_agent import agent_process, own_agent

from flowstone.runtime import time_slice
from flowstone.runtime.uninterrupted import Acts
from flowstone.store.node_memory import NodeMemory

_NUMBERS = {"x86_64": 315, "aarch64": 275}  # of sched_getattr(2)
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def _slice_ns(thread: int = 0) -> int:
    """Of a thread's turns."""
    told = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = ctypes.c_long(_NUMBERS[os.uname().machine])
    assert ctypes.CDLL(None).syscall(number, thread, told, _ATTRIBUTES.size, 0) == 0
    return int(_ATTRIBUTES.unpack(told.raw)[5])


def _refusal() -> str:
    if os.uname().machine not in _NUMBERS:
        return f"the number of sched_getattr(2) on {os.uname().machine} is not known here"
    return "" if _slice_ns() else f"Linux {os.uname().release} has turns of one length: it needs 6.12"


pytestmark = pytest.mark.skipif(bool(_refusal()), reason=_refusal())


@pytest.fixture
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


def test_acts_have_short_turns_and_threads_and_processes_that_they_start_have_not() -> None:
    usual, found = _slice_ns(), list[int]()

    def act() -> None:
        found.append(_slice_ns())
        thread = threading.Thread(target=lambda: found.append(_slice_ns()))
        thread.start()
        thread.join()
        read, write = os.pipe()
        if not os.fork():
            os.write(write, b"%d" % _slice_ns())
            os._exit(0)
        os.wait()
        found.append(int(os.read(read, 100)))
        os.close(read)
        os.close(write)

    acts = Acts()
    acts.do(act, first=lambda: None)
    acts.end()
    assert found == [time_slice.SLICE_NS, usual, usual]
    assert _slice_ns() == usual, "that of the caller stays"


def test_the_memory_agent_has_short_turns(agent: Path) -> None:
    store = NodeMemory("run")
    store.make_directory()
    assert _slice_ns(agent_process(agent)) == time_slice.SLICE_NS
    store.close()


def test_a_thread_in_another_class_stays_in_it() -> None:
    found: list[object] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        found.append(time_slice.shorten())
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, os.SCHED_BATCH]


def test_a_sandbox_that_refuses_to_tell_the_class_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", refused)
    assert not time_slice.shorten()
