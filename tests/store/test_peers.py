"""The messages between nodes of a job, refused peers and how, the places of copies, and complete steps."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from math import comb

import msgspec
import pytest

import flowstone as fs
from flowstone.agent.peers import PeerServer, PeerSession
from flowstone.config import PEER_STRANGERS_LOGGED_MAX, PEER_STRANGERS_MAX
from flowstone.errors import ArgumentError, PeerError
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.peers import wire
from flowstone.store.peers.interfaces import address_of
from flowstone.store.peers.node import NodeAddress, NodeLink
from flowstone.store.peers.parity import ParityContribution
from flowstone.store.peers.placement import groups, keepers
from flowstone.store.peers.view import FileSource, merge_inventories
from flowstone.store.peers.wire import (
    Channel,
    Greeting,
    Introduction,
    PeerInventory,
    PeerRequest,
    PeerResponse,
    StepInventory,
    greet,
    welcome,
)
from memory_agent import own_agent
from peer_nodes import HERE, SECRET, Nodes, several_nodes

KEY = SECRET.encode()
_DRAFT = ".saving-00000001-a"


# Placement


@pytest.mark.parametrize("nodes", range(1, 13))
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_each_node_is_kept_by_as_many_nodes_of_its_group_and_keeps_as_many(nodes: int, replicas: int) -> None:
    assert sorted(node for group in groups(nodes, replicas) for node in group) == list(range(nodes))
    kept = [keepers(node, nodes, replicas) for node in range(nodes)]
    assert all(entry[0] == node and len(set(entry)) == min(nodes, replicas) for node, entry in enumerate(kept))
    assert {sum(node in item for item in kept) for node in range(nodes)} == {min(nodes, replicas)}, "no one keeps more"


def is_survived(lost: frozenset[int], nodes: int, replicas: int) -> bool:
    """Whether, with these nodes lost at once, each node's checkpoint is still somewhere."""
    return all(not lost.issuperset(keepers(node, nodes, replicas)) for node in lost)


def survival(nodes: int, replicas: int, lost: int) -> float:
    """The share of all ways to lose `lost` nodes at once after which each checkpoint is still somewhere.

    Where `replicas` divides `nodes`, and fewer than 2 x replicas are lost, it is
    1 - (nodes / replicas) C(nodes - replicas, lost - replicas) / C(nodes, lost), which the paper calls near-optimal.
    """
    ways = combinations(range(nodes), lost)
    return sum(is_survived(frozenset(way), nodes, replicas) for way in ways) / comb(nodes, lost)


def test_two_replicas_on_sixteen_nodes_survive_as_often_as_the_paper_says() -> None:
    assert round(survival(16, 2, 2), 3) == 0.933
    assert round(survival(16, 2, 3), 3) == 0.800
    assert survival(16, 2, 1) == survival(5, 2, 1) == survival(7, 3, 2) == 1.0


@pytest.mark.parametrize("nodes", [4, 6, 8, 12])
def test_groups_survive_two_lost_nodes_more_often_than_a_ring(nodes: int) -> None:
    pairs = list(combinations(range(nodes), 2))
    ring = sum((b - a) % nodes not in (1, nodes - 1) for a, b in pairs) / len(pairs)
    assert survival(nodes, 2, 2) > ring or nodes == 4
    assert not is_survived(frozenset({0, 1}), nodes, 2)
    assert is_survived(frozenset({1, 2}), nodes, 2)


# The greeting


@contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: the client's first."""
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
            yield client, server


def _greeted(
    client_says: tuple[str, bytes], server_says: tuple[str, bytes]
) -> tuple[Channel | Exception, Channel | Exception, Iterator[None]]:
    """What each side has of the other, given run and secret of each."""
    pair = _pair()
    client, server = pair.__enter__()
    collected: list[Channel | Exception] = []

    def serve() -> None:
        try:
            collected.append(welcome(server, *server_says, "node-1"))
        except (PeerError, OSError, EOFError) as error:
            collected.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    mine: Channel | Exception
    try:
        mine = greet(client, *client_says, "the other node")
    except PeerError as error:
        mine = error
    thread.join()
    return mine, collected[0], pair  # type: ignore[return-value]


def test_nodes_of_one_job_exchange_messages_and_bytes() -> None:
    client, server, _kept = _greeted(("run", KEY), ("run", KEY))
    assert isinstance(client, Channel)
    assert isinstance(server, Channel)
    assert client.node == "node-1"
    for number in range(3):
        client.send(PeerRequest("look", f"file-{number}", payload_bytes=3))
        client.connection.sendall(b"abc")
        asked, target = server.receive(PeerRequest), bytearray(3)
        server.receive_into(memoryview(target))
        assert (asked.path, target) == (f"file-{number}", b"abc")
        server.send(PeerResponse(number=number))
        assert client.receive(PeerResponse).number == number


@pytest.mark.parametrize(("client", "words"), [
    (("run", b"another secret, as long as the first"), "the secrets of client and node differ"),
    (("other", KEY), "the client asks for memory://other, the node serves memory://run"),
])
def test_another_job_is_refused_by_name_on_both_sides(client: tuple[str, bytes], words: str) -> None:
    mine, other, _kept = _greeted(client, ("run", KEY))
    assert isinstance(mine, PeerError)
    assert isinstance(other, PeerError)
    assert words in mine.message
    assert words in other.message


def test_a_stranger_learns_nothing_of_the_run_without_the_secret() -> None:
    mine, _, _kept = _greeted(("other", b"another secret, as long as the first"), ("the-run", KEY))
    assert "the-run" not in str(mine)


def _framed(message: msgspec.Struct | Mapping[str, object]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def test_a_client_of_another_protocol_is_told_so_and_the_node_tells_its_log() -> None:
    with _pair() as (client, server):
        introduction = Introduction(9, "99.0", "run", b"n" * 16, b"p" * 32)
        client.sendall(_framed({**msgspec.structs.asdict(introduction), "new": 1}))
        with pytest.raises(PeerError, match=r"protocol 9 \(flowstone 99\.0\), not 2"):
            welcome(server, "run", KEY, "node")
        assert b"protocol 9" in client.recv(10_000)


def test_a_node_of_another_protocol_is_named_with_its_release() -> None:
    with _pair() as (client, server):
        server.sendall(b"flowstone peer\n" + _framed(Greeting(9, "99.0", b"n" * 16)))
        with pytest.raises(PeerError, match="uses another release") as caught:
            greet(client, "run", KEY, "10.0.0.3:7000")
        assert caught.value.facts["found"] == "protocol 9, flowstone 99.0"


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"flowstone peer\n\xff\xff\xff\xff", b""])
def test_what_is_no_node_is_told_apart(words: bytes) -> None:
    with _pair() as (client, server):
        server.sendall(words)
        server.close()
        with pytest.raises(PeerError, match="the-place is not a node of a flowstone job"):
            greet(client, "run", KEY, "the-place")


def test_what_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PEER_GREETING_S", 1.0)
    with _pair() as (client, _), pytest.raises(PeerError, match="did not finish its greeting in 1 s"):
        greet(client, "run", KEY, "the-place")


def test_an_impostor_without_the_secret_is_found_out() -> None:
    with _pair() as (client, server):
        server.sendall(b"flowstone peer\n" + _framed(Greeting(wire.PEER_PROTOCOL, "1", b"n" * 16)))
        server.sendall(_framed(wire.GreetingReply("", wire.PEER_PROTOCOL, "1", "node", b"p" * 32)))
        with pytest.raises(PeerError, match="does not know this job's secret"):
            greet(client, "run", KEY, "the-place")


@pytest.mark.parametrize("how", ["changed", "repeated", "reflected"])
def test_a_message_that_is_not_as_it_was_sent_ends_the_connection(how: str) -> None:
    client, server, _kept = _greeted(("run", KEY), ("run", KEY))
    assert isinstance(client, Channel)
    assert isinstance(server, Channel)
    client.send(PeerRequest("look", "file"))
    sent = server.connection.recv(10_000)
    if how == "changed":
        client.connection.sendall(sent[:-1] + bytes([sent[-1] ^ 1]))
    elif how == "repeated":
        client.connection.sendall(sent + sent)
        server.receive(PeerRequest)
    else:
        server.connection.sendall(sent)
    with pytest.raises(PeerError, match="was changed during the transfer"):
        client.receive(PeerResponse) if how == "reflected" else server.receive(PeerRequest)


# A real server


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with several_nodes(1) as caught:
        yield caught


def test_strangers_are_refused_and_told_in_the_log_and_the_job_goes_on(nodes: Nodes) -> None:
    (store,) = nodes.stores("run")
    place = store._peers.nodes[0].place
    link = NodeLink(place, "run", KEY)
    link.request(PeerRequest("free"))
    where = (place.address, place.port)
    with socket.create_connection(where) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # until it is refused
    for secret, run, words in (
        (b"another secret, quite long", "run", "the secrets of client and node differ"), (KEY, "other", "memory://run"),
    ):
        with pytest.raises(PeerError, match=words):
            NodeLink(NodeAddress("", *where), run, secret).request(PeerRequest("free"))
    crowd = [socket.create_connection(where, timeout=30) for _ in range(PEER_STRANGERS_MAX + 5)]
    newcomer = NodeLink(place, "run", KEY)
    assert newcomer.request(PeerRequest("free")).size_bytes > 0, "who is slow makes room for who is not"
    newcomer.close()
    assert _is_cut_off(crowd[0]), "the oldest first"
    for item in crowd:
        item.close()
    assert link.request(PeerRequest("free")).size_bytes > 0
    link.close()
    log = (nodes.directories[0] / "agent.log").read_text()
    assert "the secrets of client and node differ" in log
    assert "is not a node of a flowstone job" in log
    store.close()


def _is_cut_off(stranger: socket.socket) -> bool:
    """Read what it is sent, to the end; a timeout raises."""
    with suppress(ConnectionResetError):
        while stranger.recv(1000):
            pass
    return True


def test_a_greeting_has_one_deadline_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PEER_GREETING_S", 1.0)
    ended: list[Exception] = []

    def serve(server: socket.socket) -> None:
        try:
            welcome(server, "run", KEY, "node-1")
        except (PeerError, OSError) as error:
            ended.append(error)

    with _pair() as (client, server):
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        client.sendall((4000).to_bytes(4, "big"))
        begun, sent = time.monotonic(), 0
        while thread.is_alive() and sent < 3000:
            client.sendall(b"x")
            sent += 1
            thread.join(0.05)
        assert not thread.is_alive()
        assert time.monotonic() - begun < 30
    assert "did not finish its greeting" in str(ended[0])


def test_what_a_stranger_sends_is_escaped_in_the_log_and_told_a_bounded_number_of_times(nodes: Nodes) -> None:
    (store,) = nodes.stores("escaped")
    place = store._peers.nodes[0].place
    for _ in range(4 * PEER_STRANGERS_LOGGED_MAX):
        with socket.create_connection((place.address, place.port), timeout=30) as stranger:
            message = stranger.recv(15)
            while len(message) < 15:
                message += stranger.recv(15 - len(message))
            release = "1\x1b[2J\nmemory://run: all is well" + "x" * 900
            stranger.sendall(_framed(Introduction(9, release, "run", b"", b"")))
            assert _is_cut_off(stranger)
    log = (nodes.directories[0] / "agent.log").read_text()
    lines = [line for line in log.splitlines() if "flowstone 1" in line]
    assert 0 < len(lines) < 3 * PEER_STRANGERS_LOGGED_MAX
    assert all("\\x1b[2J\\nmemory://run: all is well" in line and len(line) < 500 for line in lines)
    assert not [line for line in log.splitlines() if line.startswith("memory://run: all is well")]
    store.close()


def test_a_name_that_is_too_long_is_refused_and_ends_no_server(nodes: Nodes) -> None:
    (store,) = nodes.stores("long")
    store.make_directory()
    store.lock("the job")
    links = [store._peers.nodes[0].link, store._peers.link_of(0).link]
    assert links[1].request(PeerRequest("free")).size_bytes
    for asked in (PeerRequest("exists", "x" * 70_000), PeerRequest("rename", "a", "x" * 70_000),
        PeerRequest("create", "x" * 70_000),
                  PeerRequest("put", "x" * 70_000, payload_bytes=0)):
        with pytest.raises(OSError, match="too long") as caught:
            links[0].request(asked)
        assert caught.value.errno == errno.ENAMETOOLONG
    assert links[1].request(PeerRequest("free")).size_bytes, "the same connection still"
    for link in links:
        link.close()
    store.close()


def _refused(link: NodeLink, *all_asked: PeerRequest) -> None:
    for asked in all_asked:
        with pytest.raises(PermissionError, match="only the holder of the run's lock"):
            link.request(asked, b"x" * asked.payload_bytes)


def test_only_the_holder_of_the_lock_takes_away_what_is_committed_and_adds_to_it(nodes: Nodes) -> None:
    (store,) = nodes.stores("locked")
    step, draft = "step-00000001", ".saving-00000009-a"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": [1, 2, 3]}).committed.result()
        link = store._peers.link_of(0).link
        _refused(
            link, PeerRequest("remove", f"{step}/manifest.json"), PeerRequest("remove", "flowstone.json"),
            PeerRequest("rename", step, ".deleting-00000001-a"), PeerRequest("put", f"{step}/more", payload_bytes=1),
            PeerRequest("create", f"{step}/more", size_bytes=1), PeerRequest("put", ".rewound-00000000-a"),
            PeerRequest("make_directory", "step-00000007"), PeerRequest("agree", step, number=9),
            PeerRequest("put", f"{draft}/a"),
            PeerRequest("gather", f"{draft}/.parity-0-0-0-0-0", size_bytes=1, payload_bytes=1),
        )
        checkpointer.save(2, {"x": [1, 2, 3]}).committed.result()
        checkpointer.rewind(1)  # who holds it may
        assert fs.open(store).step == 1
        link.close()
    assert set(store.names(step)) == {"manifest.json", "index.safetensors", "objects.json", "rank-00000.safetensors"}


def test_a_draft_takes_files_of_all_ranks_as_long_as_the_lock_is_held_under_which_it_was_made(nodes: Nodes) -> None:
    (store,) = nodes.stores("drafts")
    draft = ".saving-00000001-a"
    store.make_directory()
    assert store.lock("the job") is None
    store.make_directory(draft)
    of_rank, before = (store._peers.link_of(0).link for _ in range(2))
    of_rank.request(PeerRequest("put", f"{draft}/one", payload_bytes=1), b"x")
    of_rank.request(PeerRequest("create", f"{draft}/two", size_bytes=1))
    before.request(PeerRequest("free"))
    _refused(of_rank, PeerRequest("rename", draft, "step-00000001"), PeerRequest("remove", draft))
    store.unlock()
    _refused(before, PeerRequest("make_directory", ".saving-00000002-a"))
    assert store.lock("the next job") is None
    _refused(
        before, PeerRequest("put", f"{draft}/late", payload_bytes=1), PeerRequest("rename", draft, "step-00000001")
    )
    before.request(PeerRequest("make_directory", ".saving-00000002-a"))  # as the first rank that needs it
    before.request(PeerRequest("put", ".saving-00000002-a/one", payload_bytes=1), b"x")
    _refused(before, PeerRequest("rename", ".saving-00000002-a", "step-00000002"))
    assert set(store.names(draft)) == {"one", "two"}
    for link in (of_rank, before):
        link.close()
    store.close()


def test_a_node_is_served_at_the_address_that_was_given_and_at_no_other(nodes: Nodes) -> None:
    (store,) = nodes.stores("elsewhere")
    port = store._peers.nodes[0].place.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    store.close()


class Refusing:
    """A listener whose first connections cannot be accepted; then the server is told to end."""

    def __init__(self, times: int) -> None:
        self._left = times

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self._left -= 1
        if self._left < 0:
            raise SystemExit
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.fixture
def server() -> Iterator[PeerServer]:
    """Of other nodes, in this process."""
    with own_agent():
        server = PeerServer("run", "node-0", KEY, None)  # type: ignore[arg-type]
        server.tree.keep(AgentRequest("keep", number=2))
        server.tree.make_directory("")
        yield server
        server.tree.close()


def test_a_server_without_descriptors_does_not_fill_its_log(
    server: PeerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server._listener = Refusing(3)  # type: ignore[assignment]
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        server.serve()
    assert time.monotonic() - begun >= 0.29
    assert capsys.readouterr().err.count("Too many open files") == 3


def test_a_connection_that_no_thread_can_serve_is_refused_and_the_next_one_is_served(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        server._listener = listener
        serving = threading.Thread(target=server.serve)
        serving.start()
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
        with socket.create_connection(listener.getsockname(), timeout=20) as refused_one:
            assert refused_one.recv(1) == b""
        link = NodeLink(NodeAddress("", *listener.getsockname()), "run", KEY)
        assert link.request(PeerRequest("exists", "")).yes
        link.close()
        listener.shutdown(socket.SHUT_RDWR)
        serving.join(20)
        assert not serving.is_alive()
    server.serve()  # ends at once, too: its listener is closed
    err = capsys.readouterr().err
    assert "can't start new thread" in err
    assert "cannot accept" not in err


@pytest.mark.parametrize(("error", "is_told"), [
    (EOFError(), False), (ConnectionResetError(errno.ECONNRESET, "reset"), False), (TimeoutError(), False),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), True),
], ids=lambda error: type(error).__name__ if isinstance(error, Exception) else "")
def test_what_ends_a_connection_on_this_side_is_told_and_that_the_other_has_gone_is_not(
    server: PeerServer, error: Exception, is_told: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def welcomed(*_: object) -> Channel:
        raise error

    monkeypatch.setattr("flowstone.agent.peers.welcome", welcomed)
    with _pair() as (_, connection):
        server._open = 1
        server._strangers.admit(connection, "10.0.0.9")
        server._serve_connection(connection, "10.0.0.9")
    assert (server._open, server._strangers._admitted) == (0, {})
    assert ("10.0.0.9: " in capsys.readouterr().err) == is_told


def test_parity_of_a_new_draft_is_not_forgotten_for_an_old_one_of_its_name(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, collected = ".saving-00000001-a/.parity-0-0-0-0-0", list[object]()
    channel = Channel(None, KEY, is_client=False, node="")
    server.lock(channel, "the job")

    def other_node() -> None:
        with suppress(OSError):  # it is there
            PeerSession(server, channel)._answer(PeerRequest("make_directory", _DRAFT))
        collected.append(server.parities.of(path))

    other = threading.Thread(target=other_node)
    acting = server.tree.hold

    @contextmanager
    def slow() -> Iterator[None]:
        with acting():
            yield
        if not other.ident:  # the draft is there now, and this node's thread stands still
            other.start()
            other.join(0.3)

    with monkeypatch.context() as patched:
        patched.setattr(server.tree, "hold", slow)
        PeerSession(server, channel)._answer(PeerRequest("make_directory", _DRAFT))
        other.join()
    assert server.parities.of(path) is collected[0]


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_store_without_a_secret_is_refused_when_it_is_made(secret: str) -> None:
    with pytest.raises(ArgumentError, match="need a secret"):
        fs.PeerMemory("run", secret=secret, interface=HERE)


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "nothing0"])
def test_all_interfaces_at_once_or_none_are_refused(interface: str) -> None:
    with pytest.raises(ArgumentError, match="interface"):
        address_of(interface)


def test_the_interface_that_leads_to_the_master_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", HERE)
    assert address_of(None) == address_of("lo") == HERE
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ArgumentError, match="MASTER_ADDR is not set"):
        address_of(None)


# What is whole together


def _held(epoch: int, *steps: tuple[str, str, str]) -> PeerInventory:
    """Steps as directory, manifest and segments' letters; each file has a number of its own, and 10 bytes."""
    result = {
        name: StepInventory(manifest, {"manifest.json": (1, 5), **{letter: (ord(letter), 10) for letter in letters}})
        for name, manifest, letters in steps
    }
    return PeerInventory(epoch, ("flowstone.json", *result), result)


def _segments(directory: str, manifest: str, sources: Sequence[FileSource]) -> Mapping[str, int]:
    assert all(source.size_bytes == 5 for source in sources), f"the manifest of {directory} is read"
    return dict.fromkeys("abcd"[: int(manifest[1])], 10)


def _undescribed(directory: str, parity: Mapping[str, tuple[FileSource, ...]]) -> Mapping[str, ParityContribution]:
    raise AssertionError("there is no parity")


ONE, TWO = "step-00000001", "step-00000002"


def test_a_step_is_whole_if_each_segment_is_somewhere() -> None:
    first, second = (_held(1, (ONE, "m2", letter), (TWO, "m3", letter)) for letter in "ab")
    merged = merge_inventories({0: first, 1: second}, 1, _segments, _undescribed)
    assert list(merged.steps) == [ONE]
    assert merged.names == ("flowstone.json", ONE)
    assert merged.incomplete == {TWO: "of its 3 files of tensors, no node that answers has c"}
    assert [source.node for source in merged.steps[ONE].files["manifest.json"]] == [1, 0], "the own node first"


def test_files_of_another_checkpoint_of_that_step_do_not_count() -> None:
    merged = merge_inventories(
        {0: _held(1, (ONE, "m2", "a")), 1: _held(1, (ONE, "n2", "b"))}, 0, _segments, _undescribed
    )
    assert not merged.steps


def test_what_only_a_node_has_that_was_away_is_of_before() -> None:
    held = {0: _held(2, (ONE, "m1", "a")), 1: _held(1, (ONE, "m1", "a"), (TWO, "m1", "a"))}
    merged = merge_inventories(held, 0, _segments, _undescribed)
    assert list(merged.steps) == [ONE]
    assert merged.incomplete == {TWO: "only nodes that were down when a later job began have it"}
    assert [source.node for source in merged.steps[ONE].files["a"]] == [0, 1], "what others know counts"


def test_a_new_node_without_anything_takes_nothing_away() -> None:
    assert list(
        merge_inventories({0: _held(2, (ONE, "m1", "a")), 1: _held(0)}, 1, _segments, _undescribed).steps
    ) == [ONE]
    assert merge_inventories({}, 0, _segments, _undescribed).steps == {}
