"""The files that a read or write has open."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from flowstone import _native
from flowstone.store.descriptors import Descriptors
from flowstone.store.forks import forget_in_children


class OpenFile(msgspec.Struct, frozen=True):
    """An open file. `alignment`: 1, or the alignment that requests need because the file is open with O_DIRECT."""

    path: Path
    fd: int
    alignment: int

    def native(self, mapped_bytes: int = 0, *, of_path: int = 0, may_move: bool = False) -> _native.File:
        """This file as an object of the native engine. If the file is in memory (such as tmpfs), maps `mapped_bytes` of
        it, unless the system refuses.
        """
        mapping = None
        if mapped_bytes and _native.is_byte_addressable(self.fd):
            with suppress(OSError):  # without the mapping, the engine writes to the descriptor
                mapping = _native.Mapping(fd=self.fd, bytes=mapped_bytes, writable=True)
        return _native.File(
            fd=self.fd, path=str(self.path), alignment=self.alignment, mapping=mapping, of_path=of_path,
            may_move=may_move,
        )


class OpenFiles:
    """Owns the descriptors of files. Forked children close their copies of these, since a removed file occupies its
    space as long as any copy is open.

    descriptors  descriptors of the files, and of a file that is about to be added
    """

    def __init__(self) -> None:
        self.descriptors = Descriptors(in_use=True)
        self._files: list[OpenFile] = []
        forget_in_children(self)

    def add(self, path: Path, fd: int, alignment: int) -> None:
        """Add a file. `fd` is the last of `descriptors`, or is now added to them."""
        if len(self.descriptors) == len(self._files):
            self.descriptors.take(fd)
        self._files.append(OpenFile(path, fd, alignment))

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def go_through_cache(self, number: int) -> None:
        """Turn O_DIRECT off for file number `number`, so that it is accessed through the page cache. Raises OSError."""
        file = self._files[number]
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._files[number] = OpenFile(file.path, file.fd, 1)

    def close(self, leave: int = 0) -> None:
        """Close the files, except the first ones: `leave` of them stay open."""
        del self._files[leave:]
        self.descriptors.close(leave)

    def forget(self) -> None:
        with suppress(OSError):
            self.close()
