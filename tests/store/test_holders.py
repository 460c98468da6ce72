"""Holders of locks, as real processes: a live holder is refused at once, and an ending one is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowstone.config import LOCK_GRACE_S
from flowstone.errors import LockedError
from flowstone.store import holders
from flowstone.store.base import Store
from flowstone.store.holders import machine_and_process, process_state
from flowstone.store.local import LocalStore
from flowstone.store.lock import LOCK_NAME
from flowstone.store.memory.node_memory import NodeMemory
from flowstone.store.peers.store import PeerMemory
from memory_agent import own_agent
from peer_nodes import HERE, SECRET

_HOLD = f"""
import ctypes, sys, threading
from flowstone.store.holders import machine_and_process
from flowstone.store.local import LocalStore
from flowstone.store.memory.node_memory import NodeMemory
from flowstone.store.peers.store import PeerMemory
kind, place = sys.argv[1:]
if kind == "disk":
    store = LocalStore(place)
elif kind == "memory":
    store = NodeMemory(place)
else:
    store = PeerMemory(place, secret={SECRET!r}, interface={HERE!r})
store.make_directory()
store.lock("the first job")
print(machine_and_process()[1], flush=True)
sys.stdin.readline()
threading.Thread(target=threading.Event().wait, daemon=True).start()
ctypes.CDLL(None).syscall({{"x86_64": 60, "aarch64": 93}}[__import__("platform").machine()], 0)
"""
# The last call ends the main thread alone: so a process that dies looks while its memory is given back.


@contextmanager
def _holder(kind: str, place: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the lock, and what tells it from others; a line to it has it begin to end, and no more."""
    command = [sys.executable, "-c", _HOLD, kind, place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def _begin_to_end(process: subprocess.Popen[str], message: str) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while process_state(machine_and_process()[0], message) == "alive":
        os.sched_yield()


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, Store]]:
    """A kind of store, its place, and this process's own opening of it."""
    kind = request.param
    with own_agent():
        place = str(tmp_path / "store") if kind == "disk" else "run"
        store: Store
        if kind == "disk":
            store = LocalStore(place)
        elif kind == "memory":
            store = NodeMemory(place)
        else:
            store = PeerMemory(place, secret=SECRET, interface=HERE)
        store.make_directory()
        yield kind, place, store
        store.close()


def _waits(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[str] | None) -> list[float]:
    """The waits for a lock; the first one kills the process, if there is one. Their clock is moved by them alone."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        if process is None:
            waits.append(seconds)
            return
        if not waits:
            process.kill()
            process.wait()
        waits.append(0)
        time.sleep(seconds)  # the agent is told of it by the kernel

    monkeypatch.setattr(holders, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=sleep))
    return waits


_KINDS = pytest.mark.parametrize("opened", ["disk", "memory", "peers"], indirect=True)


@_KINDS
def test_a_lock_is_waited_for_while_its_holder_dies(
    opened: tuple[str, str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, place, store = opened
    with _holder(kind, place) as (process, reported):
        _begin_to_end(process, reported)
        waits = _waits(monkeypatch, process)
        store.lock("the second job")
        assert waits, "it was held when it was first asked for"
        store.check_lock()


@_KINDS
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_holder_that_is_alive_refuses_without_a_wait(
    opened: tuple[str, str, Store], is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, place, store = opened
    with _holder(kind, place) as (process, _):
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        waits = _waits(monkeypatch, None)
        with pytest.raises(LockedError, match="the first job") as caught:
            store.lock("the second job")
        assert not waits
        assert caught.value.facts["found"] == "the holder is alive"


def test_a_holder_on_another_machine_refuses_by_name_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _holder("disk", str(tmp_path)), _local(tmp_path) as store:
        lines = (tmp_path / LOCK_NAME).read_text().split("\n")
        (tmp_path / LOCK_NAME).write_text("\n".join([lines[0], "another machine", *lines[2:]]))
        waits = _waits(monkeypatch, None)
        with pytest.raises(LockedError, match="the first job") as caught:
            store.lock("the second job")
        assert LOCK_GRACE_S <= sum(waits) < LOCK_GRACE_S + 1
        assert "cannot be seen from here" in str(caught.value.facts["found"])


@contextmanager
def _local(path: Path) -> Iterator[LocalStore]:
    store = LocalStore(path)
    yield store
    store.close()


def test_a_process_that_has_the_number_of_a_dead_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    machine, process = machine_and_process()
    pid, _, began = process.partition(" ")
    assert process_state(machine, process) == "alive"
    assert process_state(machine, f"{pid} {int(began) - 1}") == "dead"


def test_what_is_known_of_a_process_until_its_end(tmp_path: Path) -> None:
    machine = machine_and_process()[0]
    with _holder("disk", str(tmp_path)) as (process, reported):
        assert process_state(machine, reported) == "alive"
        assert process_state("another machine", reported) == "unknown"
        _begin_to_end(process, reported)
        assert process_state(machine, reported) == "dying"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(machine, reported) == "dead", "its status alone is left"
        process.wait()
        assert process_state(machine, reported) == "dead"
