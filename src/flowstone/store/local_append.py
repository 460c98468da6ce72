"""A local file that grows while it is read: the file of a journal, a log of training steps."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flowstone.config import BLOCK_BYTES
from flowstone.store.directories import parent
from flowstone.store.engines import EngineChoice
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_PARTS_MAX = 1000  # per call; the system's limit is 1,024


class LocalAppendFile:
    """A new file, written in order, bypassing the page cache (O_DIRECT) if possible. It owns its descriptor. One thread
    at a time.
    """

    def __init__(self, root: Path, system: System, engines: EngineChoice, path: str) -> None:
        self._root, self._system, self._path, self._full_path = root, system, path, root / path
        self._reserved_bytes = self.bytes = 0
        with translated(root, "probe", ""):
            direct = engines.alignment_to_write(engines.options.direct)
        flags = os.O_RDWR | os.O_EXCL
        with translated(root, "create", path), parent(root, path) as dir_fd:
            self._fd = system.create(self._full_path, flags | (os.O_DIRECT if direct > 1 else 0), dir_fd)
        if direct > 1 and not self._takes_direct():
            os.set_blocking(self._fd, True)
            self._to_cache()

    def _takes_direct(self) -> bool:
        """Whether this file can be read with O_DIRECT (past the page cache). Called while the file is empty, so the
        attempt harms nothing.
        """
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            try:
                os.preadv(self._fd, [block], 0)
            except OSError:
                return False
        return True

    def _to_cache(self) -> None:
        import fcntl  # imported here: only systems that accept O_DIRECT and refuse it later need it

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def append(
        self, parts: Sequence[memoryview], *, ahead_bytes: int, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """See store.appendable.AppendFile."""
        length = sum(map(len, parts))
        if self.bytes + length > self._reserved_bytes:
            size = self.bytes + length + ahead_bytes
            with translated(self._root, "allocate", self._path, needed_bytes=size - self._reserved_bytes):
                self._system.extend(self._fd, size)
            self._reserved_bytes = size
        offset = self.bytes + len(parts[0])
        for begin in range(1, len(parts), _PARTS_MAX):
            some = parts[begin : begin + _PARTS_MAX]
            self._write(some, offset)
            offset += sum(map(len, some))
        confirm()
        self._write(parts[:1], self.bytes)
        self.bytes = offset

    def _write(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        with translated(self._root, "write", self._path, needed_bytes=sum(map(len, parts))):
            self._system.write_at(self._fd, parts, offset_bytes)

    def sync(self) -> None:
        """Make all bytes so far durable."""
        with translated(self._root, "fdatasync", self._path):
            self._system.sync_bytes(self._fd)

    def still_has_name(self) -> bool:
        """See store.appendable.AppendFile."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._full_path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # if the file has lost its name, the next write fails

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
