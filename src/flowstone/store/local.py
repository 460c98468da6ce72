"""A store in a directory of a POSIX file system; bulk bytes go through the native engine."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from pathlib import Path

from flowstone import _native
from flowstone.config import Direction, EngineOptions
from flowstone.errors import LockedError
from flowstone.store.base import UNPACED, FilePlan, Pace
from flowstone.store.means import Means, open_file
from flowstone.store.moving import LocalReading, LocalWriting
from flowstone.store.refusals import told
from flowstone.store.settings import Settings
from flowstone.store.system import System

LOCK_NAME = "flowstone.lock"


class LocalStore:
    """See store.base.Store. Nothing is created or probed before the first write.

    system  what the disk is changed by; tests put a simulation there
    """

    def __init__(
        self, root: str | os.PathLike[str], options: EngineOptions | None = None, system: System | None = None
    ) -> None:
        self.root = Path(root).absolute()
        self.system = system or System()
        self._means = Means(self.root, options or EngineOptions())
        self._lock_fd: int | None = None
        os.register_at_fork(after_in_child=partial(_forget_after_fork, weakref.ref(self)))

    @property
    def location(self) -> str:
        return str(self.root)

    # Names and small files

    def exists(self, path: str = "") -> bool:
        with self._told("look for", path):
            return (self.root / path).exists()

    def names(self, path: str = "") -> tuple[str, ...]:
        with self._told("list", path):
            try:
                return tuple(sorted(os.listdir(self.root / path)))
            except FileNotFoundError:
                return ()

    def size(self, path: str) -> int:
        with self._told("stat", path):
            found = os.stat(self.root / path, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):  # as `read` refuses it, rather than as a file of another size
                raise OSError(errno.ELOOP, "a symbolic link")
            return found.st_size

    def read(self, path: str, *, length: int | None = None) -> bytes:
        with self._told("read", path), open(open_file(self.root / path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # Not more than there is: the memory for all that may come is taken before the first byte has.
            return _read_all(file, size if length is None else min(length, size))

    def make_directory(self, path: str = "") -> None:
        with self._told("mkdir", path):
            if path:
                self.system.make_directory(self.root / path)
                return
            missing = [at for at in (self.root, *self.root.parents) if not at.exists()]
            for at in reversed(missing):
                self.system.make_directory(at)
            self._sync_way_to_root()

    def _sync_way_to_root(self) -> None:
        """Sync the entries that lead to the root, found ones too: who made them may have died before the sync."""
        device = os.stat(self.root).st_dev
        for at in self.root.parents:
            if os.stat(at).st_dev != device:
                return  # a mount point was here before us
            try:
                self.system.sync_directory(at)
            except PermissionError:
                return  # safe: a directory that we cannot open is not one that a job of ours has made

    def sync_directory(self, path: str = "") -> None:
        with self._told("fsync", path):
            self.system.sync_directory(self.root / path)

    def put(self, path: str, data: bytes) -> None:
        with self._told("write", path, needed_bytes=len(data)):
            fd = self.system.create(self.root / path, os.O_WRONLY | os.O_EXCL)
            try:
                self.system.write(fd, data)
                self.system.sync(fd)
            finally:
                os.close(fd)

    def rename(self, source: str, target: str) -> None:
        with self._told("rename", source):
            if (self.root / target).exists():
                raise FileExistsError(errno.EEXIST, f"{target} exists")
            self.system.rename(self.root / source, self.root / target)

    def remove(self, path: str) -> None:
        with self._told("remove", path):
            at = self.root / path
            if at.is_dir() and not at.is_symlink():
                self.system.remove_directory(at)
            else:
                self.system.unlink(at)

    def free_bytes(self) -> int:
        with self._told("statvfs", ""):
            return shutil.disk_usage(self.root).free

    # The writer lock

    def lock(self, holder: str) -> None:
        if self._lock_fd is not None:
            return
        with self._told("lock", LOCK_NAME):
            fd = self.system.create(self.root / LOCK_NAME, os.O_RDWR)
            try:
                # flock dies with the process, and with the last copy of the descriptor:
                # forked children close theirs (_forget_after_fork), so that they do not keep the lock.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                found = os.read(fd, 1000).decode(errors="replace").strip()
                os.close(fd)
                raise LockedError(
                    f"cannot save into {self.root}: another job writes there",
                    holder=found or "unknown", next="stop that job, or save into another directory",
                ) from error
            try:
                os.ftruncate(fd, 0)
                self.system.write(fd, holder.encode() + b"\n")
            except BaseException:
                os.close(fd)  # an open descriptor would hold the lock against our own next try
                raise
            self._lock_fd = fd

    def unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # Bulk bytes

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteRows, arena: _native.Arena, pace: Pace = UNPACED
    ) -> LocalWriting:
        return LocalWriting(self.root, self.system, self._means, files, rows, arena, pace)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadRows, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False,
    ) -> LocalReading:
        settings = self._means.settings("read")
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        return LocalReading(self.root, self._means, paths, rows, arena, direct=direct, stop_at_bad=stop_at_bad)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        direct = self._means.settings("read").direct_at(wanted_bytes)
        if direct == "off":
            return False
        with self._told("open", path):
            fd, alignment = self._means.open_to_read(self.root / path, direct)
            os.close(fd)
        return alignment > 1

    def close(self) -> None:
        """Stop the engines and give the lock back."""
        self._means.close()
        self.unlock()

    def forget(self) -> None:
        """In a forked child: threads are gone and the lock is the parent's; drop both, touch neither."""
        self._means.forget()
        self.unlock()

    @property
    def options(self) -> EngineOptions:
        return self._means.options

    def settings(self, direction: Direction) -> Settings:
        return self._means.settings(direction)

    def backend(self) -> str:
        """The engine that writes, "io_uring" or "posix"; starts it."""
        return self._means.running("write").engine.backend

    def _told(self, operation: str, path: str, *, needed_bytes: int | None = None) -> AbstractContextManager[None]:
        return told(self.root, operation, path, needed_bytes=needed_bytes)


def _read_all(file: FileIO, length: int) -> bytes:
    """The next `length` bytes, fewer only where the file ends before them."""
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _forget_after_fork(store: weakref.ref[LocalStore]) -> None:
    alive = store()
    if alive is not None:
        alive.forget()
