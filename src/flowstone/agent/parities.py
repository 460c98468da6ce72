"""Parity files in a node's memory. Each of several other nodes adds a share (its segments, times a factor) to a parity
file, in any order (store/peers/parity.py).
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flowstone.commit.entries import SAVING
from flowstone.errors import PeerError
from flowstone.format.digest import digest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import AgentTree
from flowstone.store.peers.erasure import accumulate
from flowstone.store.peers.parity import is_parity
from flowstone.store.peers.wire import PeerRequest


class Parity:
    """A parity file. It becomes as long as its longest share. Its shares are numbered by `column`."""

    def __init__(self, tree: AgentTree, path: str) -> None:
        self._tree, self._path = tree, path
        self._file: MemoryFile | None = None
        self._left: dict[str, int] = {}  # column -> how many bytes of its share must still be added
        self._guard = threading.Lock()

    def gather(self, column: str, size_bytes: int) -> MemoryFile:
        """Make space for a share of `size_bytes`. Its bytes in the file are zero until they are added. Raises OSError,
        FullError.
        """
        with self._guard:
            self._left[column] = size_bytes
            if self._file is None:
                file = self._tree.create(self._path, size_bytes)
                mapping = file.mapped(writable=True)
                if mapping is not None:
                    # the file may have the memory of a removed file, with the old content
                    ctypes.memset(mapping.address, 0, file.size_bytes)
                self._file = file
            elif size_bytes > self._file.size_bytes:
                with self._tree.hold():
                    self._tree.resize(self._file, size_bytes)
            return self._file

    def add(self, column: str, factor: int, offset: int, part: bytearray) -> None:
        """Add `factor` times the bytes `part` to the file, from `offset` on."""
        with self._guard:
            mapping = None if self._file is None else self._file.mapped(writable=True)
            assert mapping is not None, "gather was called"
            assert offset + len(part) <= mapping.bytes, "the file is at least as long as each share"
            source = ctypes.addressof(ctypes.c_char.from_buffer(part))
            accumulate(factor, source, mapping.address + offset, len(part))
            self._left[column] -= len(part)

    def check(self) -> None:
        """Raise OSError unless all announced shares were added completely, and the file still exists."""
        with self._guard:
            file = self._file
            if file is None or any(self._left.values()):
                raise OSError(
                    errno.EIO, f"the parity file {self._path} is incomplete: bytes of other nodes are missing"
                )
            for column in self._left:
                self._tree.stat(f"{self._path}.{column}")  # raises an error if the file was removed
            if self._tree.stat(self._path) != (file.number, file.size_bytes):
                raise OSError(errno.EIO, f"the parity file {self._path} was replaced by another file")


class Parities:
    """All parity files of a run, by path. Can be used on any thread."""

    def __init__(self, tree: AgentTree) -> None:
        self._tree = tree
        self._parities: dict[str, Parity] = {}
        self._guard = threading.Lock()

    def of(self, path: str) -> Parity:
        """The parity file at a path. Raises PeerError if the path is not that of a parity file."""
        directory, _, name = path.partition("/")
        if not directory.startswith(SAVING) or not is_parity(name):
            raise PeerError(
                "another node sends parity for a file that does not hold parity",
                next="install the same release of flowstone on all nodes",
            )
        with self._guard:
            if path not in self._parities:
                drafts = {name.partition("/")[0] for name in self._parities}
                existing = {draft for draft in drafts if self._tree.exists(draft)}
                self._parities = {
                    name: parity for name, parity in self._parities.items() if name.partition("/")[0] in existing
                }
                self._parities[path] = Parity(self._tree, path)
            return self._parities[path]

    @contextmanager
    def renewing(self, draft: str) -> Iterator[None]:
        """Context in which the directory of an unfinished checkpoint is created. Parity for an earlier directory of
        that name is forgotten.

        Other threads wait meanwhile, so that shares from other nodes are added to the new directory's parity.
        """
        with self._guard:
            yield  # raises an error if the directory exists
            self._parities = {
                path: parity for path, parity in self._parities.items() if path.partition("/")[0] != draft
            }

    def check(self, draft: str) -> None:
        """Called before an unfinished checkpoint becomes a checkpoint. Raises OSError unless its parity on this node is
        complete.
        """
        with self._guard:
            of_draft = [parity for path, parity in self._parities.items() if path.partition("/")[0] == draft]
        for parity in of_draft:
            parity.check()


class Shares:
    """The shares of parity that one connection adds. For one thread."""

    def __init__(self, parities: Parities, tree: AgentTree) -> None:
        self._parities, self._tree = parities, tree
        self._gathered: dict[int, tuple[Parity, PeerRequest]] = {}

    def gather(self, request: PeerRequest, described: bytes) -> int:
        """Accept another node's announcement of a share (its contribution to a parity file): store the share's
        description `described`, and make space in the parity file. Returns the number of the parity file. Raises
        OSError, FullError, PeerError.
        """
        if not 1 <= request.number <= 255 or not request.target.isdecimal() or not 0 < request.size_bytes < 1 << 62:
            raise PeerError(
                "another node's request to store parity is invalid",
                next="install the same release of flowstone on all nodes",
            )
        parity = self._parities.of(request.path)
        self._tree.put(f"{request.path}.{request.target}", described)  # fails if the share was announced before
        number = parity.gather(request.target, request.size_bytes).number
        self._gathered[number] = parity, request
        return number

    def check(self, request: PeerRequest) -> None:
        """Raise PeerError unless the bytes belong to an announced share."""
        entry = self._gathered.get(request.number)
        size_bytes = 0 if entry is None else entry[1].size_bytes
        if not 0 <= request.offset <= request.offset + request.payload_bytes <= size_bytes:
            raise PeerError(
                "another node sends bytes for an unknown file, or beyond the bounds of the file",
                next="install the same release of flowstone on all nodes",
            )

    def add(self, request: PeerRequest, part: bytearray) -> None:
        """Add bytes to an announced share. Raises OSError if they differ from their digest."""
        parity, gather_request = self._gathered[request.number]
        if digest(memoryview(part)) != request.text:
            end = request.offset + len(part)
            raise OSError(
                errno.EBADMSG, f"bytes {request.offset}..{end} of parity do not match their digest after the transfer"
            )
        parity.add(gather_request.target, gather_request.number, request.offset, part)
