"""Several nodes, each with an agent, a server for other nodes, and a rank: threads that take turns.

Agents and servers run their real code (agent/sessions.py, runs.py, peers.py, parities.py), only without sockets. Each
request, and each message between nodes, that changes an agent's contents is an operation with a number. Operations that
only read have none, since a kill before one is the same as a kill before the next change.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import msgspec
from sim_disk import PowerLoss
from sim_group import simulated_time
from sim_turns import RankStore, Turns

import flowstone as fs
from flowstone.agent import peers
from flowstone.agent.runs import MemoryRun, MemoryRuns
from flowstone.agent.sessions import Session
from flowstone.errors import FlowstoneError, MemoryAgentError, PeerError
from flowstone.ranks import Job as RankJob
from flowstone.ranks import group as rank_group
from flowstone.store.memory import node_memory, store
from flowstone.store.memory.agent_client import AgentClient
from flowstone.store.memory.agent_wire import (
    PROTOCOL,
    AgentRequest,
    AgentResponse,
    RunStatus,
    decode_answer,
    decode_request,
    encode,
)
from flowstone.store.peers import copies
from flowstone.store.peers.node import NodeLink
from flowstone.store.peers.wire import PeerRequest, PeerResponse

_Result = TypeVar("_Result")
AVAILABLE = 1 << 33
PORT = 7000  # of node 0; the next ones follow
SECRET = b"a secret of the simulation, rank "  # its last byte tells whose a connection is
PART_BYTES = 1 << 16  # so that a segment is sent in several parts
LOOKS = {"exists", "names", "look", "open", "release", "free", "lost_lock", "runs", "held", "read", "spare"}


def _only_looks(asked: AgentRequest | PeerRequest) -> bool:
    return asked.verb in LOOKS or (asked.verb == "agree" and not asked.path and not asked.number)


@dataclass(frozen=True)
class Strike:
    """What is killed at operation number `at`, on these nodes: agent and server, trainer, server alone.

    after  once the operation is done, but before its answer is there
    """

    at: int
    nodes: tuple[int, ...]
    what: frozenset[str]
    after: bool = False


class KillableTurns(Turns):
    """Ranks that can be killed while another one acts."""

    def kill(self, rank: int) -> None:
        with self._changed:
            self._dead.add(rank)
            self._last_beat.setdefault(rank, self._now)
            self._states[rank] = "done"
            self._pass_on()
            self._changed.notify_all()


@dataclass(eq=False)
class Agent:
    """One life of a node's agent. `connections`: those of trainers."""

    world: World
    number: int
    life: int
    is_alive: bool = True
    runs: MemoryRuns = field(default_factory=lambda: MemoryRuns(lambda: AVAILABLE))
    connections: list[Connection] = field(default_factory=list)
    server: peers.PeerServer | None = None
    guard: threading.RLock = field(default_factory=threading.RLock)  # it has one thread

    @property
    def node(self) -> str:
        return f"node {self.number}, life {self.life}"

    def flush(self, run: MemoryRun) -> bool:
        return False

    def statuses(self) -> tuple[RunStatus, ...]:
        return ()

    def serve_run(self, run: MemoryRun, request: AgentRequest) -> str:
        if self.server is None:
            with self.world.being(self.number, None):
                self.server = peers.PeerServer(run.name, self.node, b"", None)  # type: ignore[arg-type]
        return str(PORT + self.number)


class Connection:
    """Of a client to an agent."""

    def __init__(self, agent: Agent, rank: int | None, run: str) -> None:
        self.agent, self.rank, self.is_open = agent, rank, True
        self.session = Session(None, 0, agent.runs, agent)  # type: ignore[arg-type]
        self.session.answer(AgentRequest("hello", run, number=PROTOCOL), [])
        if rank is not None:
            agent.connections.append(self)

    def close(self) -> None:
        """As the agent's server does when a connection ends."""
        if not self.is_open:
            return
        self.is_open = False
        self.session.end()
        if self.rank is not None:
            self.agent.connections.remove(self)
            run = self.session.run
            is_written = any(connection.session.writes for connection in self.agent.connections)
            if self.session.writes and run is not None and not is_written:
                run.remove_drafts()


class Client(AgentClient):
    """An AgentClient without a socket."""

    def __init__(self, world: World, node: int, rank: int | None, run: str) -> None:
        super().__init__(run)
        self._world, self._node, self._rank = world, node, rank

    def _is_connected(self) -> bool:
        if self._connection is None:
            return False
        connection: Any = self._connection
        if connection.is_open and connection.agent.is_alive:
            return True
        self._mark_lost("has ended")
        return False

    def _connect(self, *, start: bool) -> bool:
        agent = self._world.agent(self._node, start=start)
        if agent is None:
            return False
        self._connection = Connection(agent, self._rank, self.run)  # type: ignore[assignment]
        self.connections += 1
        return True

    def _exchange(self, connection: Any, request: AgentRequest, fd: int | None) -> tuple[AgentResponse, list[int]]:
        passed = [] if fd is None else [os.dup(fd)]
        with suppress(ConnectionError):
            act = partial(connection.session.answer, decode_request(encode(request)), passed)
            rank = self._world.acting_rank if self._rank is None else self._rank
            answer, received = self._world.operate(rank, connection.agent, request, act)
            return decode_answer(encode(answer)), [] if received is None else [received]
        self._mark_lost("has ended")
        gone = self._lost_error()
        assert gone is not None, "it was lost"
        raise gone


class Wire:
    """Both ends of a channel between a rank and a server: what is sent is done at once."""

    def __init__(self, world: World, agent: Agent, rank: int) -> None:
        self._world, self._agent, self._rank = world, agent, rank
        self.node, self.connection = agent.node, self
        assert agent.server is not None, "it is served"
        self._server, self._is_open = agent.server, True
        self._asked: PeerRequest | None = None
        self._payload, self._bytes = bytearray(), bytearray()
        self._told: list[PeerResponse] = []
        self._far = self._far_end()
        self._attendance = peers.PeerSession(agent.server, self._far)
        world.wires.append(self)

    @property
    def is_of(self) -> int:
        return self._rank

    def _far_end(self) -> Any:
        def receive(kind: object) -> PeerRequest:
            asked, self._asked = self._asked, None
            if asked is None:
                raise EOFError
            return asked

        def receive_into(target: memoryview) -> None:
            target[:] = self._payload[: len(target)]
            del self._payload[: len(target)]

        def send_file(fd: int, offset: int, length: int) -> None:
            self._bytes += os.pread(fd, length, offset)

        return SimpleNamespace(
            receive=receive, receive_into=receive_into, send_file=send_file, send=self._told.append, connection=None
        )

    def send(self, asked: PeerRequest) -> None:
        self._check()
        self._asked = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=PeerRequest)
        if not asked.payload_bytes:
            self._act()

    def sendall(self, payload: bytes | memoryview) -> None:
        self._check()
        self._payload += payload
        assert self._asked is not None, "what follows a message"
        if len(self._payload) == self._asked.payload_bytes:
            self._act()

    def send_file(self, fd: int, offset: int, length: int) -> None:
        self.sendall(os.pread(fd, length, offset))

    def receive(self, kind: object) -> PeerResponse:
        if not self._told:
            raise EOFError
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._told.pop(0)), type=PeerResponse)

    def receive_into(self, target: memoryview) -> None:
        target[:] = self._bytes[: len(target)]
        del self._bytes[: len(target)]

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._world.wires.remove(self)
            self._server.unlock(self._far)

    def _check(self) -> None:
        if not self._is_open or not self._agent.is_alive or self._agent.server is not self._server:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has ended")

    def _act(self) -> None:
        assert self._asked is not None, "a message was sent"

        def message() -> None:
            """That it comes is an operation; what it does are others."""

        changes = nullcontext() if _only_looks(self._asked) else self._world.turn(self._rank)
        before, self._world.here.rank = self._world.acting_rank, self._rank
        try:
            with changes:
                self._world.operate(self._rank, self._agent, self._asked, message)
                self._check()
                self._attendance.serve()
        except (EOFError, MemoryAgentError):
            pass  # all of it was done; or the server has ended with its agent, and nothing is told
        except PeerError:
            self.close()
        finally:
            self._world.here.rank = before


class World:
    """Nodes that live on from one job to the next. `operations`: of the job that plays now."""

    def __init__(self, nodes: int) -> None:
        self.size = nodes
        self.agents: list[Agent | None] = [None] * nodes
        self.lives = 0
        self.wires: list[Wire] = []
        self.operations: list[str] = []
        self.dead: set[int] = set()
        self.strike: Strike | None = None
        self.here = threading.local()
        self.turns = self._new_turns(0)

    def _new_turns(self, number: int) -> KillableTurns:
        disk: Any = SimpleNamespace(changes=self.operations, lost=False)
        return KillableTurns(self.size, disk, number=number)

    def begin(self, strike: Strike | None, number: int) -> None:
        """Another job, of new processes."""
        for wire in list(self.wires):
            wire.close()
        for agent in filter(None, self.agents):
            for connection in list(agent.connections):
                connection.close()
        self.operations, self.dead, self.strike = [], set(), strike
        self.turns = self._new_turns(number)

    @property
    def acting_rank(self) -> int:
        return getattr(self.here, "rank", 0)

    @contextmanager
    def being(self, node: int, rank: int | None) -> Iterator[None]:
        """Clients that are made meanwhile are that rank's, on that node; None: the node's server's."""
        before = getattr(self.here, "client", None)
        self.here.client = node, rank
        try:
            yield
        finally:
            self.here.client = before

    def job_here(self) -> RankJob:
        return RankJob(self.here.rank, self.size, self.here.board)

    def client(self, run: str) -> Client:
        node, rank = self.here.client
        return Client(self, node, rank, run)

    def agent(self, node: int, *, start: bool) -> Agent | None:
        if self.agents[node] is None and start:
            self.lives += 1
            self.agents[node] = Agent(self, node, self.lives)
        return self.agents[node]

    def connect(self, link: NodeLink) -> Wire:
        """Stands for Link._connect."""
        agent = self.agents[link.place.port - PORT]
        if agent is None or agent.server is None:
            raise link._lost(ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "cannot be reached")
        if link.place.node and link.place.node != agent.node:
            raise link._lost(EOFError(), "was restarted")
        wire = Wire(self, agent, link._secret[-1])
        link._channel = wire  # type: ignore[assignment]
        return wire

    def operate(
        self, rank: int, agent: Agent, asked: AgentRequest | PeerRequest, act: Callable[[], _Result]
    ) -> _Result:
        """What that rank asks of that agent, or of its server. Raises PowerLoss, ConnectionError."""
        self._check(rank, agent)
        if _only_looks(asked):
            with agent.guard:
                return act()
        with self.turn(rank):
            strike = self.strike if self.strike is not None and self.strike.at == len(self.operations) else None
            whose = "agent" if isinstance(asked, AgentRequest) else "server"
            self.operations.append(f"rank {rank}, {whose} {agent.number}: {asked.verb} {asked.path}")
            if strike is not None and not strike.after:
                self._kill(strike)
            self._check(rank, agent)
            with agent.guard:
                result = act()
            if strike is not None and strike.after:
                self._kill(strike)
            self._check(rank, agent)
            return result

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """That rank's, to change something; again within one. A server does all of a message in one: it holds locks."""
        if getattr(self.here, "has_turn", False):
            yield
            return
        with self.turns.turn(rank):
            self.here.has_turn = True
            try:
                yield
            finally:
                self.here.has_turn = False

    def _check(self, rank: int, agent: Agent) -> None:
        if rank in self.dead:
            raise PowerLoss
        if not agent.is_alive:
            raise ConnectionResetError(errno.ECONNRESET, "the agent has ended")

    def _kill(self, strike: Strike) -> None:
        for node in strike.nodes:
            agent = self.agents[node]
            if agent is not None and "server" in strike.what:
                agent.server = None
            if agent is not None and "agent" in strike.what:
                agent.is_alive, self.agents[node], agent.server = False, None, None
            if "trainer" in strike.what:
                self.dead.add(node)
        for wire in list(self.wires):
            if wire.is_of in self.dead:
                wire.close()
        for agent in filter(None, self.agents):
            for connection in list(agent.connections):
                if connection.rank in self.dead:
                    connection.close()
        for rank in self.dead:
            self.turns.kill(rank)


class _Inline:
    """An executor whose caller does it."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, act: Callable[..., object], *arguments: object) -> SimpleNamespace:
        try:
            result = act(*arguments)
        except FlowstoneError as caught:
            error = caught

            def failed() -> object:
                raise error

            return SimpleNamespace(result=failed)
        return SimpleNamespace(result=lambda: result)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Clients and links are the world's meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(simulated_time(lambda: world.turns))
        stack.enter_context(mock.patch.object(node_memory, "AgentClient", world.client))
        stack.enter_context(mock.patch.object(NodeLink, "_connect", lambda link: world.connect(link)))
        stack.enter_context(mock.patch.object(copies, "ThreadPoolExecutor", _Inline))
        stack.enter_context(mock.patch.object(copies, "PEER_PART_BYTES", PART_BYTES))
        # Memory that is made beforehand is not what is played here: its requests come at any time.
        stack.enter_context(mock.patch.object(store.StoreInMemory, "allocate_spare"))
        stack.enter_context(mock.patch.object(rank_group, "this_job", world.job_here))
        yield


class Job:
    """A rank on each node, with a Checkpointer on the memory of all."""

    def __init__(self, world: World, how: Mapping[str, Any], number: int) -> None:
        self._world, self._how = world, how
        self._board: dict[str, bytes] = {}
        self._number = number
        self.checkpointers: dict[int, fs.Checkpointer] = {}

    def each(self, act: Callable[[int, fs.Checkpointer], object], strike: Strike | None = None) -> list[object]:
        """What all ranks do: for each what came of it, or what it raised."""
        world, outcomes = self._world, [None] * self._world.size
        world.begin(strike, self._number)
        turns = world.turns

        def run(rank: int) -> None:
            world.here.rank, world.here.board = rank, RankStore(self._board, turns, rank)
            try:
                with world.being(rank, rank):
                    store = fs.PeerMemory("run", secret=SECRET + bytes([rank]), interface="127.0.0.1", **self._how)
                engine = fs.EngineOptions(request_bytes=2 << 20, workers=1)
                self.checkpointers[rank] = fs.Checkpointer(
                    store, on_error="continue", budget_bytes=16 << 20, engine=engine, deadline_s=60.0
                )
                outcomes[rank] = act(rank, self.checkpointers[rank])  # type: ignore[assignment]
            except BaseException as error:
                outcomes[rank] = error  # type: ignore[assignment]
            finally:
                turns.done(rank)

        turns.begin()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def end(self) -> None:
        self._world.turns.over()
        for _, checkpointer in sorted(self.checkpointers.items(), reverse=True):  # rank 0 leaves last
            for save in checkpointer._saves.in_flight:
                for future in (save.captured, save.committed):
                    if not future.done():
                        future.set_exception(PowerLoss())
            with suppress(FlowstoneError, PowerLoss):
                checkpointer.close()


@contextmanager
def job(world: World, how: Mapping[str, Any], number: int = 0) -> Iterator[Job]:
    with simulated(world):
        job = Job(world, how, number)
        try:
            yield job
        finally:
            job.end()


def failures(outcomes: Sequence[object]) -> list[BaseException]:
    """What no kill explains."""
    explained = FlowstoneError, PowerLoss
    return [end for end in outcomes if isinstance(end, BaseException) and not isinstance(end, explained)]
