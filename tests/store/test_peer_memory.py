"""The memory of several nodes as one store: the contract of every store, with two agents; places; refused peers."""

from __future__ import annotations

import errno
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from contract import StoreContract

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import LockedError, StorageError
from flowstone.store.peers.erasure import is_available
from flowstone.store.peers.node import Node, NodeLink
from flowstone.store.peers.store import PeerMemory
from flowstone.store.peers.wire import PeerRequest
from memory_agent import agent_process, kill
from peer_nodes import Nodes, several_nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with several_nodes(2) as both:
        yield both


class TestPeerMemory(StoreContract):
    """On two nodes, each of which keeps a copy of the other's files."""

    run = "contract"
    how: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: Nodes, kept: list[PeerMemory]) -> Iterator[None]:
        self.nodes = nodes
        self.opened: list[PeerMemory] = []
        yield
        for store in self.opened:
            store.close()
        for node in kept[0]._peers.nodes:
            assert node.link.request(PeerRequest("lock", text="the end")).yes
            _empty(node)
            node.link.request(PeerRequest("unlock"))

    @pytest.fixture(scope="class")
    def kept(self, nodes: Nodes) -> list[PeerMemory]:
        """Open for as long, so that the servers stay."""
        return nodes.stores(self.run, **self.how)

    @pytest.fixture
    def store(self, root: Path, request: pytest.FixtureRequest) -> PeerMemory:
        """Locked: nothing is changed there without."""
        store = self.open_store(root)
        store.make_directory()
        if "one_writer" not in request.node.name:
            store.lock("the job")
        return store

    def open_store(self, root: Path) -> PeerMemory:
        self.opened += (both := self.nodes.stores(self.run, **self.how))
        return both[0]

    def location(self, root: Path) -> str:
        return f"memory://{self.run}"


@pytest.mark.skipif(not is_available(), reason="ISA-L is not installed: pip install 'flowstone[parity]'")
class TestPeerMemoryWithParity(TestPeerMemory):
    """The same with parity."""

    run = "contract-parity"
    how: ClassVar[dict[str, Any]] = {"replicas": None, "parity": (1, 1)}


# What is on which node


@pytest.fixture
def pair(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[list[PeerMemory]]:
    both = nodes.stores(re.sub(r"\W", "-", request.node.name))
    yield both
    for store in both:
        store.close()


def _names(store: PeerMemory, path: str = "") -> list[tuple[str, ...]]:
    """On each node."""
    return [_link(store, node).request(PeerRequest("names", path)).names for node in range(2)]


def _link(store: PeerMemory, node: int) -> NodeLink:
    """A connection of its own: the store's threads use theirs."""
    return store._peers.link_of(node).link


def _lose(store: PeerMemory, node: int, path: str) -> None:
    """A file of a checkpoint, on one node: by the connection that holds the lock."""
    with store._peers._guard:
        store._peers.nodes[node].link.request(PeerRequest("remove", path))


def test_what_is_saved_is_on_both_nodes_when_it_is_committed_and_says_where(pair: list[PeerMemory]) -> None:
    first, second = pair
    with fs.Checkpointer(first) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": np.full(100_000, step), "step": step}).committed.result()
        assert _names(first, "step-00000003")[0] == _names(first, "step-00000003")[1]
        assert len(_names(first, "step-00000003")[0]) == 4
        copies = first.copies(3)
        assert all(len(set(places)) == 2 for places in copies.values())
        assert catalog.steps(second) == (2, 3)
        assert set(fs.open(second).read("w", framework="numpy").tolist()) == {3}


def test_copies_are_made_at_the_rate_that_was_given_and_nothing_but_the_commit_waits_for_them(nodes: Nodes) -> None:
    rate = 4e6
    stores = nodes.stores("paced", bytes_per_s=rate)
    with fs.Checkpointer(stores[0]) as checkpointer:
        save = checkpointer.save(1, {"w": np.zeros(1_000_000)})
        ends: dict[str, float] = {}
        for name, future in (("captured", save.captured), ("committed", save.committed)):
            future.add_done_callback(lambda _, name=name: ends.setdefault(name, time.monotonic()))
        save.committed.result()
    assert ends["committed"] - ends["captured"] > 0.4 * 8e6 / rate, "8 MB; some go at once"
    for store in stores[1:]:
        store.close()


def test_what_only_the_other_node_has_is_read_over_the_network_and_verified(pair: list[PeerMemory]) -> None:
    first, second = pair
    with fs.Checkpointer(first) as checkpointer:
        checkpointer.save(1, {"w": np.arange(3_000_000), "step": 1}).committed.result()
        _lose(first, 0, "step-00000001/rank-00000.safetensors")
        state = {"w": np.zeros(3_000_000, np.int64), "step": 0}
        assert checkpointer.load(state).bytes == 24_000_000
        assert np.array_equal(state["w"], np.arange(3_000_000))
        assert fs.open(second).verify().sound
        _lose(first, 1, "step-00000001/rank-00000.safetensors")
        assert checkpointer.latest() is None, "not whole"
        assert "rank-00000.safetensors" in first.missing_checkpoints()


def test_a_commit_that_one_node_refuses_is_undone_on_the_other(pair: list[PeerMemory]) -> None:
    store, _ = pair
    store.make_directory()
    store.lock("the job")
    store.make_directory(".saving-00000001-a")
    store._peers.nodes[1].link.request(PeerRequest("make_directory", "step-00000001"))
    with pytest.raises(StorageError) as caught:
        store.rename(".saving-00000001-a", "step-00000001")
    assert caught.value.errno == errno.EEXIST
    assert _names(store)[0] == (".saving-00000001-a",)


def test_an_agent_keeps_the_step_that_is_whole_together_though_it_has_a_newer_one(pair: list[PeerMemory]) -> None:
    store, _ = pair
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"w": np.zeros(1000), "step": 1}).committed.result()
        own = store._peers.nodes[0].link  # which holds the lock
        with store._peers._guard:
            own.request(PeerRequest("make_directory", "step-00000002"))  # as a rank 0 that dies in its commit leaves it
            own.request(PeerRequest("put", "step-00000002/manifest.json", payload_bytes=2), b"{}")
            for number in range(2):
                own.request(PeerRequest("make_directory", f".saving-00000003-{number}"))
            assert "step-00000001" in own.request(PeerRequest("names")).names
            for number in range(2):
                own.request(PeerRequest("remove", f".saving-00000003-{number}"))


def test_a_server_that_was_killed_is_started_again_by_the_next_save(pair: list[PeerMemory], nodes: Nodes) -> None:
    store, _ = pair
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"w": np.zeros(1000), "step": 1}).committed.result()
        for server in _servers(nodes.directories[0], store.run):
            kill(server, signal.SIGKILL)
        saved = []
        for step in (2, 3, 4):  # one may have begun before the agent has noticed
            with suppress(fs.StorageError, fs.LockedError, fs.SaveFailedError):
                checkpointer.save(step, {"w": np.zeros(1000), "step": step}).committed.result()
                saved.append(step)
        assert saved
        newest = checkpointer.latest()
        assert newest is not None
        assert newest.step == saved[-1]


def _servers(directory: Path, run: str) -> list[int]:
    agent = agent_process(directory)
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    servers = []
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            if run.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                servers.append(int(pid))
    return servers


def test_an_agent_outlives_the_end_of_a_run_that_it_has_served(nodes: Nodes) -> None:
    kept, gone = nodes.stores("kept", nodes=[0]), nodes.stores("gone", nodes=[0])
    kept[0].make_directory()
    agent = agent_process(nodes.directories[0])
    gone[0].close()
    deadline = time.monotonic() + 120.0
    while _servers(nodes.directories[0], "gone"):
        assert time.monotonic() < deadline, "its server ends with it"
        time.sleep(0.01)
    again = nodes.stores("gone", nodes=[0])
    assert agent_process(nodes.directories[0]) == agent
    assert kept[0].exists()
    for store in (*kept, *again):
        store.close()


def test_a_second_job_is_refused_by_the_lock_of_any_node(pair: list[PeerMemory]) -> None:
    first, second = pair
    first.make_directory()
    first.lock("the first job")
    with pytest.raises(LockedError, match="the first job"):
        second.lock("the second job")
    first.unlock()
    second.lock("the second job")
    with pytest.raises(LockedError, match="the second job"):
        first.check_lock()


def test_a_lost_node_fails_the_save_by_its_address_and_a_new_one_gets_all(nodes: Nodes) -> None:
    first, second = nodes.stores("lost")
    with fs.Checkpointer(first) as checkpointer:
        checkpointer.save(1, {"w": np.arange(1000), "step": 1}).committed.result()
        nodes.lose(1)
        with pytest.raises(fs.FlowstoneError, match=re.escape(first._peers.nodes[1].place.shown)):
            checkpointer.save(2, {"w": np.arange(1000), "step": 2}).committed.result()
    second.close()
    first, second = nodes.stores("lost")
    with fs.Checkpointer(second) as checkpointer:  # on the new node
        state = {"w": np.zeros(1000, np.int64), "step": 0}
        assert checkpointer.load(state).step == 1
        checkpointer.save(2, {"w": np.arange(1000), "step": 2}).committed.result()
        assert len(_names(second, "step-00000002")[1]) == 4
        assert "flowstone.json" in _names(second)[1]
    first.close()


def _empty(node: Node, path: str = "") -> None:
    for name in node.link.request(PeerRequest("names", path)).names:
        _empty(node, f"{path}/{name}" if path else name)
    if not path and not node.link.request(PeerRequest("exists")).yes:
        return
    node.link.request(PeerRequest("remove", path))
