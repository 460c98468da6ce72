"""The lock of a store's one writer: a file that is locked while the process lives."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from flowstone.errors import LockedError
from flowstone.store.directories import directory
from flowstone.store.holders import found_of, name_in, noted, take_in_time
from flowstone.store.os_errors import translated
from flowstone.store.system import System

LOCK_NAME = "flowstone.lock"
_ANEW = f"remove {LOCK_NAME}: it must be a plain file, and the next save creates it"
_NO_FILE = {errno.ELOOP: _ANEW, errno.EISDIR: _ANEW, errno.ENXIO: _ANEW}
_NOTE_BYTES_MAX = 8000
_TRIES = 16  # to lock a file that other processes replace meanwhile


class WriterLock:
    """The lock of the store at `root`. flock is released with the last copy of the descriptor: forked children close
    theirs (store/forks.py), so that they do not keep it.

    The file names the holder and its process (store/holders.py), and has a token by which the holder knows its file.
    """

    def __init__(self, root: Path, system: System) -> None:
        self._root, self._system = root, system
        self._fd: int | None = None
        self._said = b""

    def take(self, holder: str) -> None:
        """Take the lock, if it is not held; wait for a holder that may have ended. Raises LockedError."""
        if self._fd is not None:
            return
        other = take_in_time(lambda: self._try(holder), str(self._root))
        if other is not None:
            raise LockedError(
                f"cannot save into {self._root}: another job writes there", holder=name_in(other),
                found=found_of(other),
                next="stop that job and its children, or save into another directory",
            )

    def _try(self, holder: str) -> str | None:
        """None once it is taken; else the note of its holder."""
        with translated(self._root, "lock", LOCK_NAME), directory(self._root) as at:
            for _ in range(_TRIES):
                fd = self._locked(at)
                if isinstance(fd, str):
                    return fd
                if fd is not None:
                    break
            else:
                raise LockedError(
                    f"cannot save into {self._root}: {LOCK_NAME} is replaced again and again", holder="unknown",
                    next="find the program that replaces it, and stop it",
                )
            try:
                self._said = f"{noted(holder)}\n{secrets.token_hex(8)}\n".encode()
                os.ftruncate(fd, 0)
                self._system.write(fd, self._said)
            except BaseException:
                os.close(fd)  # an open descriptor would hold the lock against our own next try
                raise
        self._fd = fd
        return None

    def _locked(self, at: int) -> int | str | None:
        """A locked descriptor of the file; its holder's note; None if the file was replaced meanwhile."""
        with translated(self._root, "lock", LOCK_NAME, remedies=_NO_FILE):
            fd = self._system.create(self._root / LOCK_NAME, os.O_RDWR | os.O_NONBLOCK, at)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.ENXIO, "not a plain file")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    note = _note(fd)
                    os.close(fd)
                    return note
                if not _is_at(fd, at):
                    os.close(fd)
                    return None
                if os.fstat(fd).st_nlink > 1:
                    return self._replaced(fd, at)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _replaced(self, fd: int, at: int) -> int:
        """Replace a lock file that has a second name by a new file: a lock on it would affect the other name too.

        Copies of a store made of hard links share the file, and would lock each other out.
        """
        draft = self._root / f".{LOCK_NAME}-{secrets.token_hex(8)}"
        own = self._system.create(draft, os.O_RDWR | os.O_EXCL, at)
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._system.rename(draft, self._root / LOCK_NAME, at, at)  # while we hold the old file's lock
        except BaseException:
            os.close(own)
            raise
        os.close(fd)
        return own

    def check(self) -> None:
        """Raise LockedError unless the lock is still held: leases expire, machines freeze, files are removed by hand.
        """
        fd = self._fd
        if fd is None:
            raise LockedError(f"the lock of {self._root} is not held", next="report this: it is a mistake in Flowstone")
        with translated(self._root, "look for the lock in", ""), directory(self._root) as at:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # changes nothing, unless the lock was lost
                lost = None if _is_at(fd, at) else f"{LOCK_NAME} was removed or replaced"
                if lost is None and os.pread(fd, len(self._said) + 1, 0) != self._said:
                    lost = f"{name_in(_note(fd))} has taken it since"
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.ESTALE):
                    raise
                is_held = error.errno == errno.EWOULDBLOCK
                lost = f"{name_in(_note(fd))} has it" if is_held else f"{LOCK_NAME} was removed"
        if lost is not None:
            raise LockedError(
                f"this job has lost the lock of {self._root}", found=lost,
                next="stop the other job that writes there; the next save takes the lock again",
            )

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _is_at(fd: int, at: int) -> bool:
    """Whether the lock's name in the directory still refers to this very file."""
    try:
        found = os.stat(LOCK_NAME, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def _note(fd: int) -> str:
    """What the file says of its holder."""
    try:
        return os.pread(fd, _NOTE_BYTES_MAX, 0).decode(errors="replace")
    except OSError:
        return ""  # safe: the message only lacks one fact
