"""A trainer is cut off from the memory agent at each request, and a flush from its target at each change.

What the agent does is what it does in its own process (agent/sessions.py, runs.py); only the socket is left out. After
each cut the promises of docs/ORDERING.md hold.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch
from test_store_simulation import Connection

import flowstone as fs
from flowstone.agent.runs import Run, Runs
from flowstone.agent.sessions import Session
from flowstone.commit import catalog
from flowstone.commit.copying import copy_newest
from flowstone.errors import FlowstoneError, FullError, MemoryAgentError, StorageError
from flowstone.store.agent_wire import PROTOCOL, Answer, Request, RunStatus, decode_answer, decode_request, encode
from flowstone.store.memory import Contents, MemoryStore
from flowstone.store.node_memory import NodeMemory

ELEMENTS = 600_000
AVAILABLE = 1 << 33


class Node:
    """A node's agent, without a socket. It counts what clients ask; at number `cut_at` the asking one is killed.

    after   it is killed once the agent has done what it asked for
    """

    def __init__(self, cut_at: int | None = None, *, after: bool = False) -> None:
        self.runs, self.cut_at, self.after, self.requests = Runs(lambda: AVAILABLE), cut_at, after, 0

    def flush(self, run: Run) -> bool:
        return False

    def statuses(self) -> tuple[RunStatus, ...]:
        return ()


class Client:
    """Stands for an AgentClient; `dead` once its process was killed."""

    def __init__(self, node: Node, run: str) -> None:
        self.run, self.ended, self.dead, self._node = run, "", False, node
        self._ours, _ = socket.socketpair()
        self.session = Session(self._ours, 0, node.runs, node)
        self.session.answer(Request("hello", run, number=PROTOCOL), [])
        self._released: list[int] = []
        self._guard = threading.RLock()

    @contextmanager
    def acting(self) -> Iterator[None]:
        with self._guard:
            yield

    def is_there(self) -> bool:
        return not self.dead

    def ask(self, request: Request, fd: int | None = None, *, start: bool = False) -> tuple[Answer, int | None]:
        with self._guard:
            return self._ask(request, fd)

    def _ask(self, request: Request, fd: int | None) -> tuple[Answer, int | None]:
        if self.dead:
            raise MemoryAgentError("the trainer is dead")
        while self._released:
            self.session.answer(Request("release", number=self._released.pop()), [])
        is_last = self._node.requests == self._node.cut_at
        self._node.requests += 1
        if is_last and not self._node.after:
            self.die()
            raise MemoryAgentError("the trainer is dead")
        passed = [] if fd is None else [os.dup(fd)]
        answer, received = self.session.answer(decode_request(encode(request)), passed)
        answer = decode_answer(encode(answer))
        if is_last:
            self.die()
            raise MemoryAgentError("the trainer is dead")
        if answer.full:
            raise FullError("not enough memory", errno=errno.ENOSPC)
        if answer.errno:
            raise OSError(answer.errno, answer.error)
        return answer, received

    def die(self) -> None:
        """As the server does when a connection ends, the last one that writes."""
        self.dead = True
        self.session.end()
        assert self.session.run is not None
        self.session.run.sweep()

    def release_later(self, number: int) -> None:
        self._released.append(number)

    def close(self) -> None:
        if not self.dead:
            self.die()
        self._ours.close()


def _store(node: Node) -> NodeMemory:
    with mock.patch("flowstone.store.node_memory.AgentClient", lambda run: Client(node, run)):
        return NodeMemory("run")


def _state(step: int) -> dict[str, object]:
    return {"weights": torch.full((ELEMENTS,), float(step)), "step": step}


def _train(node: Node, steps: range) -> tuple[int, int]:
    """The last step that was committed, and the last that was begun."""
    committed = begun = steps.start - 1
    engine = fs.EngineOptions(request_bytes=2 << 20, workers=1)
    checkpointer = fs.Checkpointer(_store(node), on_error="continue", budget_bytes=16 << 20, engine=engine)
    with suppress(FlowstoneError):
        for step in steps:
            begun = step
            checkpointer.save(step, _state(step)).committed.result()
            committed = step
    with suppress(FlowstoneError):
        checkpointer.close()
    return committed, begun


def _check(node: Node, committed: int, begun: int) -> None:
    """The previous or the next generation is there, whole; and memory is held for no more than two."""
    store = _store(node)
    steps = catalog.steps(store)
    assert len(steps) <= 2
    assert not steps or steps[-1] <= begun
    if committed:
        assert steps, "nothing is left"
        assert steps[-1] >= committed
    checkpoint = None
    for step in steps:
        checkpoint = fs.open(store, step=step)
        assert checkpoint.inspect().sound
        assert (checkpoint.read("weights") == step).all(), "a mixture"
    run = node.runs.of("run")
    del checkpoint
    segments = [file for file in run.files.values() if file.size_bytes > 1 << 20]
    assert len(segments) <= 2, "what a killed trainer was writing is used again"
    store.close()


def _whole() -> int:
    node = Node()
    committed, _ = _train(node, range(1, 4))
    assert committed == 3
    return node.requests


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_trainer_that_is_killed_at_any_request_leaves_the_previous_generation_or_the_next(after: bool) -> None:
    count = _whole()
    assert count > 30
    for at in range(count):
        node = Node(at, after=after)
        committed, begun = _train(node, range(1, 4))
        if not committed and not catalog.steps(_store(node)):
            continue
        _check(node, committed, begun)
        newest = catalog.steps(_store(node))[-1]
        again, _ = _train(node, range(newest + 1, newest + 2))
        assert again == newest + 1, "the next trainer goes on"
        _check(node, again, again)


def test_an_agent_that_removes_the_newest_generation_first_is_found_out() -> None:
    def begin_draft(run: Run) -> None:
        for name in [name for name in run.contents.names() if name.startswith("step-")]:
            run.remove_all(name)

    def play() -> None:
        for at in range(_whole()):
            node = Node(at)
            _check(node, *_train(node, range(1, 4)))

    with mock.patch.object(Run, "begin_draft", begin_draft), pytest.raises(AssertionError):
        play()


def test_memory_that_another_client_may_still_write_into_is_found_out_if_it_is_given_away() -> None:
    runs = Runs(lambda: AVAILABLE)
    run, one, other = runs.of("run"), object(), object()
    run.contents.make_directory()
    run.contents.make_directory(".saving-00000001-a")
    file = run.take(2 << 20, one)
    run.contents.add(".saving-00000001-a/rank-00000.safetensors", file)
    run.settle(run.contents.remove(".saving-00000001-a/rank-00000.safetensors"))
    assert run.pool == [file]
    assert run.take(2 << 20, other) is not file
    assert run.take(2 << 20, one) is file


# A flush


@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_flush_that_is_cut_off_at_any_change_leaves_the_step_before_or_the_new_one(
    after: bool, atomic_rename: bool
) -> None:
    source = MemoryStore()
    with fs.Checkpointer(source) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
        checkpointer.save(2, _state(2)).committed.result()
    at = 0
    while True:
        target, connection = Contents(), Connection(at, after=after)
        _flush_first(source, target, atomic_rename=atomic_rename)
        with suppress(StorageError):
            copy_newest(source, connection.store(target, atomic_rename=atomic_rename), "a flush")
        found = MemoryStore(target, atomic_rename=atomic_rename)
        target.writer = None  # the process that had the lock is dead
        steps = catalog.steps(found)
        assert steps in ((1,), (1, 2))
        for step in steps:
            assert fs.open(found, step=step).inspect().sound
        copied = copy_newest(source, found, "the next flush")
        assert copied is not None
        assert copied.step == 2
        assert [name for name in found.names() if name.startswith(".")] == [], "the next flush sweeps"
        assert found.read("step-00000002/manifest.json") == source.read("step-00000002/manifest.json")
        if not connection.is_cut:
            break
        at += 1
    assert at >= 7


def _flush_first(source: MemoryStore, target: Contents, *, atomic_rename: bool) -> None:
    """Step 1, as an earlier flush has left it."""
    first = MemoryStore()
    first.make_directory()
    first.put("flowstone.json", source.read("flowstone.json"))
    first.make_directory("step-00000001")
    for name in source.names("step-00000001"):
        first.put(f"step-00000001/{name}", source.read(f"step-00000001/{name}"))
    copy_newest(first, MemoryStore(target, atomic_rename=atomic_rename), "an earlier flush")


def test_a_flush_that_verifies_nothing_is_found_out() -> None:
    source, target = MemoryStore(), MemoryStore()
    with fs.Checkpointer(source) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
    file = source.contents.files["step-00000001/rank-00000.safetensors"]
    os.pwrite(file.fd, b"\x77", file.size_bytes - 9000)
    with pytest.raises(fs.DamagedError, match="is not what was saved"):
        copy_newest(source, target, "a flush")
    assert catalog.steps(target) == ()
    with mock.patch("flowstone.commit.copying._verify"):
        copy_newest(source, target, "a flush")
    assert not fs.open(target).inspect().sound
