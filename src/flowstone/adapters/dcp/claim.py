"""A claim is a lock on a file. It lets only one process at a time save to a target (the directory of a checkpoint)."""

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

_TRIES = 16  # attempts to lock a file that other processes may remove meanwhile
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process id
_WRITE_LOCK = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def claim_file(name: str) -> str:
    """The name of the lock file for `name`, the directory of an unfinished checkpoint. The file is beside that
    directory.
    """
    return f".{LOCK_NAME}-{name}"


def is_claimed(parent: Path, name: str) -> bool:
    """Whether a process holds the claim on the unfinished checkpoint in the directory `name`. Takes no lock.

    raises  StorageError  the system cannot tell
    """
    with translated(parent, "read", claim_file(name)):
        try:
            fd = os.open(parent / claim_file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_LOCK)
            return bool(_FLOCK.unpack(lock)[0] != fcntl.F_UNLCK)
        finally:
            os.close(fd)


class SaveClaim:
    """The claim on one target (the directory of a checkpoint). It is held from construction until `release`, or until
    the process ends.

    With `take_over`, the constructor takes the claim from an earlier, failed save of this process.

    The claim is a locked file beside the target. `release` removes this file. If it stays, a store treats it as a
    leftover. The lock belongs to the open file, so it also excludes a second claim of this process. A forked child
    closes its copy of the file.

    raises  LockedError  another save writes to the same target
    """

    def __init__(self, parent: Path, name: str, *, take_over: bool = False) -> None:
        self._path = parent / claim_file(name)
        self._key = os.path.realpath(self._path)
        self._fd: int | None = None
        forget_in_children(self)
        earlier = _claims().get(self._key)
        if take_over and earlier is not None:
            earlier.release()
        with translated(parent, "lock", self._path.name):
            for _ in range(_TRIES):
                self._remove_dead()
                with suppress(FileExistsError):
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                if self._fd is not None and self._lock_own():
                    _claims()[self._key] = self
                    return
                self.release()
        raise self._refusal()

    def _lock_own(self) -> bool:
        """Lock the new file. Returns False if another process has replaced the file."""
        assert self._fd is not None
        try:
            return self._lock(self._fd)
        except BaseException:
            self.forget()
            raise

    def _remove_dead(self) -> None:
        """Remove a lock file that no process holds."""
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
        """Lock an open file. Returns whether the path is still a name of this file."""
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        except (BlockingIOError, PermissionError) as error:
            raise self._refusal() from error
        return self._has_name(fd)

    def _has_name(self, fd: int) -> bool:
        try:
            mine, there = os.fstat(fd), os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False  # then the file counts as that of another process
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    @property
    def is_held(self) -> bool:
        return self._fd is not None and self._has_name(self._fd)

    def _refusal(self) -> LockedError:
        saver = "another process is" if _claims().get(self._key) is None else "this process is already"
        return LockedError(
            f"{saver} saving to the same checkpoint: {self._path} is locked",
            next="wait until that save is done, or save to another path",
        )

    def release(self) -> None:
        if self._fd is None:
            return
        if self._has_name(self._fd):
            with suppress(OSError):  # the file has no content, and the next claim removes it
                os.unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the file without removing it. Called in a forked child, and if another claim has the name now."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if _claims().get(self._key) is self:
            del _claims()[self._key]


@cache
def _claims() -> dict[str, SaveClaim]:
    """The claims of this process, by the path of the lock file. Needed for `take_over`."""
    return {}
