"""A claim: one process at a time saves to a target. It ends with the process."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

from flowstone.errors import LockedError
from flowstone.store.lock import LOCK_NAME
from flowstone.store.os_errors import translated

_TRIES = 16  # to lock a file that others remove meanwhile
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process


def claim_file(name: str) -> str:
    """The lock file of a draft, beside it."""
    return f".{LOCK_NAME}-{name}"


def is_claimed(parent: Path, name: str) -> bool:
    """Whether another process holds the claim on a draft. Asking takes nothing."""
    try:
        fd = os.open(parent / claim_file(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


class Claim:
    """Held from construction until `release`, or until another save of the same process makes one: then a save that has
    failed before it has nothing to clean up any more.

    A lock file beside the target, which goes with the claim; the name is one of a store's leftovers. The lock is the
    process' own: it knows no threads, and ends with the process.

    raises  LockedError where another process saves to the same target
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._path = parent / claim_file(name)
        self._fd: int | None = None
        with translated(parent, "lock", self._path.name):
            for _ in range(_TRIES):
                self._remove_dead()
                with suppress(FileExistsError):
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                if self._fd is not None and self._lock(self._fd):
                    return
                self.release()
        raise self._refusal()

    def _remove_dead(self) -> None:
        """Remove a lock file that no other process holds. Our own goes as well: whose it was finds that it is gone."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if self._lock(fd):
                os.unlink(self._path)
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        """Lock an open file; whether it is the one that has the name."""
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise self._refusal() from error
        return self._has_name(fd)

    def _has_name(self, fd: int) -> bool:
        try:
            mine, there = os.fstat(fd), os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    @property
    def is_held(self) -> bool:
        return self._fd is not None and self._has_name(self._fd)

    def _refusal(self) -> LockedError:
        return LockedError(
            f"another process saves to the same checkpoint: {self._path} is locked",
            next="wait until it is done, or save to another path",
        )

    def release(self) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if self._has_name(fd):
            with suppress(OSError):  # safe: the file says nothing, and the next one removes it
                os.unlink(self._path)
        os.close(fd)
