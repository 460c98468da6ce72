"""Names that the agents of several nodes keep together. docs/ORDERING.md (Memory of several nodes) says what follows.

Files are created in this node's agent; what else changes names is done on every node of the job. What is read is what
all nodes that answer have together.
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
from flowstone.store.agent_wire import Request
from flowstone.store.contents import MemoryFile
from flowstone.store.node_memory import AgentTree
from flowstone.store.peers.erasure import is_there
from flowstone.store.peers.node import Node, Place, ask_all, checked
from flowstone.store.peers.parity import Contribution, Part, Rebuilt, column_of, is_parity, rebuild
from flowstone.store.peers.view import Source, View, WholeStep, is_step, see
from flowstone.store.peers.wire import Ask, Told

_SERVE_S = 60.0
DRAFT, _NOTE = ".saving-", ".rewound-"


class PeersTree(AgentTree):
    """See store.memory.MemoryTree. `serve`: what the agent is told, to serve this run to other nodes."""

    def __init__(self, run: str, location: str, secret: bytes, serve: Request) -> None:
        super().__init__(run, location)
        self._secret, self._serve = secret, serve
        self.find: Callable[[], None] = lambda: None  # calls `use_nodes`, where no job has
        self._nodes: Sequence[Node] = ()
        self.own = 0  # which of them is this one
        self._guard = RLock()  # of the nodes' connections
        self._segments: dict[str, Mapping[str, int]] = {}  # of checkpoints, by their manifest's digest
        self._described: dict[int, Contribution] = {}  # what parity is of, by the number of the file that says it
        self._is_locked = False
        self._told: set[str] = set()  # what the log has been told of checkpoints that are not whole

    # Meeting

    @property
    def nodes(self) -> Sequence[Node]:
        """All of the job."""
        if not self._nodes:
            self.find()
        return self._nodes

    def introduce(self, keep: Request) -> Place:
        """Have this node served. Where. Raises MemoryAgentError."""
        self.client.ask(keep, start=True)
        port = self._served()
        self._serve = msgspec.structs.replace(self._serve, number=port)
        place = Place("", self._serve.target, port)
        own = Node(place, self.client.run, self._secret)
        try:
            checked(own.link.ask(Ask("free")), place)
            return msgspec.structs.replace(place, node=own.link.node)
        finally:
            own.link.close()

    def _served(self) -> int:
        """Have a server, which is started if there is none, or if it has ended. Its port."""
        deadline = time.monotonic() + _SERVE_S
        while not (port := self.client.ask(self._serve, start=True)[0].text):
            if time.monotonic() > deadline:
                raise MemoryAgentError(
                    f"memory://{self.client.run} is not served to other nodes after {_SERVE_S:.0f} s",
                    next="look into the memory agent's log",
                )
            time.sleep(0.005)
        return int(port)

    def use_nodes(self, own: Place, places: Sequence[Place]) -> None:
        """Take these for the nodes of the job, in this order."""
        with self._guard:
            for node in self._nodes:
                node.link.close()
            self._nodes = [Node(place, self.client.run, self._secret) for place in places]
            self.own = next(at for at, place in enumerate(places) if place.node == own.node)

    def link_of(self, node: int) -> Node:
        """A node with a connection of its own, for the thread that asks."""
        return Node(self.nodes[node].place, self.client.run, self._secret)

    # What there is

    def view(self, *, of_all: bool = False) -> View:
        """What all nodes that answer hold together. `of_all`: raise PeerError if one does not answer."""
        with self._guard:
            up = [at for at, node in enumerate(self.nodes) if of_all or not node.is_down]
            answers = ask_all([self.nodes[at] for at in up], Ask("held"))
            held = {}
            for at, answer in zip(up, answers, strict=True):
                if isinstance(answer, PeerError):
                    if of_all:
                        raise answer
                    log.warning("%s", answer.message)
                elif answer.held is not None:
                    held[at] = answer.held
            found = see(held, self.own, self._segments_of, partial(self._described_by, of_all=of_all))
        for name, why in found.lacks.items():
            self._tell(f"{name} in {self._location} is not whole: {why}{self._down()}")
        for name, step in found.steps.items():
            if step.rebuilt:
                which = ", ".join(sorted(step.rebuilt))
                self._tell(f"{which} of {name} in {self._location} follow from parity{self._down()}")
        return found

    def _tell(self, what: str) -> None:
        """The log, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", what)

    def _down(self) -> str:
        down = [node.place.shown for node in self._nodes if node.why_down]
        return f" (no answer from {', '.join(down)})" if down else ""

    def absent(self) -> str:
        """Why newer checkpoints that some nodes know cannot be loaded; "" if there are none."""
        lacks = self.view().lacks
        return "; ".join(f"{name} is not whole: {why}{self._down()}" for name, why in lacks.items())

    def _segments_of(self, directory: str, manifest: str, sources: Sequence[Source]) -> Mapping[str, int]:
        if manifest not in self._segments:
            path = f"{directory}/{MANIFEST_NAME}"
            content = self._read_any(path, sources, MANIFEST_BYTES_MAX)
            try:
                found = decode_manifest(content, path=f"{self._location}/{path}")
                self._segments[manifest] = {row.name: row.bytes for row in found.segments}
            except FormatError:
                self._segments[manifest] = {}  # the load of it tells what is wrong
        return self._segments[manifest]

    def _described_by(
        self, directory: str, parity: Mapping[str, tuple[Source, ...]], *, of_all: bool = False
    ) -> Mapping[str, Contribution]:
        """What parity is of, by the names of the files that say it; nothing where it could not be used.

        Each row's node says it of each column, so a node that is lost meanwhile takes no column away where there are
        several rows. `of_all`: raise for it, as what seems to be lost might be removed.
        """
        if not is_there():
            return {}
        found = {}
        for name, sources in parity.items():
            if column_of(name)[1] is None:
                continue  # parity itself
            number = sources[0].number
            try:
                if number not in self._described:
                    content = self._read_any(f"{directory}/{name}", sources, PEER_DESCRIPTION_BYTES_MAX)
                    self._described[number] = msgspec.msgpack.decode(content, type=Contribution)
            except msgspec.DecodeError as error:
                self._tell(f"{self._location}/{directory}/{name} says nothing of its parity: {error}")
            except (OSError, PeerError) as error:
                if of_all:
                    raise
                self._tell(f"cannot read {self._location}/{directory}/{name}: {error}")
            else:
                found[name] = self._described[number]
        return found

    def _read_any(self, path: str, sources: Sequence[Source], bytes_max: int) -> bytes:
        """A small file from the first node that gives it. Raises OSError, PeerError, as the last one does."""
        for source in sources:
            try:
                return self.read_from(source, path, 0, min(source.size_bytes, bytes_max))
            except PeerError as error:
                self.nodes[source.node].failed(error)
                refusal: Exception = error
            except OSError as error:  # it was removed meanwhile
                refusal = error
        raise refusal

    def step_of(self, path: str) -> tuple[WholeStep, Rebuilt] | None:
        """A checkpoint, and how to rebuild that file of it; None for one that is somewhere, or nowhere."""
        directory, _, name = path.partition("/")
        step = self.view().steps.get(directory) if is_step(directory) else None
        return None if step is None or name not in step.rebuilt else (step, step.rebuilt[name])

    def read_from(self, source: Source, path: str, begin: int, end: int) -> bytes:
        """A part of a node's file. Raises OSError, PeerError."""
        content = bytearray(max(0, min(end, source.size_bytes) - begin))
        target = memoryview(content)
        with self._guard:
            for at in range(0, len(content), READ_REQUEST_BYTES):
                part = target[at : at + READ_REQUEST_BYTES]
                asked = Ask("read", path, number=source.number, offset=begin + at, size_bytes=len(part))
                if self.nodes[source.node].link.read_into(asked, part) != len(part):
                    raise OSError(errno.EIO, "a file that became shorter")
        return bytes(content)

    def sources(self, path: str) -> tuple[Source, ...]:
        """The nodes that have a file, in the order in which they are to be asked; none for one that is to be rebuilt.

        raises  OSError, ENOENT, EISDIR
        """
        directory, _, name = path.partition("/")
        if is_step(directory):
            step = self.view().steps.get(directory)
            if step is not None and not name:
                raise OSError(errno.EISDIR, "a directory")
            if step is not None and name in step.rebuilt:
                return ()
            if step is None or name not in step.files:
                raise OSError(errno.ENOENT, "no such file")
            return step.files[name]
        found, refused = [], OSError(errno.ENOENT, "no such file")
        for at, answer in self._ask_up(Ask("look", path)):
            if not answer.errno:
                found.append(Source(at, answer.number, answer.size_bytes))
            elif answer.errno != errno.ENOENT:
                refused = OSError(answer.errno, answer.error)
        if not found:
            raise refused
        return tuple(sorted(found, key=lambda source: (source.node - self.own) % len(self.nodes)))

    def exists(self, path: str) -> bool:
        directory, _, name = path.partition("/")
        if is_step(directory):
            step = self.view().steps.get(directory)
            return step is not None and (not name or name in step.names)
        return any(answer.yes for _, answer in self._ask_up(Ask("exists", path)))

    def names(self, path: str) -> tuple[str, ...]:
        if not path:
            return self.view().names
        if is_step(path):
            step = self.view().steps.get(path)
            return () if step is None else step.names
        names = {name for _, answer in self._ask_up(Ask("names", path)) for name in answer.names}
        return tuple(sorted(name for name in names if not is_parity(name)))

    def look(self, path: str) -> tuple[int, int]:
        if (found := self.step_of(path)) is not None:
            return found[1].number, found[1].size_bytes
        first = self.sources(path)[0]
        return first.number, first.size_bytes

    def open(self, path: str) -> MemoryFile:
        if (found := self.step_of(path)) is not None:
            return RebuiltFile(self, *found, path, f"{self._location}/{path}")
        first = self.sources(path)[0]
        if first.node == self.own:
            return super().open(path)
        return RemoteFile(self, first, path, f"{self._location}/{path}")

    def _ask_up(self, asked: Ask) -> list[tuple[int, Told]]:
        """The answers of nodes that answer."""
        with self._guard:
            up = [at for at, node in enumerate(self.nodes) if not node.is_down]
            answers = ask_all([self.nodes[at] for at in up], asked)
        return [(at, one) for at, one in zip(up, answers, strict=True) if not isinstance(one, PeerError)]

    # What changes names, on all nodes

    def _ask_each(self, asked: Ask, payload: bytes = b"") -> list[Told]:
        """The answers of all nodes. Raises PeerError if one does not answer; others have done it then."""
        with self._guard:
            answers = ask_all(self.nodes, asked, payload)
        for answer in answers:
            if isinstance(answer, PeerError):
                raise answer
        return [answer for answer in answers if isinstance(answer, Told)]

    def put(self, path: str, content: bytes) -> None:
        for node, told in zip(self.nodes, self._ask_each(_put(path, content), content), strict=True):
            checked(told, node.place)

    def make_directory(self, path: str) -> None:
        self._served()
        for at, told in enumerate(self._ask_each(Ask("make_directory", path))):
            if told.errno != errno.EEXIST or at == self.own:
                checked(told, self.nodes[at].place)

    def remove(self, path: str) -> None:
        if "/" not in path:
            self._remove_parity(path)
        told = self._ask_each(Ask("remove", path))
        refused = [one for one in told if one.errno and one.errno != errno.ENOENT]
        if refused or all(one.errno for one in told):
            checked((refused or told)[0], self.nodes[self.own].place)

    def _remove_parity(self, directory: str) -> None:
        """It is in no list, so it goes with the directory, once nothing else is in that."""
        held = self._ask_each(Ask("names", directory))
        if not all(is_parity(name) for told in held for name in told.names):
            return
        with self._guard:
            for node, told in zip(self.nodes, held, strict=True):
                for name in told.names:
                    checked(node.link.ask(Ask("remove", f"{directory}/{name}")), node.place)

    def rename(self, source: str, target: str, *, directories: bool) -> None:
        """On all nodes, or on none: what was done is undone where one refuses. A draft has to be on each."""
        assert directories, "they are moved as a whole"
        with self._guard:
            told = ask_all(self.nodes, Ask("rename", source, target))
            is_draft = source.startswith(DRAFT)
            refused = [
                (at, one) for at, one in enumerate(told)
                if isinstance(one, PeerError) or (one.errno and (is_draft or one.errno != errno.ENOENT))
            ]
            done = [self.nodes[at] for at, one in enumerate(told) if not isinstance(one, PeerError) and not one.errno]
            if refused:
                ask_all(done, Ask("rename", target, source))
        for at, one in refused or ([] if done else list(enumerate(told))):
            if isinstance(one, PeerError):
                raise one
            checked(one, self.nodes[at].place)
        if is_draft:
            self._ask_each(Ask("agree", target))  # from here on, older ones may go

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.ENOTSUP, f"{source} and {target} would be on several nodes")

    # The lock, of all nodes

    def lock(self, holder: str) -> str | None:
        other = super().lock(holder)
        if other is not None or (self._is_locked and super().lost_lock() is None and not self._lost_elsewhere()):
            return other
        self._is_locked = False
        self._served()
        for node in self.nodes:
            other = self._lock_at(node, holder)
            if other is not None:
                self.unlock()
                return other
        self._is_locked = True
        found = self.view(of_all=True)
        newest = max(found.steps, key=lambda name: (len(name), name), default="")
        self._ask_each(Ask("agree", newest, number=found.epoch + 1))
        self._set_aside(found)
        self._bring_up()
        return None

    def _lock_at(self, node: Node, holder: str) -> str | None:
        """As `lock`."""
        with self._guard:
            told = node.link.ask(Ask("lock", text=holder))
        name, _, process = told.text.partition("\n")
        return None if told.yes else f"{name}, which has {node.place.shown} too\n{process}"

    def _set_aside(self, found: View) -> None:
        """What is whole on no nodes together is no checkpoint, and goes with what dead writers have left."""
        for name, why in found.lacks.items():
            log.warning("%s in %s is removed: %s", name, self._location, why)
            self._ask_each(Ask("rename", name, f".deleting-{name.removeprefix('step-')}-{secrets.token_hex(8)}"))

    def _bring_up(self) -> None:
        """Nodes that have come since get what the root has: the marker, and notes of rewinds."""
        self._ask_each(Ask("make_directory"))
        names = [set(told.names) for told in self._ask_each(Ask("names"))]
        for name in set[str]().union(*names):
            lacking = [node for node, has in zip(self.nodes, names, strict=True) if name not in has]
            if lacking and (name == MARKER_NAME or name.startswith(_NOTE)):
                content = self.open(name).read(0, MARKER_BYTES_MAX)
                with self._guard:
                    for node in lacking:
                        checked(node.link.ask(_put(name, content), content), node.place)

    def lost_lock(self) -> str | None:
        own = super().lost_lock()
        return self._lost_elsewhere() or own  # those who know of another holder first

    def _lost_elsewhere(self) -> str | None:
        with self._guard:
            answers = ask_all(self.nodes, Ask("lost_lock"))
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
            ask_all(connected, Ask("unlock"))
        super().unlock()

    def close(self) -> None:
        with suppress(OSError, PeerError):
            self.unlock()  # another one may wait for it
        with self._guard:
            for node in self._nodes:
                node.link.close()
        super().close()

    def forget(self) -> None:
        super().forget()
        self._guard = RLock()
        for node in self._nodes:
            node.link.forget()


def _put(path: str, content: bytes) -> Ask:
    return Ask("put", path, payload_bytes=len(content))


class RemoteFile(MemoryFile):
    """A file in another node's memory. It is read in small parts; for many bytes see store/peers/reading.py."""

    def __init__(self, tree: PeersTree, source: Source, path: str, shown: str) -> None:  # no descriptor here
        self.number, self.size_bytes, self.path, self.touched_bytes = source.number, source.size_bytes, shown, 0
        self.links, self.writer = 0, None
        self._tree, self._source, self._path = tree, source, path

    def read(self, begin: int, end: int) -> bytes:
        return self._tree.read_from(self._source, self._path, begin, end)


class RebuiltFile(MemoryFile):
    """A file that follows from others. It is read in small parts, as a RemoteFile."""

    def __init__(self, tree: PeersTree, step: WholeStep, rebuilt: Rebuilt, path: str, shown: str) -> None:
        self.number, self.size_bytes, self.path, self.touched_bytes = rebuilt.number, rebuilt.size_bytes, shown, 0
        self.links, self.writer = 0, None
        self._tree, self._step, self._rebuilt, self._directory = tree, step, rebuilt, path.partition("/")[0]

    def read(self, begin: int, end: int) -> bytes:
        content = bytearray(max(0, min(end, self.size_bytes) - begin))
        room = memoryview(bytearray(min(PEER_REBUILD_BYTES, len(content))))
        rebuild(self._rebuilt, begin, memoryview(content), self._part, room)
        return bytes(content)

    def _part(self, part: Part, target: memoryview) -> None:
        source = (self._step.files.get(part.file) or self._step.parity[part.file])[0]
        path = f"{self._directory}/{part.file}"
        target[:] = self._tree.read_from(source, path, part.offset, part.offset + part.length)
