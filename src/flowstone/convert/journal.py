"""The journal of a conversion: it records durable windows, so that the same command can resume after a crash.

The file consists of lines of JSON. Each line begins with the XXH3-64 of its text, and is synced after it was appended.
The first line names the plan and the draft (the unfinished target). Each later line has the number of durable windows
(ranges of files), and the checksums of their bytes. If a crash has left a line incomplete, the journal ends before it,
and the windows of that line are written again. The file is locked while a conversion runs.
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

_BYTES_MAX = 1 << 30  # limit of a journal's size in bytes; the journal of a conversion of 50 TB has half of this size


class JournalStart(msgspec.Struct, frozen=True):
    """The first line of a journal. `plan`: identifies the conversion (layout.plan_digest). `draft`: the name of the
    unfinished target.
    """

    plan: str
    draft: str


class DurableWindows(msgspec.Struct, frozen=True):
    """A later line of a journal.

    windows  how many windows are durable
    checks   the checksums that were completed since the previous line, in hexadecimal

    running  the CRC-32, so far, of an extent (range of a target's file) that continues in the next window
    """

    windows: int
    checks: tuple[str, ...]
    running: int = 0


class ConversionJournal:
    """The file of a conversion's journal. `start`, `durable`: the lines that an earlier conversion has written; None
    and () if there are none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._system = path, System()
        self._fd: int | None = None
        self.start: JournalStart | None = None
        self.durable: tuple[DurableWindows, ...] = ()

    def open(self) -> None:
        """Lock the journal, and read it.

        raises  LockedError  another process is converting to the same target
                StorageError
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
                    f"another conversion to the same target is running: {self._path} is locked",
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
            self.start = msgspec.json.decode(lines[0], type=JournalStart) if lines else None
            self.durable = tuple(msgspec.json.decode(line, type=DurableWindows) for line in lines[1:])
        except msgspec.DecodeError:  # a journal of another version: start over
            self.start, self.durable = None, ()

    def begin(self, plan: str, draft: str) -> None:
        """Discard earlier lines, and write the first line of a new journal. Durable on return."""
        assert self._fd is not None, "open comes first"
        self.start, self.durable = JournalStart(plan, draft), ()
        with translated(self._path.parent, "write", self._path.name):
            os.ftruncate(self._fd, 0)
            self._append(self.start)
            self._system.sync_directory(self._path.parent)

    def drop_durable(self) -> None:
        """Forget all durable windows, as the draft does not have them. They are written again."""
        self.durable = ()

    def record(self, durable: DurableWindows) -> None:
        """Append a line. Durable on return."""
        with translated(self._path.parent, "write", self._path.name):
            self._append(durable)

    def _append(self, record: msgspec.Struct) -> None:
        assert self._fd is not None, "open comes first"
        text = msgspec.json.encode(record)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._system.write(self._fd, digest(text).encode() + b" " + text + b"\n")
        self._system.sync(self._fd)

    def cut_torn_line(self) -> None:
        """Remove a line that a crash has left incomplete, so that the next line is a line of its own."""
        assert self._fd is not None, "open comes first"
        with translated(self._path.parent, "write", self._path.name):
            content = os.pread(self._fd, min(os.fstat(self._fd).st_size, _BYTES_MAX), 0)
            os.ftruncate(self._fd, sum(len(line) + _FRAME_BYTES for line in _whole_lines(content)))

    def remove(self) -> None:
        """Remove the file, once the target is complete. If a power loss brings the file back, that does no harm."""
        with translated(self._path.parent, "remove", self._path.name):
            os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Release the lock. The file stays, so that the next conversion can resume."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_DIGITS = 16
_FRAME_BYTES = _DIGITS + len(" \n")


def _whole_lines(content: bytes) -> Iterator[bytes]:
    """The texts of all lines before the first damaged one."""
    for line in content.split(b"\n")[:-1]:
        text = line[_DIGITS + 1 :]
        if line[: _DIGITS + 1] != digest(text).encode() + b" ":
            return
        yield text
