"""Directories and files in memory, for a store in this process, or in the memory agent.

Imports neither numpy nor the native engine, so that the agent needs little memory. Calls raise OSError, like those of a
file system. For one thread at a time.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from flowstone.store.descriptors import Descriptors

if TYPE_CHECKING:
    from flowstone import _native


class MemoryFile:
    """An anonymous file in memory (memfd_create(2)) that this process has open. It is closed when the last reference to
    this object is dropped.

    number         unique among the files of one process, or of one agent
    size_bytes     length in bytes, as recorded with the file's name
    touched_bytes  how many bytes from the beginning have memory allocated
    links          how many names the file has. Counted only in the process that has the directory; 0 in others
    path           the file's path, for messages
    writer         the writer that may still write into it, even if its name is removed
    """

    def __init__(self, number: int, fd: int, size_bytes: int, *, path: str = "", touched_bytes: int = 0) -> None:
        self.number, self.size_bytes, self.path, self.touched_bytes = number, size_bytes, path, touched_bytes
        self.links = 0
        self.writer: object | None = None
        self.fd = fd
        self._owner = Descriptors()  # closes the file's descriptor
        self._owner.take(fd)

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes, self.touched_bytes = size_bytes, min(size_bytes, self.touched_bytes)

    def allocate(self) -> None:
        """Let the system allocate memory for the whole file."""
        from flowstone import _native  # imported here, as the agent never calls this

        if self.size_bytes:
            _native.reserve_memory(self.fd, 0, self.size_bytes)
        self.touched_bytes = self.size_bytes

    def begin_writing(self, writer: object, touched_bytes: int) -> None:
        """Note that the client `writer` may write into the file from now on."""
        self.writer, self.touched_bytes = writer, touched_bytes

    def end_writing(self) -> None:
        """Note that no client may write into the file from now on."""
        self.writer = None

    def add_link(self) -> None:
        self.links += 1

    def remove_link(self) -> None:
        self.links -= 1

    def mapped(self, *, writable: bool) -> _native.Mapping | None:
        """The file's bytes, mapped into this process until the result is dropped. None if the file is empty."""
        if not self.size_bytes:
            return None
        from flowstone import _native  # imported here, as the agent never calls this

        return _native.Mapping(fd=self.fd, bytes=self.size_bytes, writable=writable)

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        while begin < end:
            part = os.pread(self.fd, end - begin, begin)  # one call reads 2 GiB at most
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self) -> None:
        """Called in a forked child: close the file there."""
        self._owner.close()


def new_memory(name: str) -> int:
    """Create an empty file in memory, and return its descriptor. The system shows the file under this name."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


class MemoryDirectory:
    """Directories and files in memory. `writer` is the client that has the lock, and `holder` describes it; None and ""
    if there is no lock.
    """

    def __init__(self) -> None:
        self.files: dict[str, MemoryFile] = {}
        self.directories: set[str] = set()
        self.writer: object | None = None
        self.holder = ""

    def exists(self, path: str = "") -> bool:
        return path in self.files or path in self.directories

    def names(self, path: str = "") -> tuple[str, ...]:
        split = (entry.rpartition("/") for entry in (*self.files, *self.directories) if entry)
        return tuple(sorted(name for parent, _, name in split if parent == path))

    def file(self, path: str) -> MemoryFile:
        if path in self.directories:
            raise OSError(errno.EISDIR, "the path is a directory")
        if path not in self.files:
            raise OSError(errno.ENOENT, "no such file")
        return self.files[path]

    def make_directory(self, path: str = "") -> None:
        if path:
            self.check_free(path)
        self.directories.add(path)

    def add(self, path: str, file: MemoryFile) -> None:
        """Give a file a name, which must be free."""
        self.check_free(path)
        self.files[path] = file
        file.add_link()

    def remove(self, path: str) -> MemoryFile | None:
        """Remove the name of a file, or an empty directory. Returns the file."""
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, "the directory is not empty")
        if path in self.directories:
            self.directories.remove(path)
            return None
        file = self.file(path)
        del self.files[path]
        file.remove_link()
        return file

    def remove_all(self, path: str) -> list[MemoryFile]:
        """Remove a directory with all its entries. Returns the files."""
        gone = [entry for entry in self.files if entry.startswith(f"{path}/")]
        self.directories -= {entry for entry in self.directories if f"{entry}/".startswith(f"{path}/")}
        return [file for file in map(self.remove, gone) if file is not None]

    def rename(self, source: str, target: str, *, directories: bool = True) -> None:
        """Move a file to a free name; with `directories`, also a directory with its content."""
        self.check_free(target)
        if source not in self.directories:
            self.files[target] = self.file(source)
            del self.files[source]
            return
        if not directories:
            raise OSError(errno.EOPNOTSUPP, "the path is a directory, and only files can be renamed")
        for entry in [entry for entry in self.files if entry.startswith(f"{source}/")]:
            self.files[target + entry.removeprefix(source)] = self.files.pop(entry)
        for entry in [entry for entry in self.directories if f"{entry}/".startswith(f"{source}/")]:
            self.directories.remove(entry)
            self.directories.add(target + entry.removeprefix(source))

    def link(self, source: str, target: str) -> None:
        self.add(target, self.file(source))

    def lock(self, writer: object, holder: str) -> bool:
        """Take the lock for `writer`. Returns False if another writer has it. `holder` describes `writer`, for the
        errors of others that want the lock.
        """
        if self.writer not in (None, writer):
            return False
        self.writer, self.holder = writer, holder
        return True

    def unlock(self, writer: object) -> None:
        """Release the lock, if `writer` has it."""
        if self.writer is writer:
            self.writer, self.holder = None, ""

    def check_free(self, path: str) -> None:
        if path.rpartition("/")[0] not in self.directories:
            raise OSError(errno.ENOENT, "no such directory")
        if self.exists(path):
            raise OSError(errno.EEXIST, "a file or directory of this name exists")
