"""Names in memory, and the files that have them: of a store in this process, or in the memory agent.

No numpy, no native engine: the agent is to be small. Calls raise OSError, as those of a file system do, and are for one
thread at a time.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from flowstone.store.descriptors import Descriptors

if TYPE_CHECKING:
    from flowstone import _native


class MemoryFile:
    """An anonymous file (memfd_create(2)) that this process has open. It is closed with the last reference.

    number         unique among those that one process, or one agent, has made
    size_bytes     as the names' owner knows it
    touched_bytes  from the beginning, for which the system has given memory
    links          how many names it has, where the names are kept
    path           for messages
    writer         which may write into it still, whatever becomes of its name
    """

    def __init__(self, number: int, fd: int, size_bytes: int, *, path: str = "", touched_bytes: int = 0) -> None:
        self.number, self.size_bytes, self.path, self.touched_bytes = number, size_bytes, path, touched_bytes
        self.links = 0
        self.writer: object | None = None
        self.fd = fd
        self._owner = Descriptors()  # closes it
        self._owner.take(fd)

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes, self.touched_bytes = size_bytes, min(size_bytes, self.touched_bytes)

    def mapped(self, *, writable: bool) -> _native.Mapping | None:
        """Its bytes in this process, until nothing uses them. None: it has none."""
        if not self.size_bytes:
            return None
        from flowstone import _native  # imported here: the agent never maps anything

        return _native.Mapping(fd=self.fd, bytes=self.size_bytes, writable=writable)

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        while begin < end:
            part = os.pread(self.fd, end - begin, begin)  # 2 GiB per call at most
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self) -> None:
        """Close it, in a forked child."""
        self._owner.close()


def new_memory(name: str) -> int:
    """The descriptor of an empty file in memory; the name is what the system shows."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


class Contents:
    """Directories and files, in memory. `writer` holds the lock, under the name `holder`."""

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
            raise OSError(errno.EISDIR, "a directory")
        if path not in self.files:
            raise OSError(errno.ENOENT, "no such file")
        return self.files[path]

    def make_directory(self, path: str = "") -> None:
        if path:
            self.check_free(path)
        self.directories.add(path)

    def add(self, path: str, file: MemoryFile) -> None:
        """Give a file a name that is free."""
        self.check_free(path)
        self.files[path] = file
        file.links += 1

    def remove(self, path: str) -> MemoryFile | None:
        """Remove the name of a file, or an empty directory. Returns the file."""
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, "a directory with entries")
        if path in self.directories:
            self.directories.remove(path)
            return None
        file = self.file(path)
        del self.files[path]
        file.links -= 1
        return file

    def remove_all(self, path: str) -> list[MemoryFile]:
        """Remove a directory with all that is in it. Returns the files."""
        gone = [entry for entry in self.files if entry.startswith(f"{path}/")]
        self.directories -= {entry for entry in self.directories if f"{entry}/".startswith(f"{path}/")}
        return [file for file in map(self.remove, gone) if file is not None]

    def rename(self, source: str, target: str, *, directories: bool = True) -> None:
        """Move a file to a free name, or a directory with its content, if `directories`."""
        self.check_free(target)
        if source not in self.directories:
            self.files[target] = self.file(source)
            del self.files[source]
            return
        if not directories:
            raise OSError(errno.EOPNOTSUPP, "a directory")
        for entry in [entry for entry in self.files if entry.startswith(f"{source}/")]:
            self.files[target + entry.removeprefix(source)] = self.files.pop(entry)
        for entry in [entry for entry in self.directories if f"{entry}/".startswith(f"{source}/")]:
            self.directories.remove(entry)
            self.directories.add(target + entry.removeprefix(source))

    def link(self, source: str, target: str) -> None:
        self.add(target, self.file(source))

    def check_free(self, path: str) -> None:
        if path.rpartition("/")[0] not in self.directories:
            raise OSError(errno.ENOENT, "no such directory")
        if self.exists(path):
            raise OSError(errno.EEXIST, "a name that is taken")
