"""A store in the memory of a job's nodes, which survives the loss of nodes (docs/PEERS.md).

Each rank writes into the memory agent of its own node, as with NodeMemory. A segment counts as written once its copies
are on other nodes, too. A file is read from this node if this node has it, and otherwise from another node.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from threading import Lock

import msgspec

from flowstone._native import Arena, Engine, File, ReadExtents, ReadOptions, WriteExtents, WriteJob
from flowstone.config import (
    AGENT_LINGER_S,
    DEADLINE_S,
    GENERATIONS,
    PEER_SECRET_BYTES,
    PEER_SPREAD,
    PEER_SPREAD_MAX,
    REPLICAS,
    EngineOptions,
    whole_number,
)
from flowstone.errors import ArgumentError, FlowstoneError, PeerError
from flowstone.store.base import UNPACED, FilePlan, Pace
from flowstone.store.forks import forget_in_children
from flowstone.store.jobs import JobReadHandle
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import NodeMemory
from flowstone.store.memory.store import MemoryWriteHandle
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.peers import erasure
from flowstone.store.peers.copies import Limits, copies_of, send, shares_of
from flowstone.store.peers.interfaces import address_of
from flowstone.store.peers.node import NodeAddress, NodeLink
from flowstone.store.peers.parity import shares
from flowstone.store.peers.placement import keepers
from flowstone.store.peers.reading import PeerReadHandle, ReadSources
from flowstone.store.peers.spreading import CopySchedule
from flowstone.store.peers.tree import DRAFT, PeersTree
from flowstone.store.peers.wire import PeerRequest

SECRET_VARIABLE = "FLOWSTONE_PEERS_SECRET"  # noqa: S105  (its name)


class _Introduction(msgspec.Struct, frozen=True):
    """The message with which a rank introduces its node to the others."""

    place: NodeAddress
    run: str
    replicas: int
    parity: tuple[int, int]
    rank: str  # a random text, which differs between the ranks of one node


class PeerMemory(NodeMemory):
    """A Store: the checkpoints of the run `name` in the memory of all nodes of the job. Every rank makes a PeerMemory
    with the same arguments for its Checkpointer. The Checkpointers exchange the nodes' addresses through the job's
    rendezvous.

    secret       text of at least 16 bytes that only the nodes of the job know; None: the environment variable
                 FLOWSTONE_PEERS_SECRET
    replicas     how many nodes keep a node's segments, including the node itself. Nodes form groups of this size, and
                 keep the segments of their group (Gemini, SOSP 2023). Any replicas - 1 nodes may be lost at once, and
                 more nodes if they are in different groups
    parity       (k, m), instead of `replicas`: in groups of at least k + m nodes, any m nodes may be lost at once. This
                 needs 1 + m / k times the memory needed without copies; see docs/PEERS.md. Needs `flowstone[parity]`
    interface    the network interface to the other nodes, by its name or by this node's address; None: the one with the
                 route to MASTER_ADDR. The node listens at no other address
    port         the port at which this node listens; 0: any free port
    addresses    for a process outside of the job, which exchanges no addresses: the addresses of all nodes, as
                 "host:port"
    state_bytes  how many bytes the ranks of this node save in each checkpoint, if that is known. If these
                 bytes, and what this node keeps for other nodes, do not fit in memory, BudgetError is raised here,
                 instead of at the first save
    bytes_per_s  how many bytes of copies a rank may send per second; None: no limit
    spread       copies are spread over this part (0 to 0.9) of the time between two saves, once that time is known. If
                 a thread waits for copies, they are sent at full rate. 0: always at full rate

    Other options are the same as for NodeMemory; `generations` is how many checkpoints are kept. A node needs memory
    for `replicas` x `generations` checkpoints of its ranks, or, with parity, for (1 + m / k) x `generations`; more if
    parity is spread over fewer than k + m nodes.

    raises  ArgumentError; BudgetError if this node has less memory than needed; FrameworkError if parity needs a
            package that is not installed
    """

    def __init__(
        self, name: str, *, secret: str | bytes | None = None, replicas: int | None = None,
        parity: tuple[int, int] | None = None, interface: str | None = None,
        port: int = 0, addresses: Sequence[str] = (), bytes_per_s: float | None = None,
        spread: float = PEER_SPREAD, state_bytes: int | None = None, generations: int = GENERATIONS,
        linger_s: float = AGENT_LINGER_S, options: EngineOptions | None = None,
    ) -> None:
        super().__init__(name, generations=generations, linger_s=linger_s, options=options)
        self.replicas = whole_number("replicas", REPLICAS if replicas is None else replicas)
        if self.replicas < 1:
            raise ArgumentError(
                f"replicas must be at least 1, got {replicas}",
                next="give the number of copies, including the node's own",
            )
        self.parity = (0, 0) if parity is None else _parity(parity, replicas)
        if state_bytes is not None:
            own, (columns, rows) = whole_number("state_bytes", state_bytes), self.parity
            self._check_memory(own - (-own * rows // columns) if rows else own * self.replicas)
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ArgumentError(
                f"bytes_per_s must be positive, got {bytes_per_s!r:.60}", next="leave it out for no limit"
            )
        if not 0 <= spread <= PEER_SPREAD_MAX:
            raise ArgumentError(
                f"spread must be from 0 to {PEER_SPREAD_MAX}, got {spread!r:.60}",
                next="leave it out, or give a fraction: copies are then spread over this fraction of the time between "
                "two saves",
            )
        self._spreading = CopySchedule(spread)
        self._bytes_per_s, self._addresses = bytes_per_s, [_place(address) for address in addresses]
        self._secret = _secret(secret)
        serve = AgentRequest("serve", target=address_of(interface), number=port, text=self._secret.hex())
        self._peers = PeersTree(self.run, self.location, self._secret, serve, self._find)
        self._agent = self._tree = self._peers
        self.capabilities = msgspec.structs.replace(self.capabilities, links=False)
        self._guard = Lock()
        self._caller_engines: dict[int, Engine] = {}
        self._next_file = 0
        self._number_on_node = 0  # the number of this rank on its node
        # the directory of the last unfinished checkpoint, and the number of writes into it
        self._draft, self._writes = "", 0
        self._has_nodes = False
        forget_in_children(self)

    # The nodes

    def introduce(self) -> bytes:
        """This rank's message to the other ranks, with the node's address. Starts the memory agent and its server, if
        necessary.
        """
        try:
            place = self._peers.introduce(self._keep)
        except OSError as error:
            raise PeerError(
                f"cannot serve {self.location} to other nodes: {error.strerror}", errno=error.errno or 0,
                next="give all jobs of a run the same secret, interface and port; check which process uses that port",
            ) from error
        return msgspec.msgpack.encode(
            _Introduction(place, self.run, self.replicas, self.parity, secrets.token_hex(8))
        )

    def use_addresses(self, introductions: Sequence[bytes], own: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """Use the nodes in the messages of all ranks (see `introduce`). Raises ArgumentError if the ranks' stores have
        different options.

        deadline_s  how many seconds ranks wait for the slowest rank. The copies of a save are spread over at most a
                    quarter of this time, because ranks that send copies at full rate wait for ranks that do not
        """
        ranks = [msgspec.msgpack.decode(encoded, type=_Introduction) for encoded in introductions]
        mine = msgspec.msgpack.decode(own, type=_Introduction)
        for rank, introduction in enumerate(ranks):
            if (introduction.run, introduction.replicas, introduction.parity) != (mine.run, mine.replicas, mine.parity):
                raise ArgumentError(
                    f"rank {rank} saves to another PeerMemory than this rank", expected=_shown(mine),
                    found=_shown(introduction), next="give every rank the same store",
                )
        earlier = ranks[: list(introductions).index(own)]
        self._number_on_node = sum(1 for introduction in earlier if introduction.place.node == mine.place.node)
        places = {introduction.place.node: introduction.place for introduction in ranks}
        self._peers.use_nodes(mine.place, tuple(places.values()))
        self._spreading = self._spreading.bounded(deadline_s / 4)
        self._has_nodes = True

    def _find(self) -> None:
        """Outside a job: use this node and the nodes in `addresses`."""
        with self._guard:
            if self._has_nodes:
                return
            own = self._peers.introduce(self._keep)
            places = [own]
            for address in self._addresses:
                link = NodeLink(address, self.run, self._secret)
                try:
                    link.request(PeerRequest("free"))
                    places.append(msgspec.structs.replace(address, node=link.node))
                except PeerError as error:
                    if error.errno != errno.EHOSTUNREACH:
                        raise
                    places.append(address)  # the node may answer later
                finally:
                    link.close()
            unique = {place.node or place.shown: place for place in places}
            self._peers.use_nodes(own, sorted(unique.values(), key=lambda place: place.shown))
            self._has_nodes = True

    def missing_checkpoints(self) -> str:
        """A text for a message: which checkpoints are incomplete, and why they cannot be loaded; "" if there are none.
        """
        return self._peers.missing_checkpoints() if self._has_nodes else ""

    def copies(self, step: int) -> dict[str, tuple[str, ...]]:
        """For each file of a checkpoint, the addresses of the nodes that have it; empty if the checkpoint is
        incomplete.
        """
        nodes, checkpoint = self._peers.nodes, self._peers.view().steps.get(f"step-{step:08d}")
        files = {} if checkpoint is None else checkpoint.files
        return {
            name: tuple(nodes[source.node].place.shown for source in sources) for name, sources in sorted(files.items())
        }

    # Bulk bytes

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> MemoryWriteHandle:
        draft = files[0].path.partition("/")[0] if files else ""
        if draft.startswith(DRAFT):
            self._spreading.note_save(draft)
        return super().write(files, rows, arena, pace, reserved=reserved)

    def expedite(self) -> None:
        """Send the copies of all saves so far at full rate, because a thread waits for them. Can be called on any
        thread.
        """
        self._spreading.expedite()

    def replicate(self, files: Sequence[tuple[str, MemoryFile]], job: WriteJob) -> FlowstoneError | None:
        """Send copies of the written files, or their shares for parity, to other nodes. Returns the error, if there is
        one.
        """
        if not files:
            return None
        own, nodes = self._peers.own, len(self._peers.nodes)
        draft, (columns, rows) = files[0][0].partition("/")[0], self.parity
        if rows and draft.startswith(DRAFT):
            by_node = shares_of(files, shares(own, nodes, columns, rows), self._writer(draft))
        else:  # files outside of unfinished checkpoints always get copies, since their names may be used again
            replicas = 1 + rows if rows else self.replicas
            by_node = dict.fromkeys(keepers(own, nodes, replicas)[1:], copies_of(files))
        try:
            sendings = [(self._peers.link_of(node).link, transfers) for node, transfers in by_node.items()]
            due = self._spreading.due(draft)
            send(sendings, Limits(
                self._bytes_per_s, self._spreading.left_s(due), lambda: due.is_expedited, lambda: job.cancelled
            ))
        except FlowstoneError as error:
            return error
        return None

    def _writer(self, draft: str) -> str:
        """A text that identifies one write of this node among its writes into the directory `draft`: see parity_name.
        """
        with self._guard:
            self._draft, self._writes = draft, self._writes + 1 if draft == self._draft else 0
            return f"{self._number_on_node}-{self._writes}"

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReadHandle:
        needed = sorted(set(chain.from_iterable(rows.file_groups)))
        sources, local, rebuilt = {}, {}, {}
        for number in needed:
            path = paths[number]
            with self._acting("open", path):
                sources[path] = self._peers.sources(path)
                if not sources[path] and (rebuildable := self._peers.step_of(path)) is not None:
                    rebuilt[path] = rebuildable
                elif sources[path][0].node == self._peers.own:
                    local[path] = self._peers.open(path).mapped(writable=False)
        if len(local) == len(sources):
            return super().read_extents(
                paths, rows, arena, wanted_bytes=wanted_bytes, stop_at_bad=stop_at_bad, past_cache=past_cache,
                ahead=ahead,
            )
        tuning = self.settings("read").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        engine = self._caller_engine(request_bytes)
        with self._guard:
            first, self._next_file = self._next_file, self._next_file + len(paths)
        natives: list[File | None] = [None] * len(paths)
        for number in needed:
            natives[number] = File(fd=first + number, path=f"{self.location}/{paths[number]}", alignment=1)
        with translated(Path(self.location), "begin to read from", "", remedy=MORE_THREADS):
            job = engine.read(
                arena, natives, rows, ReadOptions(
                    stop_at_bad=stop_at_bad, in_place=False, request_bytes=request_bytes, ahead=ahead
                ),
            )
            located = ReadSources(self.location, paths, first, sources, local, rebuilt)
            return PeerReadHandle(self._peers, engine, job, located, max(1, -(-wanted_bytes // request_bytes)))

    def _caller_engine(self, request_bytes: int) -> Engine:
        """An engine whose requests are carried out by threads of this process."""
        tuning = self.settings("read").tuning
        with translated(Path(self.location), "start the engine for", ""), self._guard:
            if request_bytes not in self._caller_engines:
                self._caller_engines[request_bytes] = Engine(
                    backend="caller", queue_depth=tuning.queue_depth, request_bytes=request_bytes,
                    workers=self._read_workers, background=True,
                )
            return self._caller_engines[request_bytes]

    def close(self) -> None:
        with self._guard:
            engines, self._caller_engines = tuple(self._caller_engines.values()), {}
        for engine in engines:
            engine.close()
        super().close()

    def forget(self) -> None:
        """Called in a forked child: forget the threads, which belong to the parent."""
        self._guard, self._caller_engines = Lock(), {}


def _place(address: str) -> NodeAddress:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError(
            f"{address!r:.60} is not the address of a node", expected="host:port", next="write 10.0.0.3:7000"
        )
    return NodeAddress("", host.strip("[]"), int(port))


def _parity(given: tuple[int, int], replicas: int | None) -> tuple[int, int]:
    """Check the option `parity`; (0, 0) if it was not given. Raises ArgumentError, FrameworkError."""
    if replicas is not None:
        raise ArgumentError("parity and replicas were both given", next="give one of them")
    if not isinstance(given, tuple) or len(given) != 2:
        raise ArgumentError(f"parity must be (k, m), got {given!r:.60}", next="write parity=(3, 1)")
    columns, rows = (whole_number("parity", number) for number in given)
    if columns < 1 or rows < 1 or 2 * (columns + rows) > erasure.SHARDS_MAX:
        raise ArgumentError(
            f"parity is {given!r:.60}, out of range",
            expected=f"each at least 1, and their sum at most {erasure.SHARDS_MAX // 2}",
            next="write parity=(3, 1): then any one node of each group of four may be lost",
        )
    erasure.library()
    return columns, rows


def _shown(introduction: _Introduction) -> str:
    columns, rows = introduction.parity
    return f"{introduction.run}, " + (f"parity ({columns}, {rows})" if rows else f"{introduction.replicas} replicas")


def _secret(given: str | bytes | None) -> bytes:
    secret = os.environ.get(SECRET_VARIABLE, "") if given is None else given
    secret = secret.encode() if isinstance(secret, str) else secret
    least, longest = PEER_SECRET_BYTES
    if not least <= len(secret) <= longest:
        raise ArgumentError(
            "the nodes of a job need a secret", expected=f"{least} to {longest} bytes", found=f"{len(secret)} bytes",
            next=f"set {SECRET_VARIABLE} to the same random text on all nodes, such as from `openssl rand -hex 32`",
        )
    return secret
