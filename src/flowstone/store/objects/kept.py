"""What uploads keep: bytes that come before their turn, and what may have to be written elsewhere."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from flowstone.config import MIB
from flowstone.errors import StorageError
from flowstone.log import log
from flowstone.store.os_errors import explain
from flowstone.store.parts import Moving

if TYPE_CHECKING:
    from flowstone import _native

_READ_AT_ONCE_BYTES = 8 * MIB


class Spool:
    """Bytes of a file that are there before their turn; a temporary file without a name, made when the first come.

    directory  of it; "": that of the system's temporary files
    """

    def __init__(self, directory: str = "") -> None:
        self._directory = directory or tempfile.gettempdir()
        self._file: BinaryIO | None = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="flowstone-", dir=self._directory)  # noqa: SIM115  (see `close`)
        return self._file

    def write(self, offset: int, data: memoryview) -> None:
        """Raises OSError."""
        descriptor = self._opened().fileno()
        while data:
            written = os.pwrite(descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        """Bytes [begin, end) in pieces; what was never written is zero."""
        while begin < end:
            length = min(_READ_AT_ONCE_BYTES, end - begin)
            piece = b"" if self._file is None else os.pread(self._file.fileno(), length, begin)
            yield piece.ljust(length, b"\0")
            begin += length

    def opened(self, bytes_: int) -> BinaryIO:
        """All of it to be read, as a file of that length. Raises OSError."""
        file = self._opened()
        os.ftruncate(file.fileno(), bytes_)
        return open(os.dup(file.fileno()), "rb", 0)

    def refusal(self, error: OSError, path: str) -> StorageError:
        remedy = "" if self._directory != tempfile.gettempdir() else "set TMPDIR to a directory with room"
        return explain(
            Path(self._directory), "keep what is uploaded later for", error.errno or 0, path, remedy=remedy
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Held:
    """The bytes of blocks that the uploads of one save hold until their objects are complete. Any thread."""

    def __init__(self, arena: _native.Arena, moving: Moving) -> None:
        self._arena, self._moving = arena, moving
        self._bytes, self._guard = 0, threading.Lock()

    @property
    def directory(self) -> str:
        """Of the temporary files."""
        return self._moving.directory

    @property
    def is_too_much(self) -> bool:
        return self._bytes > min(self._moving.held_bytes, self._arena.touched_bytes // self._moving.one_in)

    @property
    def is_wanted(self) -> bool:
        """Whether no block is free."""
        return self._arena.free_bytes < self._arena.block_bytes

    def add(self, bytes_: int) -> None:
        with self._guard:
            self._bytes += bytes_


class Kept:
    """What has been handed over of a segment that may move, until its object is complete: blocks that are held, and the
    rest in the spool. Of one thread.

    is_whole  it can be written elsewhere; false once the spool has not taken something: then no more is kept
    """

    def __init__(self, held: Held, spool: Spool, path: str) -> None:
        """`path`: of the segment, for messages."""
        self._held, self._spool, self._path = held, spool, path
        self.is_whole = True
        self._blocks: deque[tuple[int, ctypes.Array[ctypes.c_ubyte]]] = deque()  # with their places in the file

    def add(self, offset: int, block: ctypes.Array[ctypes.c_ubyte]) -> None:
        """Hold a block that is about to be handed over."""
        if not self.is_whole:
            return
        self._blocks.append((offset, block))
        self._held.add(len(block))
        while self._held.is_too_much and self._blocks:
            self._copy_oldest()

    def make_room(self) -> None:
        """The next blocks do not come: they may lack those that are held here."""
        while self._held.is_wanted and self._blocks:
            self._copy_oldest()

    def _copy_oldest(self) -> None:
        offset, block = self._blocks[0]
        try:
            self._spool.write(offset, memoryview(block).cast("B"))
        except OSError as error:
            self.is_whole = False
            self.let_go()
            log.warning("%s; if its path fails now, so does the save", self._spool.refusal(error, self._path))
            return
        self._blocks.popleft()
        self._held.add(-len(block))

    def let_go(self) -> None:
        """Hold nothing any more."""
        self._held.add(-sum(len(block) for _, block in self._blocks))
        self._blocks.clear()
