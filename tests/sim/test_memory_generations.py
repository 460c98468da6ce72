"""A trainer is cut off from the memory agent at each request, and a flush from its target at each change.

The agent runs its real code (agent/sessions.py, runs.py), only without the socket. After each cut the promises of
docs/ORDERING.md hold.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager, suppress
from unittest import mock

import msgspec
import pytest
import torch
from test_store_simulation import Connection, FaultInjectingStore

import flowstone as fs
from flowstone.agent.runs import MemoryRun, MemoryRuns
from flowstone.agent.sessions import Session
from flowstone.commit import catalog, publish
from flowstone.errors import FlowstoneError, FullError, MemoryAgentError, StorageError
from flowstone.store.base import Store
from flowstone.store.memory.agent_wire import (
    PROTOCOL,
    AgentRequest,
    AgentResponse,
    RunStatus,
    decode_answer,
    decode_request,
    encode,
)
from flowstone.store.memory.node_memory import NodeMemory
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.tiered.newest import copy_newest

ELEMENTS = 600_000
AVAILABLE = 1 << 33


class Node:
    """A node's agent, without a socket. It counts what clients ask; at number `cut_at` the asking one is killed.

    after   it is killed once the agent has done what it asked for
    """

    def __init__(self, cut_at: int | None = None, *, after: bool = False) -> None:
        self.runs, self.cut_at, self.after, self.requests = MemoryRuns(lambda: AVAILABLE), cut_at, after, 0
        self.agent_dies_at: int | None = None
        self.both_die_at: int | None = None
        self.are_dead = False

    def die(self) -> None:
        """The agent is killed: the one that is started then holds nothing."""
        self.runs = MemoryRuns(lambda: AVAILABLE)

    def die_both(self) -> None:
        """Agent and trainer are killed at one instant: no session's end is seen, and nothing is held."""
        self.die()
        self.are_dead = True

    def flush(self, run: MemoryRun) -> bool:
        return False

    def statuses(self) -> tuple[RunStatus, ...]:
        return ()


class Client:
    """Stands for an AgentClient; `dead` once its process was killed."""

    def __init__(self, node: Node, run: str) -> None:
        self.run, self.lost_message, self.dead, self._node = run, "", False, node
        self.connections = 0
        self._ours, _ = socket.socketpair()
        self._connect()
        self._released: list[int] = []
        self._guard = threading.RLock()

    def _connect(self) -> None:
        self.connections += 1
        self.is_joined = True
        self.session = Session(self._ours, 0, self._node.runs, self._node)
        self.session.answer(AgentRequest("hello", self.run, number=PROTOCOL), [])

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._guard:
            yield

    def find_agent(self) -> bool:
        return self.is_joined and not self.dead

    is_connected = find_agent

    def forget_loss(self) -> None:
        self.lost_message = ""

    def request(
        self, request: AgentRequest, fd: int | None = None, *, start: bool = False
    ) -> tuple[AgentResponse, int | None]:
        with self._guard:
            if not self.is_joined and start:
                self._connect()
            if not self.is_joined:
                raise MemoryAgentError(self.lost_message)
            return self._ask(request, fd)

    def _ask(self, request: AgentRequest, fd: int | None) -> tuple[AgentResponse, int | None]:
        if self.dead or self._node.are_dead:
            raise MemoryAgentError("the trainer is dead")
        if self._node.requests == self._node.both_die_at:
            self._node.requests += 1
            self._node.die_both()
            raise MemoryAgentError("the trainer is dead")
        while self._released:
            self.session.answer(AgentRequest("release", number=self._released.pop()), [])
        is_last = self._node.requests == self._node.cut_at
        is_agents_end = self._node.requests == self._node.agent_dies_at
        self._node.requests += 1
        if is_agents_end:
            if self._node.after:
                self.session.answer(request, [] if fd is None else [os.dup(fd)])
            self._node.die()
            self.is_joined, self.lost_message = False, "the memory agent (process 1) has ended"
            self._released.clear()
            raise MemoryAgentError(self.lost_message)
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
        self.session.run.remove_drafts()

    def release_later(self, number: int) -> None:
        self._released.append(number)

    def close(self) -> None:
        if not self.dead:
            self.die()
        self._ours.close()


def _store(node: Node) -> NodeMemory:
    with mock.patch("flowstone.store.memory.node_memory.AgentClient", lambda run: Client(node, run)):
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
    for index in range(count):
        node = Node(index, after=after)
        committed, begun = _train(node, range(1, 4))
        if not committed and not catalog.steps(_store(node)):
            continue
        _check(node, committed, begun)
        newest = catalog.steps(_store(node))[-1]
        again, _ = _train(node, range(newest + 1, newest + 2))
        assert again == newest + 1, "the next trainer goes on"
        _check(node, again, again)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_agent_that_is_killed_at_any_request_costs_the_saves_under_way_and_no_later_one(after: bool) -> None:
    count = _whole()
    for index in range(count):
        node = Node(after=after)
        node.agent_dies_at = index
        engine = fs.EngineOptions(request_bytes=2 << 20, workers=1)
        failed = []
        with fs.Checkpointer(_store(node), on_error="continue", budget_bytes=16 << 20, engine=engine) as checkpointer:
            for step in range(1, 6):
                try:
                    checkpointer.save(step, _state(step)).committed.result()
                except FlowstoneError as error:
                    failed.append((step, error))
            assert len(failed) <= 1, failed
            assert all("agent" in str(error) or "lock" in str(error) for _, error in failed), failed
            assert not failed or failed[0][0] < 5
            checkpointer.wait()
            _check(node, 5, 5)


def _durable(contents: SharedMemoryDirectory, *, atomic_rename: bool) -> MemoryStore:
    """What outlives the node."""
    disk = MemoryStore(contents, location="disk", atomic_rename=atomic_rename)
    disk.capabilities = msgspec.structs.replace(disk.capabilities, volatile=False)
    return disk


class _Disk(Connection):
    """The farther tier, which ends with the trainer, and whose changes end both."""

    def __init__(self, node: Node, position: int | None = None, *, after: bool = False) -> None:
        super().__init__(position, after=after)
        self._node = node

    def store(
        self, contents: SharedMemoryDirectory, *, atomic_rename: bool, location: str = "disk"
    ) -> FaultInjectingStore:
        return FaultInjectingStore(_durable(contents, atomic_rename=atomic_rename), self._before, self._after)

    def _before(self, verb: str, path: str) -> StorageError | None:
        self.is_cut = self.is_cut or self._node.are_dead
        return self._told(super()._before(verb, path))

    def _after(self, verb: str, path: str) -> StorageError | None:
        return self._told(super()._after(verb, path))

    def _told(self, error: StorageError | None) -> StorageError | None:
        if self.is_cut and not self._node.are_dead:
            self._node.die_both()
        return error


def _train_with_a_disk(
    node: Node, disk: _Disk, target: SharedMemoryDirectory, steps: range, *, atomic_rename: bool
) -> tuple[int, int]:
    """The last step that was durable, and the last that was begun."""
    durable = begun = steps.start - 1
    stores = [_store(node), fs.Tier(disk.store(target, atomic_rename=atomic_rename), drain_s=0.0)]
    engine = fs.EngineOptions(request_bytes=2 << 20, workers=1)
    checkpointer = fs.Checkpointer(stores, on_error="continue", budget_bytes=120 << 20, engine=engine)
    with suppress(FlowstoneError):
        for step in steps:
            begun = step
            save = checkpointer.save(step, _state(step))
            while not save.durable.done() and not node.are_dead:
                wait_futures([save.durable], timeout=0.01)
            if node.are_dead:
                break
            save.durable.result()
            durable = step
    with suppress(FlowstoneError):
        checkpointer.close()
    return durable, begun


def _kill_both(atomic_rename: bool, *, every: int) -> None:
    """At each `every`-th of the agent's requests and of the disk's changes."""
    node = Node()
    disk = _Disk(node)
    assert _train_with_a_disk(node, disk, SharedMemoryDirectory(), range(1, 4), atomic_rename=atomic_rename) == (3, 3)
    assert disk.count > 15
    played = [(index, None, False) for index in range(node.requests)]
    played += [(None, index, after) for index in range(disk.count) for after in (False, True)]
    ends = set()
    for request, change, after in played[:: every]:
        node, target = Node(), SharedMemoryDirectory()
        node.both_die_at = request
        disk = _Disk(node, change, after=after)
        durable, begun = _train_with_a_disk(node, disk, target, range(1, 4), atomic_rename=atomic_rename)
        if node.are_dead:  # else it was one of the last, which come in any order
            ends.add((durable, _newest_on(target, durable, begun, atomic_rename=atomic_rename), begun))
    assert {durable for durable, _, _ in ends} >= {0, 1, 2}, "kills fall between all steps"


def _newest_on(target: SharedMemoryDirectory, durable: int, begun: int, *, atomic_rename: bool) -> int:
    """What the next job loads, and that it goes on."""
    target.writer = None  # the process that had the lock is dead
    node, disk = Node(), _durable(target, atomic_rename=atomic_rename)
    with fs.Checkpointer([_store(node), fs.Tier(disk)], budget_bytes=120 << 20) as checkpointer:
        latest, state = checkpointer.latest(), _state(0)
        step = 0 if latest is None else checkpointer.load(state).step
        assert durable <= step <= begun
        assert latest is None or (state["weights"] == step).all(), "a mixture"  # type: ignore[attr-defined]
        checkpointer.save(begun + 1, _state(begun + 1)).durable.result(60)
    for committed in catalog.steps(disk):
        assert fs.open(disk, step=committed).inspect().sound
    return step


@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
def test_agent_and_trainer_that_are_killed_at_once_leave_what_was_durable_or_the_next(atomic_rename: bool) -> None:
    _kill_both(atomic_rename, every=7)


@pytest.mark.soak
@pytest.mark.parametrize("atomic_rename", [True, False], ids=["rename", "put"])
def test_agent_and_trainer_that_are_killed_at_once_at_any_request(atomic_rename: bool) -> None:
    _kill_both(atomic_rename, every=1)


def test_an_agent_that_removes_the_newest_generation_first_is_found_out() -> None:
    def begin_draft(run: MemoryRun) -> None:
        for name in [name for name in run.contents.names() if name.startswith("step-")]:
            run.remove_all(name)

    def play() -> None:
        for index in range(_whole()):
            node = Node(index)
            _check(node, *_train(node, range(1, 4)))

    with mock.patch.object(MemoryRun, "begin_draft", begin_draft), pytest.raises(AssertionError):
        play()


def test_memory_that_another_client_may_still_write_into_is_found_out_if_it_is_given_away() -> None:
    runs = MemoryRuns(lambda: AVAILABLE)
    run, first, other = runs.of("run"), object(), object()
    run.contents.make_directory()
    run.contents.make_directory(".saving-00000001-a")
    file = run.allocate(2 << 20, first)
    run.contents.add(".saving-00000001-a/rank-00000.safetensors", file)
    run.release_unused(run.contents.remove(".saving-00000001-a/rank-00000.safetensors"))
    assert run.pool == [file]
    assert run.allocate(2 << 20, other) is not file
    assert run.allocate(2 << 20, first) is file


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
    position = 0
    while True:
        target, connection = SharedMemoryDirectory(), Connection(position, after=after)
        _flush_first(source, target, atomic_rename=atomic_rename)
        with suppress(StorageError):
            copy_newest(source, connection.store(target, atomic_rename=atomic_rename), "a flush")
        store = MemoryStore(target, atomic_rename=atomic_rename)
        target.writer = None  # the process that had the lock is dead
        steps = catalog.steps(store)
        assert steps in ((1,), (1, 2))
        for step in steps:
            assert fs.open(store, step=step).inspect().sound
        copied = copy_newest(source, store, "the next flush")
        assert copied is not None
        assert copied.step == 2
        assert not [name for name in store.names() if name.startswith(".saving")], "the next flush sweeps"
        assert store.read("step-00000002/manifest.json") == source.read("step-00000002/manifest.json")
        if not connection.is_cut:
            break
        position += 1
    assert position >= 7


def _flush_first(source: MemoryStore, target: SharedMemoryDirectory, *, atomic_rename: bool) -> None:
    """Step 1, as an earlier flush has left it."""
    first = MemoryStore()
    first.make_directory()
    first.put("flowstone.json", source.read("flowstone.json"))
    first.make_directory("step-00000001")
    for name in source.names("step-00000001"):
        first.put(f"step-00000001/{name}", source.read(f"step-00000001/{name}"))
    copy_newest(first, MemoryStore(target, atomic_rename=atomic_rename), "an earlier flush")


def test_what_is_damaged_in_memory_is_not_made_durable() -> None:
    source, target = _damaged(), MemoryStore()
    with pytest.raises(fs.DamagedError, match=r"step-00000001/rank-00000\.safetensors.* is damaged"):
        copy_newest(source, target, "a flush")
    assert catalog.steps(target) == ()


def _damaged() -> MemoryStore:
    source = MemoryStore()
    with fs.Checkpointer(source) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
    file = source.contents.files["step-00000001/rank-00000.safetensors"]
    os.pwrite(file.fd, b"\x77", file.size_bytes - 9000)
    return source


class _Forgetting(MemoryStore):
    """Once a segment is written, it gives back something else, as a disk may."""

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        for name, file in self.contents.files.items():
            if name.endswith(".safetensors") and file.size_bytes > 1 << 20:
                os.pwrite(file.fd, b"\x77", file.size_bytes - 9000)


def test_what_a_disk_does_not_give_back_is_not_published() -> None:
    source, target = MemoryStore(), _Forgetting()
    with fs.Checkpointer(source) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
    with pytest.raises(fs.DamagedError, match="returns bytes that differ from the bytes written for step 1"):
        copy_newest(source, target, "a flush")
    assert catalog.steps(target) == ()
    assert not [name for name in target.names() if name.startswith(".saving")]
    with mock.patch("flowstone.tiered.flush._read_back"):
        copy_newest(source, target, "a flush that does not look")
    assert not fs.open(target).inspect().sound


def test_a_flush_goes_on_when_what_names_the_files_is_gone() -> None:
    """As when the agent is killed while its child flushes: all files are open before the first byte is copied."""
    source, target = MemoryStore(), MemoryStore()
    with fs.Checkpointer(source) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
    begin = publish.begin_draft

    def agent_dies(store: Store, step: int, draft: str) -> publish.Draft:
        if store is target:
            for name in [name for name in source.names() if name]:
                source.contents.remove_all(name)
        return begin(store, step, draft)

    with mock.patch("flowstone.commit.publish.begin_draft", agent_dies):
        assert copy_newest(source, target, "a flush") is not None
    assert not catalog.steps(source)
    assert fs.open(target).inspect().sound
