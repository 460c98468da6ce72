"""The calls by which a local store changes a disk, each a method, so that tests/sim can replace them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flowstone import _native

_RENAME_EXCHANGE = 2  # linux/fs.h


class System:
    """The operating system, as LocalStore writes to it. Failures raise OSError.

    An entry is reached by the descriptor `at` of its directory, if given, else by its whole path; `path` is always the
    whole path. A link at the end is not followed.

    Bulk bytes are missing here: the native engine writes them to descriptors from `create`, between `reserve` and
    `sync`. Reads are missing too: they change nothing.
    """

    def make_directory(self, path: Path, at: int | None = None) -> None:
        os.mkdir(_reached(path, at), dir_fd=at)

    def create(self, path: Path, flags: int, at: int | None = None) -> int:
        """Open for writing; create the file if missing. The caller closes the descriptor."""
        flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(_reached(path, at), flags, 0o644, dir_fd=at)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Give an empty file its size, with blocks reserved where the file system can."""
        _native.reserve_file(fd, size_bytes)

    def resize(self, fd: int, size_bytes: int) -> None:
        """Give a file another size, without reserving blocks."""
        os.ftruncate(fd, size_bytes)

    def write(self, fd: int, content: bytes | memoryview) -> None:
        """Write all of it at the descriptor's position."""
        rest = memoryview(content)
        while rest:
            written = os.write(fd, rest)
            if not written:  # else this would loop for ever
                raise OSError(errno.EIO, "the system wrote nothing")
            rest = rest[written:]

    def extend(self, fd: int, size_bytes: int) -> None:
        """Give a file that has content a larger size, with blocks reserved where the file system can."""
        _native.reserve_file(fd, size_bytes)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Write all of the parts at that place, one behind the other."""
        rest = list(parts)
        while rest:
            written = os.pwritev(fd, rest, offset_bytes)
            if not written:  # else this would loop for ever
                raise OSError(errno.EIO, "the system wrote nothing")
            offset_bytes += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest and written:
                rest[0] = rest[0][written:]

    def sync_bytes(self, fd: int) -> None:
        """Make a file's bytes durable, with what is needed to read them back."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable, not its name."""
        os.fsync(fd)

    def sync_directory(self, path: Path, fd: int | None = None) -> None:
        """Make a directory's entries durable; by its own descriptor `fd`, if given."""
        if fd is not None:
            os.fsync(fd)
            return
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def rename(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        os.rename(
            _reached(source, source_at), _reached(target, target_at), src_dir_fd=source_at, dst_dir_fd=target_at
        )

    def link(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        """Give a file a further name."""
        os.link(
            _reached(source, source_at), _reached(target, target_at), src_dir_fd=source_at, dst_dir_fd=target_at,
            follow_symlinks=False,
        )

    def exchange(self, one: Path, other: Path, at: int) -> None:
        """Give each of two entries of a directory the name of the other, at once.

        raises  OSError, ENOSYS or EINVAL where the kernel or the file system cannot
        """
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, "this C library has no renameat2")
        if call(at, os.fsencode(one.name), at, os.fsencode(other.name), _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def unlink(self, path: Path, at: int | None = None) -> None:
        os.unlink(_reached(path, at), dir_fd=at)

    def remove_directory(self, path: Path, at: int | None = None) -> None:
        os.rmdir(_reached(path, at), dir_fd=at)


def _reached(path: Path, at: int | None) -> str | Path:
    return path if at is None else path.name
