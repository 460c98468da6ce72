"""The store in a node's memory: the contract of every store, with a real agent; its retention and its refusals."""

from __future__ import annotations

import array
import fcntl
import os
import re
import signal
import socket
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from contract import StoreContract

import flowstone as fs
from flowstone.commit import catalog
from flowstone.config import AGENT_CONNECTIONS_MAX, MIB
from flowstone.errors import ArgumentError, BudgetError, FullError, MemoryAgentError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.store.memory import agent_client, local_sockets
from flowstone.store.memory.agent_wire import PROTOCOL, SOCKET_NAME, AgentRequest, AgentResponse, decode_answer, encode
from flowstone.store.memory.node_memory import NodeMemory, list_runs
from flowstone.store.mount import available_bytes
from memory_agent import NO_ONE, agent_process, files_of, kill, own_agent

ELEMENTS = 600_000


@pytest.fixture(scope="module", autouse=True)
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W", "-", request.node.name)


class TestNodeMemory(StoreContract):
    def open_store(self, root: Path) -> NodeMemory:
        return NodeMemory(self.location(root).removeprefix("memory://"))

    def location(self, root: Path) -> str:
        return "memory://" + re.sub(r"[^\w/]", "-", str(root)).strip("/")[-200:]


def _state(step: int) -> dict[str, object]:
    return {"weights": np.full(ELEMENTS, step, np.float32), "step": step}


def _saved(store: NodeMemory | str, *steps: int) -> None:
    with fs.Checkpointer(store) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(step)).committed.result()


def _weights(run: str, step: int | None = None) -> set[float]:
    return set(fs.open(f"memory://{run}", step=step).read("weights", framework="numpy").tolist())


# What is kept


def test_two_generations_are_kept_and_the_next_process_finds_the_newest(run: str) -> None:
    _saved(f"memory://{run}", 1, 2, 3, 4)
    assert catalog.steps(NodeMemory(run)) == (3, 4)
    state = _state(0)
    with fs.Checkpointer(f"memory://{run}") as checkpointer:
        assert checkpointer.load(state).step == 4
    assert set(np.asarray(state["weights"]).tolist()) == {4.0}
    assert fs.open(f"memory://{run}").verify().sound
    _saved(f"memory://{run}", 5)


def test_from_the_third_save_on_no_memory_is_fresh(run: str) -> None:
    store = NodeMemory(run)
    with fs.Checkpointer(store) as checkpointer:
        held, numbers = [], []
        for step in range(1, 7):
            checkpointer.save(step, _state(step)).committed.result()
            status = store.status()
            assert status is not None
            held.append(status.held_bytes)
            numbers.append(store.stamp(f"step-{step:08d}/rank-00000.safetensors"))
    assert len(set(numbers)) == 2, "the memory of the one before the last is used again"
    assert max(held[2:]) - held[1] < MIB, "and no other is needed"
    assert _weights(run, 5) == {5.0}
    assert _weights(run, 6) == {6.0}


def test_memory_that_is_used_again_is_zero_where_nothing_is_written(run: str) -> None:
    with fs.Checkpointer(f"memory://{run}") as checkpointer:
        for step in range(1, 5):  # of another phase each, so that gaps lie elsewhere
            memory = np.full(3 * MIB, 255, np.uint8)
            state = {name: memory[step * 100 + b : step * 100 + b + 70_001] for name, b in (("a", 0), ("b", MIB))}
            checkpointer.save(step, state).committed.result()
            checkpointer.wait()
            assert fs.open(f"memory://{run}").verify().sound, "padding is verified to be zero"


def test_a_file_that_is_read_stays_as_it_is_when_its_checkpoint_is_removed(run: str) -> None:
    _saved(f"memory://{run}", 1, 2)
    store = NodeMemory(run)
    held, path = store.snapshot("step-00000001"), "step-00000001/rank-00000.safetensors"
    before = held.read(path)
    _saved(f"memory://{run}", 3, 4, 5)
    assert catalog.steps(store) == (4, 5)
    assert held.read(path) == before
    assert fs.open(held).verify().sound


def test_memory_of_a_draft_is_no_other_clients_while_its_writer_is_connected(run: str) -> None:
    straggler, other = NodeMemory(run), NodeMemory(run)
    straggler.make_directory()
    straggler.make_directory(".saving-00000001-a")
    number = straggler._tree.create(".saving-00000001-a/rank-00000.safetensors", 2 * MIB).number
    other.remove(".saving-00000001-a/rank-00000.safetensors")
    other.make_directory(".saving-00000002-b")
    made = [other._tree.create(f".saving-00000002-b/{name}", 2 * MIB).number for name in "cd"]
    assert number not in made
    straggler.close()
    later = []
    while number not in later and len(later) < 50:  # once the agent has seen the end of the connection
        later.append(other._tree.create(f".saving-00000002-b/{len(later)}", 2 * MIB).number)
    assert number in later
    other.close()


def test_what_a_rewind_sets_aside_takes_no_memory_from_the_next_save(run: str) -> None:
    store = NodeMemory(run)
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _state(step)).committed.result()
        checkpointer.rewind(1)
        assert len(store.names()) == 4, "the marker, the first step, the second one aside, and a note of that"
        checkpointer.save(2, _state(20)).committed.result()
        status = store.status()
        assert status is not None
        assert status.held_bytes < 2.1 * 4 * ELEMENTS
    assert _weights(run) == {20.0}


def test_an_agent_is_started_by_hand_once_and_ended_by_hand(agent: Path) -> None:
    from typer.testing import CliRunner

    from flowstone.cli.app import app

    call = CliRunner().invoke
    call(app, ["agent", "--stop"])
    assert not files_of(agent)
    assert call(app, ["agent", "--status", "--json"]).exit_code == 0
    assert not files_of(agent), "to ask starts none"
    assert call(app, ["agent"]).exit_code == 0
    process = agent_process(agent)
    assert call(app, ["agent"]).exit_code == 0
    assert agent_process(agent) == process, "one a node"
    stopped = msgspec.json.decode(call(app, ["agent", "--stop", "--json"]).stdout)
    assert stopped == {"stopped": process}
    assert not files_of(agent)


def test_what_a_listing_tells_of_it(run: str) -> None:
    from typer.testing import CliRunner

    from flowstone.cli.app import app

    _saved(f"memory://{run}", 1, 2)
    listed = CliRunner().invoke(app, ["ls", f"memory://{run}", "--json"])
    assert listed.exit_code == 0
    listing = msgspec.json.decode(listed.stdout)
    assert [row["step"] for row in listing["checkpoints"]] == [1, 2]
    assert listing["memory"]["held_bytes"] > 2 * 4 * ELEMENTS
    result = CliRunner().invoke(app, ["agent", "--status"])
    assert run in result.stdout
    assert CliRunner().invoke(app, ["ls", "memory://nothing"]).exit_code == 2
    assert "nothing" not in [status.name for status in list_runs()], "what is only looked for is not made"


@pytest.mark.parametrize("name", ["", "a b", "../up", "a//b", "a/../b", ".", "x" * 201, "n\n"])
def test_a_name_that_names_no_run_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="is not a valid name of a run"):
        fs.Checkpointer(f"memory://{name}")


# Too little memory


def test_a_node_with_less_memory_than_the_generations_is_refused_with_the_numbers(run: str) -> None:
    half = available_bytes() // 2 + MIB
    with pytest.raises(BudgetError) as caught:
        NodeMemory(run, state_bytes=half)
    assert f"2 x {half} bytes" in str(caught.value)
    assert "available" in str(caught.value)
    with pytest.raises(ArgumentError, match="generations is 1"):
        NodeMemory(run, generations=1)


def test_a_first_save_that_leaves_no_room_for_the_second_is_refused_with_the_numbers(run: str) -> None:
    store = NodeMemory(run)
    store.make_directory()
    store.make_directory(".saving-00000001-a")
    with pytest.raises(FullError, match="2 checkpoints of") as caught:
        store._tree.create(".saving-00000001-a/rank-00000.safetensors", available_bytes() // 2)
    assert re.search(r"needed +\d+ bytes\n +available +\d+ bytes", str(caught.value))
    assert store.names(".saving-00000001-a") == ()
    store.close()


# The end of the agent


def test_an_agent_that_is_killed_is_told_by_name_and_the_next_save_starts_another(
    agent: Path, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fs.Checkpointer(f"memory://{run}") as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
        process = agent_process(agent)
        kill(process, signal.SIGKILL)
        checkpointer.save(2, _state(2)).committed.result()
        assert f"the memory agent (process {process}) has ended" in caplog.text
        assert agent_process(agent) != process
        assert catalog.steps(NodeMemory(run)) == (2,)
        assert _weights(run) == {2.0}


def test_a_save_under_way_fails_by_name_when_the_agent_is_killed(agent: Path, run: str) -> None:
    store = NodeMemory(run)
    store.make_directory()
    process = agent_process(agent)
    connection = store._tree.client._connection
    assert connection is not None
    os.kill(process, signal.SIGSTOP)
    asked: list[BaseException] = []

    def ask() -> None:
        try:
            store.put("file", b"1")
        except BaseException as error:
            asked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    sent = array.array("i", [0])
    while not sent[0]:
        fcntl.ioctl(connection, termios.TIOCOUTQ, sent)  # bytes that the agent has not read
    kill(process, signal.SIGKILL)
    thread.join(60.0)
    assert isinstance(asked[0], MemoryAgentError)
    assert str(process) in str(asked[0])
    assert "starts a new agent" in str(asked[0])
    store.close()


# Strangers


def _connection(agent: Path) -> socket.socket:
    if SOCKET_NAME not in files_of(agent):
        NodeMemory("any").make_directory()  # starts one
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(agent / SOCKET_NAME))
    connection.settimeout(30.0)
    return connection


def _greeted(agent: Path, run: str) -> socket.socket:
    connection = _connection(agent)
    connection.send(encode(AgentRequest("hello", run, number=PROTOCOL)))
    assert decode_answer(connection.recv(65536)).errno == 0
    return connection


_NO_MESSAGES = {
    "garbage": b"\xff\x00garbage" * 10, "half a message": encode(AgentRequest("hello", "run", number=1))[:-9],
    "a huge length": b"\x87\xa4verb\xdb\xff\xff\xff\xff", "a huge list": b"\xdd\xff\xff\xff\xff",
    "too long": b"\x90" * 70_000,
    "an unknown verb": msgspec.msgpack.encode({"verb": "format"}), "a list": msgspec.msgpack.encode([1, 2]),
    "a text for a number": msgspec.msgpack.encode({"verb": "create", "size_bytes": "1"}),
    "nested": b"\x91" * 60_000,
    "a number beyond 64 bits": msgspec.msgpack.encode({"verb": "look", "number": 2**64 - 1}),
}


@pytest.mark.parametrize("kind", _NO_MESSAGES)
@pytest.mark.parametrize("is_greeted", [False, True])
def test_what_is_no_request_ends_that_connection_alone(agent: Path, run: str, kind: str, is_greeted: bool) -> None:
    _saved(f"memory://{run}", 1)
    process = agent_process(agent)
    with _greeted(agent, run) if is_greeted else _connection(agent) as stranger:
        stranger.send(_NO_MESSAGES[kind])
        message = stranger.recv(65536)
        assert not message or decode_answer(message).errno
        if kind != "a number beyond 64 bits":
            assert not message or stranger.recv(65536) == b"", "it is cut off"
    assert agent_process(agent) == process
    assert _weights(run) == {1.0}


@pytest.mark.parametrize("request_", [
    AgentRequest("create", "a", size_bytes=-1), AgentRequest("create", "a", size_bytes=2**62),
    AgentRequest("create", "no/where", size_bytes=1),
    AgentRequest("put", "a", size_bytes=5), AgentRequest("open", "nothing"), AgentRequest("release", number=77),
    AgentRequest("resize", number=77, size_bytes=1), AgentRequest("keep", number=0),
    AgentRequest("keep", number=2, seconds=-1.0),
    AgentRequest("keep", number=2, target="relative"), AgentRequest("keep", number=2, seconds=float("nan")),
    AgentRequest("hello", "again", number=PROTOCOL), AgentRequest("rename", "a", "b"), AgentRequest("rename", "", ""),
    AgentRequest("remove", "nothing"), AgentRequest("link", "", "b"),
], ids=lambda request: f"{request.verb}-{request.size_bytes}-{request.number}-{request.target}")
def test_requests_that_cannot_be_are_refused(agent: Path, run: str, request_: AgentRequest) -> None:
    with _greeted(agent, run) as client:
        client.send(encode(AgentRequest("make_directory", "")))
        client.recv(65536)
        client.send(encode(request_))
        assert decode_answer(client.recv(65536)).errno, "it is refused"
        client.send(encode(AgentRequest("names")))
        assert decode_answer(client.recv(65536)).names == ()


def test_descriptors_that_were_not_asked_for_are_closed(agent: Path, run: str) -> None:
    process = agent_process(agent)
    with _greeted(agent, run) as client:
        before = len(os.listdir(f"/proc/{process}/fd"))
        for _ in range(20):
            socket.send_fds(client, [encode(AgentRequest("names"))], [0, 1, 2])
            decode_answer(client.recv(65536))
            socket.send_fds(client, [encode(AgentRequest("put", "x", size_bytes=1))], [0, 1])
            assert decode_answer(client.recv(65536)).errno
        assert len(os.listdir(f"/proc/{process}/fd")) == before


def test_another_release_is_refused_by_name(agent: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _connection(agent) as client:
        client.send(encode(AgentRequest("hello", run, number=PROTOCOL + 1, text="9.9")))
        answer = decode_answer(client.recv(65536))
        assert (answer.error, answer.text) == ("the releases of agent and client differ", fs.__version__)
        assert client.recv(100) == b""
    monkeypatch.setattr(agent_client, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(MemoryAgentError, match="this process: the releases of agent and client differ") as caught:
        NodeMemory(run).make_directory()
    assert f"protocol {PROTOCOL}" in str(caught.value)
    assert "flowstone agent --stop" in str(caught.value)


@pytest.mark.parametrize("says", [b"hello, who is there?", encode(AgentResponse(number=77, text="9.9")), b""])
def test_what_is_no_agent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    directory = tmp_path / "fake"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(local_sockets.DIRECTORY_VARIABLE, str(directory))
    monkeypatch.setattr(agent_client, "start_agent", lambda directory: pytest.fail("one listens"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        monkeypatch.chdir(directory)
        listener.bind(SOCKET_NAME)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            if says:
                connection.send(says)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        store = NodeMemory("run")
        if says:
            with pytest.raises(MemoryAgentError, match="does not"):
                store.exists()
        else:
            assert not store.exists(), "it has ended"
        thread.join()


@pytest.mark.parametrize("how", ["open to others", "a link", "a file"])
def test_a_directory_that_is_not_this_users_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    directory = tmp_path / "agent"
    if how == "a file":
        directory.write_text("")
    elif how == "a link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    else:
        directory.mkdir()
        directory.chmod(0o755)
    monkeypatch.setenv(local_sockets.DIRECTORY_VARIABLE, str(directory))
    with pytest.raises(StorageError, match="is not a private directory"):
        NodeMemory("run").make_directory()
    assert files_of(tmp_path / "real") == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_even_where_the_directory_lets_it_in(agent: Path, run: str) -> None:
    _saved(f"memory://{run}", 1)
    os.chmod(agent, 0o755)
    os.chmod(agent.parent, 0o755)
    os.chmod(agent / SOCKET_NAME, 0o666)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = b"nothing"
        try:
            os.setresuid(NO_ONE, NO_ONE, NO_ONE)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(30.0)
                stranger.connect(str(agent / SOCKET_NAME))
                message = stranger.recv(65536)
        except BaseException as error:
            message = repr(error).encode()
        os.write(writer, message)
        os._exit(0)
    os.close(writer)
    try:
        os.waitpid(child, 0)
        answer = decode_answer(os.read(reader, 65536))
        assert answer.errno
        assert f"not to user {NO_ONE}" in answer.error
    finally:
        os.close(reader)
        os.chmod(agent, 0o700)
    assert _weights(run) == {1.0}


def test_more_connections_than_may_be_are_refused_and_the_others_go_on(agent: Path, run: str) -> None:
    _saved(f"memory://{run}", 1)
    store = NodeMemory(run)
    assert store.exists()
    held = [_connection(agent) for _ in range(AGENT_CONNECTIONS_MAX + 3)]
    refused = decode_answer(held[-1].recv(65536))
    assert "connected already" in refused.error
    assert store.names(), "what is connected is served"
    for connection in held:
        connection.close()
    assert _weights(run) == {1.0}
    store.close()


def test_a_lock_that_is_refused_for_the_disk_it_flushes_to_is_not_held(run: str, tmp_path: Path) -> None:
    (tmp_path / MARKER_NAME).mkdir()  # it is there, and cannot be read
    first, other = NodeMemory(run, flush_to=tmp_path), NodeMemory(run)
    first.make_directory()
    with pytest.raises(StorageError):
        first.lock("first")
    other.lock("other")
    other.check_lock()
    other.unlock()
    first.close()
    other.close()
