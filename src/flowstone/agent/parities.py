"""Parity that a node keeps of what others save: each of them adds its share, in any order (store/peers/parity.py)."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flowstone.commit.entries import SAVING
from flowstone.errors import PeerError
from flowstone.format.digest import digest
from flowstone.store.contents import MemoryFile
from flowstone.store.node_memory import AgentTree
from flowstone.store.peers.erasure import accumulate
from flowstone.store.peers.parity import is_parity
from flowstone.store.peers.wire import Ask


class Parity:
    """One file with parity, as long as the longest share of it."""

    def __init__(self, tree: AgentTree, path: str) -> None:
        self._tree, self._path = tree, path
        self._file: MemoryFile | None = None
        self._left: dict[str, int] = {}  # bytes that are to be added still, by column
        self._guard = threading.Lock()

    def gather(self, column: str, size_bytes: int) -> MemoryFile:
        """Have room for that much. Its bytes are zero until something is added. Raises OSError, FullError."""
        with self._guard:
            self._left[column] = size_bytes
            if self._file is None:
                file = self._tree.create(self._path, size_bytes)
                mapping = file.mapped(writable=True)
                if mapping is not None:
                    ctypes.memset(mapping.address, 0, file.size_bytes)  # it may be a removed file's memory
                self._file = file
            elif size_bytes > self._file.size_bytes:
                with self._tree.acting():
                    self._tree.resize(self._file, size_bytes)
            return self._file

    def add(self, column: str, factor: int, offset: int, part: bytearray) -> None:
        """`factor` times these bytes, from `offset` on."""
        with self._guard:
            mapping = None if self._file is None else self._file.mapped(writable=True)
            assert mapping is not None, "it was gathered"
            assert offset + len(part) <= mapping.bytes, "it is as long as each share"
            source = ctypes.addressof(ctypes.c_char.from_buffer(part))
            accumulate(factor, source, mapping.address + offset, len(part))
            self._left[column] -= len(part)

    def check(self) -> None:
        """Raise OSError unless all shares that were begun are added, and it is there still."""
        with self._guard:
            file = self._file
            if file is None or any(self._left.values()):
                raise OSError(errno.EIO, f"{self._path} lacks a part of what it is to have")
            for column in self._left:
                self._tree.look(f"{self._path}.{column}")  # raises where it is gone
            if self._tree.look(self._path) != (file.number, file.size_bytes):
                raise OSError(errno.EIO, f"{self._path} is another file now")


class Parities:
    """All of a run, by their paths. Any thread."""

    def __init__(self, tree: AgentTree) -> None:
        self._tree = tree
        self._parities: dict[str, Parity] = {}
        self._guard = threading.Lock()

    def of(self, path: str) -> Parity:
        """Raises PeerError for a path that no parity has."""
        directory, _, name = path.partition("/")
        if not directory.startswith(SAVING) or not is_parity(name):
            raise PeerError("a peer adds to what is no parity", next="use one release on all nodes")
        with self._guard:
            if path not in self._parities:
                drafts = {one.partition("/")[0] for one in self._parities}
                left = {draft for draft in drafts if self._tree.exists(draft)}
                self._parities = {
                    one: parity for one, parity in self._parities.items() if one.partition("/")[0] in left
                }
                self._parities[path] = Parity(self._tree, path)
            return self._parities[path]

    @contextmanager
    def renewing(self, draft: str) -> Iterator[None]:
        """While a draft is made: what an earlier one of that name had is gone, unless that is there still.

        Until then no other thread is given parity: it would be the new one's, which another node may fill at once.
        """
        with self._guard:
            yield  # raises where the draft is there
            self._parities = {
                path: parity for path, parity in self._parities.items() if path.partition("/")[0] != draft
            }

    def check(self, draft: str) -> None:
        """Before a draft becomes a checkpoint: raise OSError unless all of its parity here is whole and there."""
        with self._guard:
            of_draft = [parity for path, parity in self._parities.items() if path.partition("/")[0] == draft]
        for parity in of_draft:
            parity.check()


class Shares:
    """What one connection adds to. One thread."""

    def __init__(self, parities: Parities, tree: AgentTree) -> None:
        self._parities, self._tree = parities, tree
        self._gathered: dict[int, tuple[Parity, Ask]] = {}

    def gather(self, asked: Ask, described: bytes) -> int:
        """The number of the file. Raises OSError, FullError, PeerError."""
        if not 1 <= asked.number <= 255 or not asked.target.isdecimal() or not 0 < asked.size_bytes < 1 << 62:
            raise PeerError("a peer asks for parity that cannot be", next="use one release on all nodes")
        parity = self._parities.of(asked.path)
        self._tree.put(f"{asked.path}.{asked.target}", described)  # refused where that column was said before
        number = parity.gather(asked.target, asked.size_bytes).number
        self._gathered[number] = parity, asked
        return number

    def check(self, asked: Ask) -> None:
        """Raise PeerError unless it adds to what was gathered."""
        gathered = self._gathered.get(asked.number)
        size_bytes = 0 if gathered is None else gathered[1].size_bytes
        if not 0 <= asked.offset <= asked.offset + asked.payload_bytes <= size_bytes:
            raise PeerError("a peer sends bytes of no file", next="use one release on all nodes")

    def add(self, asked: Ask, part: bytearray) -> None:
        """Raises OSError where the bytes arrived changed."""
        parity, gathered = self._gathered[asked.number]
        if digest(memoryview(part)) != asked.text:
            raise OSError(errno.EBADMSG, f"bytes {asked.offset}..{asked.offset + len(part)} arrived changed")
        parity.add(gathered.target, gathered.number, asked.offset, part)
