"""A claim: one process at a time saves to a target. It ends with the process."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

from flowstone.errors import LockedError
from flowstone.store.forks import forget_in_children
from flowstone.store.lock import LOCK_NAME
from flowstone.store.os_errors import translated

_TRIES = 16  # to lock a file that others remove meanwhile
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process
_WRITE_LOCK = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def claim_file(name: str) -> str:
    """The lock file of a draft, beside it."""
    return f".{LOCK_NAME}-{name}"


def is_claimed(parent: Path, name: str) -> bool:
    """Whether a claim on a draft is held, by this process or another. Asking takes nothing.

    raises  StorageError where the system does not tell
    """
    with translated(parent, "read", claim_file(name)):
        try:
            fd = os.open(parent / claim_file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK)
            return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
        finally:
            os.close(fd)


class Claim:
    """Held from construction until `release`, or until one is constructed with `take_over` in the same process: then a
    save that has failed before it has nothing to clean up any more.

    A lock file beside the target, which goes with the claim; the name is one of a store's leftovers. The lock is that
    of an open file: two claims of one process exclude each other too, and a child that is forked closes its copy.

    raises  LockedError where there is another save to the same target
    """

    def __init__(self, parent: Path, name: str, *, take_over: bool = False) -> None:
        self._path = parent / claim_file(name)
        self._key = os.path.realpath(self._path)
        self._fd: int | None = None
        forget_in_children(self)
        earlier = _held().get(self._key)
        if take_over and earlier is not None:
            earlier.release()
        with translated(parent, "lock", self._path.name):
            for _ in range(_TRIES):
                self._remove_dead()
                with suppress(FileExistsError):
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                if self._fd is not None and self._lock_own():
                    _held()[self._key] = self
                    return
                self.release()
        raise self._refusal()

    def _lock_own(self) -> bool:
        """Lock the file that was made; False if another one has its name by now."""
        assert self._fd is not None
        try:
            return self._lock(self._fd)
        except BaseException:
            self.forget()
            raise

    def _remove_dead(self) -> None:
        """Remove a lock file that nothing holds."""
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
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        except (BlockingIOError, PermissionError) as error:
            raise self._refusal() from error
        return self._has_name(fd)

    def _has_name(self, fd: int) -> bool:
        try:
            mine, there = os.fstat(fd), os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False  # safe: what cannot be looked at is not taken for ours
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    @property
    def is_held(self) -> bool:
        return self._fd is not None and self._has_name(self._fd)

    def _refusal(self) -> LockedError:
        saver = "another process" if _held().get(self._key) is None else "this process already"
        return LockedError(
            f"{saver} saves to the same checkpoint: {self._path} is locked",
            next="wait until it is done, or save to another path",
        )

    def release(self) -> None:
        if self._fd is None:
            return
        if self._has_name(self._fd):
            with suppress(OSError):  # safe: the file says nothing, and the next one removes it
                os.unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the file, and leave its name: in a forked child, and where another holds it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if _held().get(self._key) is self:
            del _held()[self._key]


@cache
def _held() -> dict[str, Claim]:
    """The claims of this process, by the lock file's path. No lock of a file tells which of them it may take over."""
    return {}
