"""Threads that `save` waits for have short time slices, and threads that they start do not."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.runtime import interpreter
from flowstone.runtime.signal_shield import SignalShield
from flowstone.store.memory.node_memory import NodeMemory
from memory_agent import agent_process, own_agent

_NUMBERS = {"x86_64": 315, "aarch64": 275}  # of sched_getattr(2)
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def _slice_ns(thread: int = 0) -> int:
    """Of a thread's turns."""
    string_buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = ctypes.c_long(_NUMBERS[os.uname().machine])
    assert ctypes.CDLL(None).syscall(number, thread, string_buffer, _ATTRIBUTES.size, 0) == 0
    return int(_ATTRIBUTES.unpack(string_buffer.raw)[5])


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
    usual, collected = _slice_ns(), list[int]()

    def act() -> None:
        collected.append(_slice_ns())
        thread = threading.Thread(target=lambda: collected.append(_slice_ns()))
        thread.start()
        thread.join()
        read, write = os.pipe()
        if not os.fork():
            os.write(write, b"%d" % _slice_ns())
            os._exit(0)
        os.wait()
        collected.append(int(os.read(read, 100)))
        os.close(read)
        os.close(write)

    acts = SignalShield()
    acts.run(act, first=lambda: None)
    acts.end()
    assert collected == [interpreter.SLICE_NS, usual, usual]
    assert _slice_ns() == usual, "that of the caller stays"


def test_the_memory_agent_has_short_turns(agent: Path) -> None:
    store = NodeMemory("run")
    store.make_directory()
    assert _slice_ns(agent_process(agent)) == interpreter.SLICE_NS
    store.close()


def test_a_thread_in_another_class_stays_in_it() -> None:
    collected: list[object] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        collected.append(interpreter.request_short_slice())
        collected.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert collected == [False, os.SCHED_BATCH]


def test_a_sandbox_that_refuses_to_tell_the_class_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", refused)
    assert not interpreter.request_short_slice()
