"""A store in the memory of a job's several nodes: what one node has lost, others have. docs/PEERS.md.

Each rank writes into the agent of its own node, as a NodeMemory does; a segment counts as written once the nodes that
keep its copies have it. What is read comes from this node where it is here, else from another one.
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

from flowstone import _native
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
from flowstone.store.agent_wire import Request
from flowstone.store.base import UNPACED, FilePlan, Pace
from flowstone.store.contents import MemoryFile
from flowstone.store.forks import forget_in_children
from flowstone.store.jobs import JobReading
from flowstone.store.memory import MemoryWriting
from flowstone.store.node_memory import NodeMemory
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.peers import erasure
from flowstone.store.peers.copies import Limits, copies_of, send, shares_of
from flowstone.store.peers.interfaces import address_of
from flowstone.store.peers.node import Link, Place
from flowstone.store.peers.parity import shares
from flowstone.store.peers.placement import keepers
from flowstone.store.peers.reading import Located, PeerReading
from flowstone.store.peers.spreading import Spreading
from flowstone.store.peers.tree import DRAFT, PeersTree
from flowstone.store.peers.wire import Ask

SECRET_VARIABLE = "FLOWSTONE_PEERS_SECRET"  # noqa: S105  (its name)


class _Introduction(msgspec.Struct, frozen=True):
    """What a rank tells the others."""

    place: Place
    run: str
    replicas: int
    parity: tuple[int, int]
    rank: str  # tells ranks of one node apart


class PeerMemory(NodeMemory):
    """The checkpoints of the run `name` in the memory of all nodes of the job. A Store: every rank gives the same to
    its Checkpointer, which has the nodes find each other by the job's own rendezvous.

    secret       that all nodes of the job know, and no one else: 16 bytes at least; None: FLOWSTONE_PEERS_SECRET
    replicas     how many nodes keep what a node saves, itself included: groups of so many keep each other's (Gemini,
                 SOSP 2023). So many less one may be lost at once, and more where they are of different groups
    parity       (k, m), in place of replicas: groups of k + m nodes or more, any m of which may be lost at once, for
                 m / k of the memory of what is saved; see docs/PEERS.md. Needs `flowstone[parity]`
    interface    the network that joins the nodes: its name, or this node's address in it; None: the one that leads to
                 MASTER_ADDR. Nothing is served at any other address
    port         where this node is served; 0: any free one
    addresses    of all nodes, as "host:port", for a process outside of a job: nothing is exchanged then
    state_bytes  of one checkpoint, that the ranks of this node save, if it is known: what does not fit, with what is
                 kept for other nodes, is refused here
    bytes_per_s  that a rank sends to make copies; None: no limit
    spread       over what share of the time between two saves copies are spread, once that is known, and until a thread
                 waits for them; 0: copies are made as fast as the network takes them

    Other options are those of NodeMemory. Needs memory for `replicas` x `generations` of what a node's ranks save, or
    (1 + m / k) x `generations`; with parity on fewer nodes than k + m more, as they are fewer to share it.

    raises  ArgumentError; BudgetError if this node has less memory than that; FrameworkError if what parity needs is
            not installed
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
            raise ArgumentError(f"replicas {replicas} is less than 1", next="a node's own is the first one")
        self.parity = (0, 0) if parity is None else _parity(parity, replicas)
        if state_bytes is not None:
            own, (columns, rows) = whole_number("state_bytes", state_bytes), self.parity
            self._check_room(own - (-own * rows // columns) if rows else own * self.replicas)
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ArgumentError(f"bytes_per_s {bytes_per_s!r:.60} is not above 0", next="leave it out for no limit")
        if not 0 <= spread <= PEER_SPREAD_MAX:
            raise ArgumentError(
                f"spread {spread!r:.60} is no share of the time between two saves", expected=f"0 to {PEER_SPREAD_MAX}",
                next="leave it out",
            )
        self._spreading = Spreading(spread)
        self._bytes_per_s, self._addresses = bytes_per_s, [_place(address) for address in addresses]
        self._secret = _secret(secret)
        serve = Request("serve", target=address_of(interface), number=port, text=self._secret.hex())
        self._peers = PeersTree(self.run, self.location, self._secret, serve)
        self._agent = self._tree = self._peers
        self.capabilities = msgspec.structs.replace(self.capabilities, links=False)
        self._guard = Lock()
        self._caller_engines: dict[int, _native.Engine] = {}
        self._next_file = 0
        self._number_on_node = 0  # of this rank
        self._draft, self._writes = "", 0  # the last one that was written into, and how often
        self._has_nodes = False
        self._peers.find = self._find
        forget_in_children(self)

    # The nodes

    def introduce(self) -> bytes:
        """What this rank tells the others, so that their nodes find this one. Starts agent and server if need be."""
        try:
            place = self._peers.introduce(self._keep)
        except OSError as error:
            raise PeerError(
                f"{self.location} is not served to other nodes: {error.strerror}", errno=error.errno or 0,
                next="give all jobs of a run the same secret, interface and port; see what else uses that port",
            ) from error
        return msgspec.msgpack.encode(
            _Introduction(place, self.run, self.replicas, self.parity, secrets.token_hex(8))
        )

    def use_addresses(self, introductions: Sequence[bytes], own: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """Take what all ranks have introduced for the nodes of the job. Raises ArgumentError where they differ.

        deadline_s  that ranks wait for the slowest: one whose copies are expedited may wait for one whose are spread
        """
        ranks = [msgspec.msgpack.decode(encoded, type=_Introduction) for encoded in introductions]
        mine = msgspec.msgpack.decode(own, type=_Introduction)
        for rank, one in enumerate(ranks):
            if (one.run, one.replicas, one.parity) != (mine.run, mine.replicas, mine.parity):
                raise ArgumentError(
                    f"rank {rank} saves to another memory of several nodes", expected=_shown(mine), found=_shown(one),
                    next="give every rank the same store",
                )
        before = ranks[: list(introductions).index(own)]
        self._number_on_node = sum(1 for one in before if one.place.node == mine.place.node)
        self._peers.use_nodes(mine.place, tuple({one.place.node: one.place for one in ranks}.values()))
        self._spreading = self._spreading.bounded(deadline_s / 4)
        self._has_nodes = True

    def _find(self) -> None:
        """Outside of a job: this node, and those of `addresses`."""
        with self._guard:
            if self._has_nodes:
                return
            own = self._peers.introduce(self._keep)
            places = [own]
            for address in self._addresses:
                link = Link(address, self.run, self._secret)
                try:
                    link.ask(Ask("free"))
                    places.append(msgspec.structs.replace(address, node=link.node))
                except PeerError as error:
                    if error.errno != errno.EHOSTUNREACH:
                        raise
                    places.append(address)  # it may answer later
                finally:
                    link.close()
            apart = {place.node or place.shown: place for place in places}
            self._peers.use_nodes(own, sorted(apart.values(), key=lambda place: place.shown))
            self._has_nodes = True

    def absent(self) -> str:
        """Why newer checkpoints, of which some nodes know, cannot be loaded; "" if there are none."""
        return self._peers.absent() if self._has_nodes else ""

    def copies(self, step: int) -> dict[str, tuple[str, ...]]:
        """At which addresses each file of a checkpoint is; empty if that is not whole."""
        nodes, found = self._peers.nodes, self._peers.view().steps.get(f"step-{step:08d}")
        files = {} if found is None else found.files
        return {
            name: tuple(nodes[source.node].place.shown for source in sources) for name, sources in sorted(files.items())
        }

    # Bulk bytes

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> MemoryWriting:
        draft = files[0].path.partition("/")[0] if files else ""
        if draft.startswith(DRAFT):
            self._spreading.began(draft)
        return super().write(files, rows, arena, pace, reserved=reserved)

    def expedite(self) -> None:
        """A thread waits for the saves so far: their copies are made as fast as the network takes them. Any thread."""
        self._spreading.expedite()

    def secure(self, files: Sequence[tuple[str, MemoryFile]], job: _native.WriteJob) -> FlowstoneError | None:
        """Make the copies of what was written, or its parity. The reason why there are none."""
        if not files:
            return None
        own, nodes = self._peers.own, len(self._peers.nodes)
        draft, (columns, rows) = files[0][0].partition("/")[0], self.parity
        if rows and draft.startswith(DRAFT):
            to = shares_of(files, shares(own, nodes, columns, rows), self._writer(draft))
        else:  # what belongs to no checkpoint has copies in any case: its name may be used again
            replicas = 1 + rows if rows else self.replicas
            to = dict.fromkeys(keepers(own, nodes, replicas)[1:], copies_of(files))
        try:
            sendings = [(self._peers.link_of(node).link, what) for node, what in to.items()]
            due = self._spreading.due(draft)
            send(sendings, Limits(
                self._bytes_per_s, self._spreading.left_s(due), lambda: due.is_expedited, lambda: job.cancelled
            ))
        except FlowstoneError as error:
            return error
        return None

    def _writer(self, draft: str) -> str:
        """Tells the files of one write apart from those of others into the draft, of this node: see parity_name."""
        with self._guard:
            self._draft, self._writes = draft, self._writes + 1 if draft == self._draft else 0
            return f"{self._number_on_node}-{self._writes}"

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReading:
        wanted = sorted(set(chain.from_iterable(rows.file_groups)))
        sources, local, rebuilt = {}, {}, {}
        for number in wanted:
            path = paths[number]
            with self._acting("open", path):
                sources[path] = self._peers.sources(path)
                if not sources[path] and (found := self._peers.step_of(path)) is not None:
                    rebuilt[path] = found
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
        natives: list[_native.File | None] = [None] * len(paths)
        for number in wanted:
            natives[number] = _native.File(fd=first + number, path=f"{self.location}/{paths[number]}", alignment=1)
        with translated(Path(self.location), "begin to read from", "", remedy=MORE_THREADS):
            job = engine.read(
                arena, natives, rows, stop_at_bad=stop_at_bad, in_place=False, request_bytes=request_bytes, ahead=ahead
            )
            located = Located(self.location, paths, first, sources, local, rebuilt)
            return PeerReading(self._peers, engine, job, located, max(1, -(-wanted_bytes // request_bytes)))

    def _caller_engine(self, request_bytes: int) -> _native.Engine:
        """One whose requests are carried out here."""
        tuning = self.settings("read").tuning
        with translated(Path(self.location), "start the engine for", ""), self._guard:
            if request_bytes not in self._caller_engines:
                self._caller_engines[request_bytes] = _native.Engine(
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
        """In a forked child: the threads are gone."""
        self._guard, self._caller_engines = Lock(), {}


def _place(address: str) -> Place:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentError(
            f"{address!r:.60} is no address of a node", expected="host:port", next="write 10.0.0.3:7000"
        )
    return Place("", host.strip("[]"), int(port))


def _parity(given: tuple[int, int], replicas: int | None) -> tuple[int, int]:
    """Raises ArgumentError, FrameworkError."""
    if replicas is not None:
        raise ArgumentError("parity and replicas exclude each other", next="give one of them")
    if not isinstance(given, tuple) or len(given) != 2:
        raise ArgumentError(f"parity {given!r:.60} is no pair of numbers", next="write parity=(3, 1)")
    columns, rows = (whole_number("parity", one) for one in given)
    if columns < 1 or rows < 1 or 2 * (columns + rows) > erasure.SHARDS_MAX:
        raise ArgumentError(
            f"parity {given!r:.60} cannot be", expected=f"1 and more, together {erasure.SHARDS_MAX // 2} at most",
            next="write parity=(3, 1): of groups of four nodes, any one may be lost",
        )
    erasure.library()
    return columns, rows


def _shown(one: _Introduction) -> str:
    columns, rows = one.parity
    return f"{one.run}, " + (f"parity ({columns}, {rows})" if rows else f"{one.replicas} replicas")


def _secret(given: str | bytes | None) -> bytes:
    secret = os.environ.get(SECRET_VARIABLE, "") if given is None else given
    secret = secret.encode() if isinstance(secret, str) else secret
    least, most = PEER_SECRET_BYTES
    if not least <= len(secret) <= most:
        raise ArgumentError(
            "the nodes of a job need a secret", expected=f"{least} to {most} bytes", found=f"{len(secret)} bytes",
            next=f"set {SECRET_VARIABLE} to the same random text on all nodes, as `openssl rand -hex 32` prints it",
        )
    return secret
