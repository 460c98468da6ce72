"""The files that a job reads or writes by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowstone import _native
from flowstone.store.forks import forget_in_children


@dataclass(frozen=True, slots=True)
class OpenFile:
    """alignment > 1: open with O_DIRECT, which needs it."""

    path: Path
    fd: int
    alignment: int

    def native(self) -> _native.File:
        return _native.File(fd=self.fd, path=str(self.path), alignment=self.alignment)


class OpenFiles:
    """Owns the descriptors. Forked children close theirs: what is removed keeps its space until the last is closed."""

    def __init__(self) -> None:
        self._files: list[OpenFile] = []
        forget_in_children(self)

    def add(self, path: Path, fd: int, alignment: int) -> None:
        self._files.append(OpenFile(path, fd, alignment))

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def replace_last(self, fd: int, alignment: int) -> None:
        """Have another descriptor of the file that was added last."""
        before = self._files[-1]
        self._files[-1] = OpenFile(before.path, fd, alignment)
        os.close(before.fd)

    def close(self, leave: int = 0) -> None:
        """Close all but the first `leave`."""
        while len(self._files) > leave:
            os.close(self._files.pop().fd)  # first forgotten, as a child may be forked in between

    def forget(self) -> None:
        with suppress(OSError):
            self.close()
