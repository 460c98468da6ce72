"""The journal of a conversion: which windows of its draft are durable, so that the same command goes on after a crash.

Lines of JSON, each behind the XXH3-64 of its text, appended and synced. The first names the plan and the draft; each
further one says how many windows are durable, and what was computed of their bytes. A line that was torn by a crash
ends the journal: what it said is done again. The file is locked while a conversion runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flowstone.errors import LockedError
from flowstone.format.digest import digest
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_BYTES_MAX = 1 << 30  # of a journal: that of 50 TB has half of it


class Begun(msgspec.Struct, frozen=True):
    """What a journal begins with. `plan`: see layout.plan_digest; `draft`: what the draft is called."""

    plan: str
    draft: str


class Durable(msgspec.Struct, frozen=True):
    """Windows that are durable, counted from the first; the checks that ended in those since the line before, in
    hexadecimal digits.

    running  the CRC-32 of the extent that goes on in the next window
    """

    windows: int
    checks: tuple[str, ...]
    running: int = 0


class Journal:
    """See above. `begun` and `durable` are what an earlier conversion has said; None and () where there was none."""

    def __init__(self, path: Path) -> None:
        self._path, self._system = path, System()
        self._fd: int | None = None
        self.begun: Begun | None = None
        self.durable: tuple[Durable, ...] = ()

    def open(self) -> None:
        """Lock the journal, and read what is in it.

        raises  LockedError where another process converts to the same place; StorageError
        """
        with translated(self._path.parent, "open", self._path.name):
            fd = self._system.create(self._path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise LockedError(
                    f"another conversion is under way to the same place, as {self._path} is locked",
                    next="wait until it has ended, or give another target",
                ) from None
        self._fd = fd
        self._read()

    def _read(self) -> None:
        assert self._fd is not None, "open comes first"
        with translated(self._path.parent, "read", self._path.name):
            content = os.pread(self._fd, min(os.fstat(self._fd).st_size, _BYTES_MAX), 0)
        lines = list(_whole_lines(content))
        try:
            self.begun = msgspec.json.decode(lines[0], type=Begun) if lines else None
            self.durable = tuple(msgspec.json.decode(line, type=Durable) for line in lines[1:])
        except msgspec.DecodeError:  # of another version: begun anew
            self.begun, self.durable = None, ()

    def begin(self, plan: str, draft: str) -> None:
        """Forget what was said, and begin with this plan. Durable on return."""
        assert self._fd is not None, "open comes first"
        self.begun, self.durable = Begun(plan, draft), ()
        with translated(self._path.parent, "write", self._path.name):
            os.ftruncate(self._fd, 0)
            self._append(self.begun)
            self._system.sync_directory(self._path.parent)

    def note(self, durable: Durable) -> None:
        """Say which windows are durable. Durable on return."""
        with translated(self._path.parent, "write", self._path.name):
            self._append(durable)

    def _append(self, record: msgspec.Struct) -> None:
        assert self._fd is not None, "open comes first"
        text = msgspec.json.encode(record)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._system.write(self._fd, digest(text).encode() + b" " + text + b"\n")
        self._system.sync(self._fd)

    def cut_torn_line(self) -> None:
        """Drop what a crash has left of a line, so that the next one stands by itself."""
        assert self._fd is not None, "open comes first"
        with translated(self._path.parent, "write", self._path.name):
            content = os.pread(self._fd, min(os.fstat(self._fd).st_size, _BYTES_MAX), 0)
            os.ftruncate(self._fd, sum(len(line) + _FRAME_BYTES for line in _whole_lines(content)))

    def remove(self) -> None:
        """Nothing is left to go on with. The name may come back after a power loss; then what it says is done."""
        with translated(self._path.parent, "remove", self._path.name):
            os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Give the lock back; the file stays, for the next conversion to go on."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_DIGITS = 16
_FRAME_BYTES = _DIGITS + len(" \n")


def _whole_lines(content: bytes) -> Iterator[bytes]:
    """The texts of lines up to the first that is not as it was written."""
    for line in content.split(b"\n")[:-1]:
        text = line[_DIGITS + 1 :]
        if line[: _DIGITS + 1] != digest(text).encode() + b" ":
            return
        yield text
