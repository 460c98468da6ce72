"""The calls by which a local store changes a disk, each a method, so that tests/sim can stand in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flowstone import _native


class System:
    """The operating system, as LocalStore writes to it. Failures are OSErrors.

    Bulk bytes are missing here: the native engine writes them to descriptors from `create`,
    between `reserve` and `sync`. Reads are missing too: they change nothing.
    """

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path, flags: int) -> int:
        """Open for writing, and create where it is missing. The descriptor is the caller's to close."""
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Give an empty file its size, with blocks reserved where the file system can."""
        _native.reserve_file(fd, size_bytes)

    def write(self, fd: int, content: bytes) -> None:
        """Write all of it at the descriptor's position."""
        rest = memoryview(content)
        while rest:
            written = os.write(fd, rest)
            if not written:  # it would be so for ever
                raise OSError(errno.EIO, "the system wrote nothing")
            rest = rest[written:]

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable, not its name."""
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make a directory's entries durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)
