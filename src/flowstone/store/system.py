"""The system calls by which a local store changes a disk. They are methods, so that tests/sim can replace them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flowstone._native import reserve_file

_RENAME_EXCHANGE = 2  # the constant's value in linux/fs.h


class System:
    """The system calls with which LocalStore changes a disk. Failures raise OSError.

    `path` is always an entry's full path. If the descriptor `dir_fd` of its directory is given, the entry is opened
    relative to that directory. A symbolic link at the end of the path is not followed.

    Reads are not included, and neither are writes of segments: the native engine writes to the descriptors that
    `create` has returned, between the calls of `reserve` and `sync`.
    """

    def make_directory(self, path: Path, dir_fd: int | None = None) -> None:
        os.mkdir(_reached(path, dir_fd), dir_fd=dir_fd)

    def create(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        """Open a file for writing, and create it if it does not exist. The caller closes the descriptor."""
        flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(_reached(path, dir_fd), flags, 0o644, dir_fd=dir_fd)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Set the size of an empty file. Its blocks are reserved if the file system can do that."""
        reserve_file(fd, size_bytes)

    def resize(self, fd: int, size_bytes: int) -> None:
        """Change the size of a file, without reserving blocks."""
        os.ftruncate(fd, size_bytes)

    def write(self, fd: int, content: bytes | memoryview) -> None:
        """Write all of `content` at the descriptor's position."""
        rest = memoryview(content)
        while rest:
            written = os.write(fd, rest)
            if not written:  # otherwise this would loop forever
                raise OSError(errno.EIO, "the operating system wrote no byte")
            rest = rest[written:]

    def extend(self, fd: int, size_bytes: int) -> None:
        """Enlarge a file that has content. The new blocks are reserved if the file system can do that."""
        reserve_file(fd, size_bytes)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
        """Write all parts from `offset_bytes` on, one after the other."""
        rest = list(parts)
        while rest:
            written = os.pwritev(fd, rest, offset_bytes)
            if not written:  # otherwise this would loop forever
                raise OSError(errno.EIO, "the operating system wrote no byte")
            offset_bytes += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest and written:
                rest[0] = rest[0][written:]

    def sync_bytes(self, fd: int) -> None:
        """Make a file's bytes durable, with the metadata that is needed to read them."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable. Its name becomes durable only with `sync_directory`."""
        os.fsync(fd)

    def sync_directory(self, path: Path, fd: int | None = None) -> None:
        """Make a directory's entries durable; `fd` is its descriptor, if it is open."""
        if fd is not None:
            os.fsync(fd)
            return
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def rename(self, source: Path, target: Path, source_fd: int | None = None, target_fd: int | None = None) -> None:
        os.rename(
            _reached(source, source_fd), _reached(target, target_fd), src_dir_fd=source_fd, dst_dir_fd=target_fd
        )

    def link(self, source: Path, target: Path, source_fd: int | None = None, target_fd: int | None = None) -> None:
        """Give a file a further name."""
        os.link(
            _reached(source, source_fd), _reached(target, target_fd), src_dir_fd=source_fd, dst_dir_fd=target_fd,
            follow_symlinks=False,
        )

    def exchange(self, first: Path, second: Path, dir_fd: int) -> None:
        """Exchange the names of two entries of a directory, atomically.

        raises  OSError  with ENOSYS or EINVAL if the kernel or the file system cannot do that
        """
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, "this C library has no renameat2")
        if call(dir_fd, os.fsencode(first.name), dir_fd, os.fsencode(second.name), _RENAME_EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def unlink(self, path: Path, dir_fd: int | None = None) -> None:
        os.unlink(_reached(path, dir_fd), dir_fd=dir_fd)

    def remove_directory(self, path: Path, dir_fd: int | None = None) -> None:
        os.rmdir(_reached(path, dir_fd), dir_fd=dir_fd)


def _reached(path: Path, dir_fd: int | None) -> str | Path:
    return path if dir_fd is None else path.name
