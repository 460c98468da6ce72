"""Buffers of uploads: for bytes that are not captured in the order in which they are sent, and for bytes that may have
to be written to another path.
"""

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

if TYPE_CHECKING:
    from flowstone._native import Arena
    from flowstone.store.striped.stripe_member import FailoverLimits

_READ_AT_ONCE_BYTES = 8 * MIB


class Spool:
    """An unnamed temporary file for bytes that are captured before the bytes that precede them in their file. It is
    created when the first such bytes are written.

    directory  where the temporary file is created; "": the system's directory for temporary files
    """

    def __init__(self, directory: str = "") -> None:
        self._directory = directory or tempfile.gettempdir()
        self._file: BinaryIO | None = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="flowstone-", dir=self._directory)  # noqa: SIM115  (see `close`)
        return self._file

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`. Raises OSError."""
        descriptor = self._opened().fileno()
        while data:
            written = os.pwrite(descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes from offset `begin` to `end` - 1, in several pieces. Bytes that were never written are zero."""
        while begin < end:
            length = min(_READ_AT_ONCE_BYTES, end - begin)
            piece = b"" if self._file is None else os.pread(self._file.fileno(), length, begin)
            yield piece.ljust(length, b"\0")
            begin += length

    def opened(self, bytes_: int) -> BinaryIO:
        """Open the temporary file for reading, as a file of `bytes_` bytes. Raises OSError."""
        file = self._opened()
        os.ftruncate(file.fileno(), bytes_)
        return open(os.dup(file.fileno()), "rb", 0)

    def refusal(self, error: OSError, path: str) -> StorageError:
        remedy = "" if self._directory != tempfile.gettempdir() else "set TMPDIR to a directory with free space"
        return explain(
            Path(self._directory), "buffer the upload of", error.errno or 0, path, remedy=remedy
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class HeldBlocks:
    """Counts the bytes of blocks of the arena (staging memory) that the uploads of a save keep until their objects are
    complete. Can be used on any thread.
    """

    def __init__(self, arena: Arena, moving: FailoverLimits) -> None:
        self._arena, self._moving = arena, moving
        self._bytes, self._guard = 0, threading.Lock()

    @property
    def directory(self) -> str:
        """The directory in which temporary files are created."""
        return self._moving.directory

    @property
    def is_too_much(self) -> bool:
        return self._bytes > min(self._moving.held_bytes, self._arena.touched_bytes // self._moving.one_in)

    @property
    def is_wanted(self) -> bool:
        """Whether the arena has no free block, so that a kept one should be released."""
        return self._arena.free_bytes < self._arena.block_bytes

    def add(self, bytes_: int) -> None:
        with self._guard:
            self._bytes += bytes_


class RetryBuffer:
    """Keeps the uploaded bytes of a segment until its object is complete, because the segment may have to be written
    to another path. The bytes are in blocks of the arena, and in a temporary file (`spool`). For one thread.

    is_whole  whether all bytes are kept; False once a write to the temporary file has failed
    """

    def __init__(self, held_blocks: HeldBlocks, spool: Spool, path: str) -> None:
        """`path`: the segment's path, for messages."""
        self._held, self._spool, self._path = held_blocks, spool, path
        self.is_whole = True
        # (offset in the segment, block of the arena)
        self._blocks: deque[tuple[int, ctypes.Array[ctypes.c_ubyte]]] = deque()

    def add(self, offset: int, block: ctypes.Array[ctypes.c_ubyte]) -> None:
        """Keep a block of the arena that is about to be uploaded. `offset`: where its bytes begin in the segment."""
        if not self.is_whole:
            return
        self._blocks.append((offset, block))
        self._held.add(len(block))
        while self._held.is_too_much and self._blocks:
            self._copy_oldest()

    def free_blocks(self) -> None:
        """If the arena has no free block, write kept blocks to the temporary file and release them, so that the capture
        can continue.
        """
        while self._held.is_wanted and self._blocks:
            self._copy_oldest()

    def _copy_oldest(self) -> None:
        offset, block = self._blocks[0]
        try:
            self._spool.write(offset, memoryview(block).cast("B"))
        except OSError as error:
            self.is_whole = False
            self.release()
            log.warning("if this upload fails, the save fails: %s", self._spool.refusal(error, self._path))
            return
        self._blocks.popleft()
        self._held.add(-len(block))

    def release(self) -> None:
        """Release all kept blocks."""
        self._held.add(-sum(len(block) for _, block in self._blocks))
        self._blocks.clear()
