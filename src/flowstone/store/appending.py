"""A local file that grows while it is read: the frames of a journal."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flowstone.config import BLOCK_BYTES
from flowstone.store.descriptors import Descriptors
from flowstone.store.directories import parent
from flowstone.store.engines import EngineChoice
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_PARTS_MAX = 1000  # of one call: the system takes 1,024


class LocalAppending:
    """A new file, written in order, past the page cache where that works. One thread at a time; owns its descriptor."""

    def __init__(self, root: Path, system: System, engines: EngineChoice, path: str) -> None:
        self._root, self._system, self._path, self._full_path = root, system, path, root / path
        self._reserved_bytes = self.bytes = 0
        with translated(root, "probe", ""):
            direct = engines.alignment_to_write("auto" if engines.options.direct == "auto" else engines.options.direct)
        flags = os.O_RDWR | os.O_EXCL
        with translated(root, "create", path), parent(root, path) as at:
            self._fd = system.create(self._full_path, flags | (os.O_DIRECT if direct > 1 else 0), at)
        if direct > 1 and not self._takes_direct():
            os.set_blocking(self._fd, True)
            self._to_cache()

    def _takes_direct(self) -> bool:
        """Whether this very file can be read past the page cache: an empty one has nothing to be harmed."""
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            try:
                os.preadv(self._fd, [block], 0)
            except OSError:
                return False
        return True

    def _to_cache(self) -> None:
        import fcntl  # imported here: only systems that refuse O_DIRECT after they have taken it need it

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def append(
        self, parts: Sequence[memoryview], *, ahead_bytes: int, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """See store.appends.Appending."""
        length = sum(map(len, parts))
        if self.bytes + length > self._reserved_bytes:
            size = self.bytes + length + ahead_bytes
            with translated(self._root, "allocate", self._path, needed_bytes=size - self._reserved_bytes):
                self._system.extend(self._fd, size)
            self._reserved_bytes = size
        at = self.bytes + len(parts[0])
        for begin in range(1, len(parts), _PARTS_MAX):
            some = parts[begin : begin + _PARTS_MAX]
            self._write(some, at)
            at += sum(map(len, some))
        confirm()
        self._write(parts[:1], self.bytes)
        self.bytes = at

    def _write(self, parts: Sequence[memoryview], offset_bytes: int) -> None:
        with translated(self._root, "write", self._path, needed_bytes=sum(map(len, parts))):
            self._system.write_at(self._fd, parts, offset_bytes)

    def sync(self) -> None:
        """Make all bytes so far durable."""
        with translated(self._root, "fdatasync", self._path):
            self._system.sync_bytes(self._fd)

    def is_in_place(self) -> bool:
        """See store.appends.Appending."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._full_path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # safe: it is not known, and the next write tells

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_past_cache(root: Path, engines: EngineChoice, path: str, offset_bytes: int, target: memoryview) -> int:
    """Read into `target`, whose address and length are multiples of 4096; past the page cache where that works.

    returns  how many bytes the file had there
    """
    opened = Descriptors()
    with translated(root, "read", path):
        try:
            direct = engines.options.direct
            fd, _ = engines.open_to_read(root / path, direct, opened)
            done = 0
            while done < len(target):
                found = os.preadv(fd, [target[done:]], offset_bytes + done)
                done += found
                if not found or found % BLOCK_BYTES:
                    break
            return done
        finally:
            opened.close()
