"""The lock of a store's only writer: a file that is locked (flock) as long as the process lives."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from flowstone.errors import LockedError
from flowstone.store.directories import directory
from flowstone.store.holders import acquire_with_grace, describe_holder, holder_name, holder_note
from flowstone.store.os_errors import translated
from flowstone.store.system import System

LOCK_NAME = "flowstone.lock"
_REMOVE = f"remove {LOCK_NAME}: it must be a plain file, and the next save creates it"
_NO_FILE = {errno.ELOOP: _REMOVE, errno.EISDIR: _REMOVE, errno.ENXIO: _REMOVE}
_NOTE_BYTES_MAX = 8000
_TRIES = 16  # attempts to lock a file that other processes replace meanwhile


class WriterLock:
    """The lock of the store at `root`, by flock(2). The system releases it when the last copy of the descriptor is
    closed, so forked children close their copies (store/forks.py).

    The file names the holder and its process (store/holders.py), and contains a token by which the holder recognizes
    the file.
    """

    def __init__(self, root: Path, system: System) -> None:
        self._root, self._system = root, system
        self._fd: int | None = None
        self._content = b""

    def acquire(self, holder: str) -> None:
        """Take the lock, unless this WriterLock has it already.

        Raises LockedError if another process holds the lock: at once if that process is known to be alive; otherwise
        only if the lock is still held after LOCK_GRACE_S, since the holder may be dead and its lock about to be
        released.
        """
        if self._fd is not None:
            return
        other = acquire_with_grace(lambda: self._try_take(holder), str(self._root))
        if other is not None:
            raise LockedError(
                f"cannot save into {self._root}: another job writes there", holder=holder_name(other),
                found=describe_holder(other),
                next="stop that job and its children, or save into another directory",
            )

    def _try_take(self, holder: str) -> str | None:
        """Try to take the lock. Returns None if it was taken, otherwise the note of its holder."""
        with translated(self._root, "lock", LOCK_NAME), directory(self._root) as dir_fd:
            for _ in range(_TRIES):
                fd = self._open_locked(dir_fd)
                if isinstance(fd, str):
                    return fd
                if fd is not None:
                    break
            else:
                raise LockedError(
                    f"cannot save into {self._root}: another program keeps replacing {LOCK_NAME}", holder="unknown",
                    next="find the program that replaces this file, and stop that program",
                )
            try:
                self._content = f"{holder_note(holder)}\n{secrets.token_hex(8)}\n".encode()
                os.ftruncate(fd, 0)
                self._system.write(fd, self._content)
            except BaseException:
                os.close(fd)  # an open copy of the descriptor would block the next attempt
                raise
        self._fd = fd
        return None

    def _open_locked(self, dir_fd: int) -> int | str | None:
        """Open and lock the file. Returns its descriptor; or the note of another holder; or None if the file was
        replaced meanwhile.
        """
        with translated(self._root, "lock", LOCK_NAME, remedies=_NO_FILE):
            fd = self._system.create(self._root / LOCK_NAME, os.O_RDWR | os.O_NONBLOCK, dir_fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.ENXIO, "the lock is not a regular file")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    note = _note(fd)
                    os.close(fd)
                    return note
                if not _is_at(fd, dir_fd):
                    os.close(fd)
                    return None
                if os.fstat(fd).st_nlink > 1:
                    return self._replace(fd, dir_fd)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _replace(self, fd: int, dir_fd: int) -> int:
        """Replace a lock file that has a second name (a hard link) by a new file, since locking it would also lock the
        other name.

        Copies of a store that were made with hard links share the file, so the writer of one would lock the others.
        """
        draft = self._root / f".{LOCK_NAME}-{secrets.token_hex(8)}"
        own = self._system.create(draft, os.O_RDWR | os.O_EXCL, dir_fd)
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._system.rename(draft, self._root / LOCK_NAME, dir_fd, dir_fd)  # while the old file is still locked
        except BaseException:
            os.close(own)
            raise
        os.close(fd)
        return own

    def check(self) -> None:
        """Raise LockedError if the lock was lost, because its file was removed or replaced."""
        fd = self._fd
        if fd is None:
            raise LockedError(f"the lock of {self._root} is not held", next="report this: it is a bug in Flowstone")
        with translated(self._root, "look for the lock in", ""), directory(self._root) as dir_fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # has no effect, unless the lock was lost
                lost = None if _is_at(fd, dir_fd) else f"{LOCK_NAME} was removed or replaced"
                if lost is None and os.pread(fd, len(self._content) + 1, 0) != self._content:
                    lost = f"{holder_name(_note(fd))} has taken the lock since"
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.ESTALE):
                    raise
                is_held = error.errno == errno.EWOULDBLOCK
                lost = f"{holder_name(_note(fd))} has it" if is_held else f"{LOCK_NAME} was removed"
        if lost is not None:
            raise LockedError(
                f"this job has lost the lock of {self._root}", found=lost,
                next="stop the other job that writes there; the next save takes the lock again",
            )

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _is_at(fd: int, dir_fd: int) -> bool:
    """Whether the name of the lock in the directory `dir_fd` still refers to the file that `fd` has open."""
    try:
        status = os.stat(LOCK_NAME, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(fd))


def _note(fd: int) -> str:
    """The holder's note, read from the file."""
    try:
        return os.pread(fd, _NOTE_BYTES_MAX, 0).decode(errors="replace")
    except OSError:
        return ""  # then the message lacks the holder
