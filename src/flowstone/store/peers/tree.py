"""The names of files in the memory of several nodes (docs/ORDERING.md, Memory of several nodes).

Files are created in this node's agent. All other changes of names are made on every node of the job. Reads see the
files of all nodes that answer.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock

import msgspec

from flowstone.config import (
    MANIFEST_BYTES_MAX,
    MARKER_BYTES_MAX,
    PEER_DESCRIPTION_BYTES_MAX,
    PEER_REBUILD_BYTES,
    READ_REQUEST_BYTES,
)
from flowstone.errors import FormatError, MemoryAgentError, PeerError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME, decode_manifest
from flowstone.log import log
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import AgentTree
from flowstone.store.peers.erasure import is_available
from flowstone.store.peers.node import Node, NodeAddress, check_answer, request_all
from flowstone.store.peers.parity import FileRange, ParityContribution, RebuildPlan, column_of, is_parity, rebuild
from flowstone.store.peers.view import CompleteStep, FileSource, View, is_step, merge_inventories
from flowstone.store.peers.wire import PeerRequest, PeerResponse

_SERVE_S = 60.0
DRAFT, _NOTE = ".saving-", ".rewound-"


class PeersTree(AgentTree):
    """A MemoryTree (store.memory.store) over several nodes.

    serve       the request to the agent to serve this run to other nodes
    find_nodes  called in a process outside of the job; it must call `use_nodes`
    """

    def __init__(
        self, run: str, location: str, secret: bytes, serve: AgentRequest, find_nodes: Callable[[], None]
    ) -> None:
        super().__init__(run, location)
        self._secret, self._serve, self._find_nodes = secret, serve, find_nodes
        self._nodes: Sequence[Node] = ()
        self.own = 0  # the number of this node
        self._guard = RLock()  # guards the nodes' connections
        # digest of a checkpoint's manifest -> names and sizes of its segments
        self._segments: dict[str, Mapping[str, int]] = {}
        # number of a file that describes a column for parity -> its content
        self._described: dict[int, ParityContribution] = {}
        self._is_locked = False
        self._logged: set[str] = set()  # messages about incomplete checkpoints that were logged

    # Nodes

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes of the job."""
        if not self._nodes:
            self._find_nodes()
        return self._nodes

    def introduce(self, keep: AgentRequest) -> NodeAddress:
        """Let the agent serve this node's memory to other nodes. Returns the node's address. Raises MemoryAgentError.
        """
        self.client.request(keep, start=True)
        port = self._start_server()
        self._serve = msgspec.structs.replace(self._serve, number=port)
        place = NodeAddress("", self._serve.target, port)
        own = Node(place, self.client.run, self._secret)
        try:
            check_answer(own.link.request(PeerRequest("free")), place)
            return msgspec.structs.replace(place, node=own.link.node)
        finally:
            own.link.close()

    def _start_server(self) -> int:
        """Let the agent start a server, unless one is running. Returns its port."""
        deadline = time.monotonic() + _SERVE_S
        while not (port := self.client.request(self._serve, start=True)[0].text):
            if time.monotonic() > deadline:
                raise MemoryAgentError(
                    f"memory://{self.client.run} is not served to other nodes after {_SERVE_S:.0f} s",
                    next="read the memory agent's log on this node",
                )
            time.sleep(0.005)
        return int(port)

    def use_nodes(self, own: NodeAddress, places: Sequence[NodeAddress]) -> None:
        """Use the nodes at `places` as the nodes of the job, in this order. `own`: the address of this node."""
        with self._guard:
            for node in self._nodes:
                node.link.close()
            self._nodes = [Node(place, self.client.run, self._secret) for place in places]
            self.own = next(index for index, place in enumerate(places) if place.node == own.node)

    def link_of(self, node: int) -> Node:
        """The node with number `node`, over a separate connection for the calling thread."""
        return Node(self.nodes[node].place, self.client.run, self._secret)

    # Contents

    def view(self, *, of_all: bool = False) -> View:
        """The merged inventories (lists of files) of all nodes that answer. `of_all`: raise PeerError if any node does
        not answer.
        """
        with self._guard:
            up = [index for index, node in enumerate(self.nodes) if of_all or not node.is_down]
            answers = request_all([self.nodes[index] for index in up], PeerRequest("held"))
            inventories = {}
            for index, answer in zip(up, answers, strict=True):
                if isinstance(answer, PeerError):
                    if of_all:
                        raise answer
                    log.warning("%s", answer.message)
                elif answer.held is not None:
                    inventories[index] = answer.held
            view = merge_inventories(
                inventories, self.own, self._segments_of, partial(self._described_by, of_all=of_all)
            )
        for name, reason in view.incomplete.items():
            self._log_once(f"{name} in {self._location} is incomplete: {reason}{self._down_note()}")
        for name, step in view.steps.items():
            if step.rebuilt:
                names = ", ".join(sorted(step.rebuilt))
                self._log_once(f"{names} of {name} in {self._location} are rebuilt from parity{self._down_note()}")
        return view

    def _log_once(self, message: str) -> None:
        """Log a message, unless the same message was logged before."""
        if message not in self._logged:
            self._logged.add(message)
            log.warning("%s", message)

    def _down_note(self) -> str:
        down = [node.place.shown for node in self._nodes if node.why_down]
        return f" (no answer from {', '.join(down)})" if down else ""

    def missing_checkpoints(self) -> str:
        """A text for a message: which checkpoints are incomplete, and why they cannot be loaded; "" if there are none.
        """
        lacks = self.view().incomplete
        return "; ".join(f"{name} is incomplete: {reason}{self._down_note()}" for name, reason in lacks.items())

    def _segments_of(self, directory: str, manifest: str, sources: Sequence[FileSource]) -> Mapping[str, int]:
        if manifest not in self._segments:
            path = f"{directory}/{MANIFEST_NAME}"
            content = self._read_any(path, sources, MANIFEST_BYTES_MAX)
            try:
                decoded = decode_manifest(content, path=f"{self._location}/{path}")
                self._segments[manifest] = {row.name: row.bytes for row in decoded.segments}
            except FormatError:
                self._segments[manifest] = {}  # a load of that checkpoint raises the error
        return self._segments[manifest]

    def _described_by(
        self, directory: str, parity: Mapping[str, tuple[FileSource, ...]], *, of_all: bool = False
    ) -> Mapping[str, ParityContribution]:
        """The descriptions of a checkpoint's parity: name of a description file -> its content. Empty if ISA-L is not
        installed.

        Each node that keeps a row of parity also has the descriptions of all columns. So with several rows, no
        description is lost with a node. `of_all`: raise an error if a description cannot be read. Needed by a caller
        that removes incomplete checkpoints.
        """
        if not is_available():
            return {}
        contributions = {}
        for name, sources in parity.items():
            if column_of(name)[1] is None:
                continue  # this file has parity, and is no description
            number = sources[0].number
            try:
                if number not in self._described:
                    content = self._read_any(f"{directory}/{name}", sources, PEER_DESCRIPTION_BYTES_MAX)
                    self._described[number] = msgspec.msgpack.decode(content, type=ParityContribution)
            except msgspec.DecodeError as error:
                self._log_once(f"{self._location}/{directory}/{name} is not a valid description of parity: {error}")
            except (OSError, PeerError) as error:
                if of_all:
                    raise
                self._log_once(f"cannot read {self._location}/{directory}/{name}: {error}")
            else:
                contributions[name] = self._described[number]
        return contributions

    def _read_any(self, path: str, sources: Sequence[FileSource], bytes_max: int) -> bytes:
        """Read a small file from the first node that delivers it. If none does, raises the OSError or PeerError of the
        last node.
        """
        for source in sources:
            try:
                return self.read_from(source, path, 0, min(source.size_bytes, bytes_max))
            except PeerError as error:
                self.nodes[source.node].mark_down(error)
                refusal: Exception = error
            except OSError as error:  # the file was removed meanwhile
                refusal = error
        raise refusal

    def step_of(self, path: str) -> tuple[CompleteStep, RebuildPlan] | None:
        """For a file that no node has: its checkpoint, and how to compute the file from parity. None if a node has the
        file, or it does not exist.
        """
        directory, _, name = path.partition("/")
        step = self.view().steps.get(directory) if is_step(directory) else None
        return None if step is None or name not in step.rebuilt else (step, step.rebuilt[name])

    def read_from(self, source: FileSource, path: str, begin: int, end: int) -> bytes:
        """Read bytes `begin` to `end` - 1 of a file from a node. Raises OSError, PeerError."""
        content = bytearray(max(0, min(end, source.size_bytes) - begin))
        target = memoryview(content)
        with self._guard:
            for offset in range(0, len(content), READ_REQUEST_BYTES):
                part = target[offset : offset + READ_REQUEST_BYTES]
                request = PeerRequest("read", path, number=source.number, offset=begin + offset, size_bytes=len(part))
                if self.nodes[source.node].link.read_into(request, part) != len(part):
                    raise OSError(errno.EIO, "the file became shorter while it was read")
        return bytes(content)

    def sources(self, path: str) -> tuple[FileSource, ...]:
        """The nodes that have a file, in the order in which to try them. Empty for a file that must be computed from
        parity.

        raises  OSError  with ENOENT or EISDIR
        """
        directory, _, name = path.partition("/")
        if is_step(directory):
            step = self.view().steps.get(directory)
            if step is not None and not name:
                raise OSError(errno.EISDIR, "the path is a directory")
            if step is not None and name in step.rebuilt:
                return ()
            if step is None or name not in step.files:
                raise OSError(errno.ENOENT, "no such file")
            return step.files[name]
        sources, refusal = [], OSError(errno.ENOENT, "no such file")
        for index, answer in self._ask_up(PeerRequest("look", path)):
            if not answer.errno:
                sources.append(FileSource(index, answer.number, answer.size_bytes))
            elif answer.errno != errno.ENOENT:
                refusal = OSError(answer.errno, answer.error)
        if not sources:
            raise refusal
        return tuple(sorted(sources, key=lambda source: (source.node - self.own) % len(self.nodes)))

    def exists(self, path: str) -> bool:
        directory, _, name = path.partition("/")
        if is_step(directory):
            step = self.view().steps.get(directory)
            return step is not None and (not name or name in step.names)
        return any(answer.yes for _, answer in self._ask_up(PeerRequest("exists", path)))

    def names(self, path: str) -> tuple[str, ...]:
        if not path:
            return self.view().names
        if is_step(path):
            step = self.view().steps.get(path)
            return () if step is None else step.names
        names = {name for _, answer in self._ask_up(PeerRequest("names", path)) for name in answer.names}
        return tuple(sorted(name for name in names if not is_parity(name)))

    def stat(self, path: str) -> tuple[int, int]:
        if (rebuildable := self.step_of(path)) is not None:
            return rebuildable[1].number, rebuildable[1].size_bytes
        first = self.sources(path)[0]
        return first.number, first.size_bytes

    def open(self, path: str) -> MemoryFile:
        if (rebuildable := self.step_of(path)) is not None:
            return RebuiltFile(self, *rebuildable, path, f"{self._location}/{path}")
        first = self.sources(path)[0]
        if first.node == self.own:
            return super().open(path)
        return RemoteFile(self, first, path, f"{self._location}/{path}")

    def _ask_up(self, request: PeerRequest) -> list[tuple[int, PeerResponse]]:
        """Send a request to all nodes. Returns the number and the answer of each node that answers."""
        with self._guard:
            up = [index for index, node in enumerate(self.nodes) if not node.is_down]
            answers = request_all([self.nodes[index] for index in up], request)
        return [(index, answer) for index, answer in zip(up, answers, strict=True) if not isinstance(answer, PeerError)]

    # Changes of names, on all nodes

    def _ask_each(self, request: PeerRequest, payload: bytes = b"") -> list[PeerResponse]:
        """Send a request to all nodes, and return their answers. Raises PeerError if a node does not answer, even if
        other nodes have carried out the request.
        """
        with self._guard:
            answers = request_all(self.nodes, request, payload)
        for answer in answers:
            if isinstance(answer, PeerError):
                raise answer
        return [answer for answer in answers if isinstance(answer, PeerResponse)]

    def put(self, path: str, content: bytes) -> None:
        for node, answer in zip(self.nodes, self._ask_each(_put(path, content), content), strict=True):
            check_answer(answer, node.place)

    def make_directory(self, path: str) -> None:
        self._start_server()
        for index, answer in enumerate(self._ask_each(PeerRequest("make_directory", path))):
            if answer.errno != errno.EEXIST or index == self.own:
                check_answer(answer, self.nodes[index].place)

    def remove(self, path: str) -> None:
        if "/" not in path:
            self._remove_parity(path)
        answers = self._ask_each(PeerRequest("remove", path))
        refused = [answer for answer in answers if answer.errno and answer.errno != errno.ENOENT]
        if refused or all(answer.errno for answer in answers):
            check_answer((refused or answers)[0], self.nodes[self.own].place)

    def _remove_parity(self, directory: str) -> None:
        """Remove a directory's parity files, which listings do not show, once it has no other files."""
        listings = self._ask_each(PeerRequest("names", directory))
        if not all(is_parity(name) for listing in listings for name in listing.names):
            return
        with self._guard:
            for node, listing in zip(self.nodes, listings, strict=True):
                for name in listing.names:
                    check_answer(node.link.request(PeerRequest("remove", f"{directory}/{name}")), node.place)

    def rename(self, source: str, target: str, *, directories: bool) -> None:
        """Rename on all nodes or on none: if one node fails, the others undo the rename. `source` must exist on each
        node.
        """
        assert directories, "agents rename directories, too"
        with self._guard:
            answers = request_all(self.nodes, PeerRequest("rename", source, target))
            is_draft = source.startswith(DRAFT)
            refused = [
                (index, answer) for index, answer in enumerate(answers)
                if isinstance(answer, PeerError) or (answer.errno and (is_draft or answer.errno != errno.ENOENT))
            ]
            done = [
                node for node, answer in zip(self.nodes, answers, strict=True)
                if not isinstance(answer, PeerError) and not answer.errno
            ]
            if refused:
                request_all(done, PeerRequest("rename", target, source))
        for index, answer in refused or ([] if done else list(enumerate(answers))):
            if isinstance(answer, PeerError):
                raise answer
            check_answer(answer, self.nodes[index].place)
        if is_draft:
            self._ask_each(PeerRequest("agree", target))  # after this, older checkpoints may be removed

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.ENOTSUP, f"cannot link {source} to {target} in the memory of several nodes")

    # The lock, of all nodes

    def lock(self, holder: str) -> str | None:
        other = super().lock(holder)
        if other is not None or (self._is_locked and super().lost_lock() is None and not self._lost_elsewhere()):
            return other
        self._is_locked = False
        self._start_server()
        for node in self.nodes:
            other = self._lock_at(node, holder)
            if other is not None:
                self.unlock()
                return other
        self._is_locked = True
        view = self.view(of_all=True)
        newest = max(view.steps, key=lambda name: (len(name), name), default="")
        self._ask_each(PeerRequest("agree", newest, number=view.epoch + 1))
        self._set_aside_incomplete(view)
        self._update_nodes()
        return None

    def _lock_at(self, node: Node, holder: str) -> str | None:
        """Take the lock on one node. Returns None, or the holder if another job has that lock."""
        with self._guard:
            answer = node.link.request(PeerRequest("lock", text=holder))
        name, _, process = answer.text.partition("\n")
        return None if answer.yes else f"{name}, which holds the lock at {node.place.shown}\n{process}"

    def _set_aside_incomplete(self, view: View) -> None:
        """Rename incomplete checkpoints to names of leftovers, which the writer removes."""
        for name, reason in view.incomplete.items():
            log.warning("removing %s in %s: %s", name, self._location, reason)
            self._ask_each(
                PeerRequest("rename", name, f".deleting-{name.removeprefix('step-')}-{secrets.token_hex(8)}")
            )

    def _update_nodes(self) -> None:
        """Copy the files at the store's root (the marker, and notes of rewinds) to nodes that lack them."""
        self._ask_each(PeerRequest("make_directory"))
        names = [set(answer.names) for answer in self._ask_each(PeerRequest("names"))]
        for name in set[str]().union(*names):
            lacking = [node for node, existing in zip(self.nodes, names, strict=True) if name not in existing]
            if lacking and (name == MARKER_NAME or name.startswith(_NOTE)):
                content = self.open(name).read(0, MARKER_BYTES_MAX)
                with self._guard:
                    for node in lacking:
                        check_answer(node.link.request(_put(name, content), content), node.place)

    def lost_lock(self) -> str | None:
        own = super().lost_lock()
        return self._lost_elsewhere() or own  # asks the nodes first, since they may know another holder

    def _lost_elsewhere(self) -> str | None:
        with self._guard:
            answers = request_all(self.nodes, PeerRequest("lost_lock"))
        for node, answer in zip(self.nodes, answers, strict=True):
            if isinstance(answer, PeerError):
                return answer.message
            if not answer.yes:
                return answer.text or f"no holder at {node.place.shown}"
        return None

    def unlock(self) -> None:
        self._is_locked = False
        with self._guard:
            connected = [node for node in self._nodes if node.link.is_connected]
            request_all(connected, PeerRequest("unlock"))
        super().unlock()

    def close(self) -> None:
        with suppress(OSError, PeerError):
            self.unlock()  # another job may be waiting for the lock
        with self._guard:
            for node in self._nodes:
                node.link.close()
        super().close()

    def forget(self) -> None:
        super().forget()
        self._guard = RLock()
        for node in self._nodes:
            node.link.forget()


def _put(path: str, content: bytes) -> PeerRequest:
    return PeerRequest("put", path, payload_bytes=len(content))


class RemoteFile(MemoryFile):
    """A file in the memory of another node, which is read in small parts. Large reads use store/peers/reading.py."""

    # without the base class' __init__, as there is no descriptor
    def __init__(self, tree: PeersTree, source: FileSource, path: str, shown: str) -> None:
        self.number, self.size_bytes, self.path, self.touched_bytes = source.number, source.size_bytes, shown, 0
        self.links, self.writer = 0, None
        self._tree, self._source, self._path = tree, source, path

    def read(self, begin: int, end: int) -> bytes:
        return self._tree.read_from(self._source, self._path, begin, end)


class RebuiltFile(MemoryFile):
    """A lost file, whose bytes are computed from parity when they are read, in small parts."""

    def __init__(self, tree: PeersTree, step: CompleteStep, rebuilt: RebuildPlan, path: str, shown: str) -> None:
        self.number, self.size_bytes, self.path, self.touched_bytes = rebuilt.number, rebuilt.size_bytes, shown, 0
        self.links, self.writer = 0, None
        self._tree, self._step, self._rebuilt, self._directory = tree, step, rebuilt, path.partition("/")[0]

    def read(self, begin: int, end: int) -> bytes:
        content = bytearray(max(0, min(end, self.size_bytes) - begin))
        buffer = memoryview(bytearray(min(PEER_REBUILD_BYTES, len(content))))
        rebuild(self._rebuilt, begin, memoryview(content), self._part, buffer)
        return bytes(content)

    def _part(self, part: FileRange, target: memoryview) -> None:
        source = (self._step.files.get(part.file) or self._step.parity[part.file])[0]
        path = f"{self._directory}/{part.file}"
        target[:] = self._tree.read_from(source, path, part.offset, part.offset + part.length)
