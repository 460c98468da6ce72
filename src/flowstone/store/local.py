"""A store in a directory of a POSIX file system; bulk bytes go through the native engine."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from flowstone import _native
from flowstone.config import BLOCK_BYTES, KIB, POLL_S, Direct, Direction, EngineOptions
from flowstone.errors import CancelledError, FlowstoneError, FullError, LockedError, StorageError
from flowstone.format.manifest import IoRecord
from flowstone.store.base import FilePlan, ReadReceipt, Receipt
from flowstone.store.settings import Settings, find_settings
from flowstone.store.system import System

LOCK_NAME = "flowstone.lock"
_GAP_BYTES = 64 * KIB  # of padding that is cheaper to write than to split a request at
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("flowstone")


class LocalStore:
    """See store.base.Store. Nothing is created or probed before the first write.

    options  what the caller says of how bytes move; the rest is looked up once, when bytes first do
    system   what the disk is changed by; tests put a simulation there
    """

    def __init__(
        self, root: str | os.PathLike[str], options: EngineOptions | None = None, system: System | None = None
    ) -> None:
        self.root = Path(root).absolute()
        self.system = system or System()
        self._options = options or EngineOptions()
        self._settings: Mapping[Direction, Settings] | None = None
        self._engines: dict[tuple[str, int, int, int], _native.Engine] = {}  # by what they were made of
        self._lock_fd: int | None = None
        self._write_alignment: int | None = None
        self._read_alignment: int | None = None
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
        with self._told("read", path):
            # A link could lead out of the checkpoint; nothing of ours is one.
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                return file.read(-1 if length is None else length)

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

    def write(self, files: Sequence[FilePlan], rows: _native.WriteRows, arena: _native.Arena) -> LocalWriting:
        settings = self.settings("write")
        opened: list[tuple[int, FilePlan]] = []
        needed = sum(file.bytes for file in files)
        alignment = self._alignment_to_write(settings.direct_at(needed))
        request_bytes = min(settings.tuning.request_bytes, arena.block_bytes)  # a tight budget has smaller blocks
        try:
            for file in files:
                with self._told("create", file.path, needed_bytes=needed):
                    flags = os.O_RDWR | os.O_EXCL | (os.O_DIRECT if alignment > 1 else 0)
                    opened.append((self.system.create(self.root / file.path, flags), file))
                with self._told("allocate", file.path, needed_bytes=needed):
                    self.system.reserve(opened[-1][0], file.bytes)
            natives = [
                (_native.File(fd=fd, path=str(self.root / file.path), alignment=alignment), file.bytes)
                for fd, file in opened
            ]
            # These files are this job's alone, so that gaps between slots may be written as zeros.
            engine = self._open_engine(settings, request_bytes)
            job = engine.write(arena, natives, rows, gap_bytes=_GAP_BYTES, in_place=settings.tuning.in_place)
        except BaseException:
            for fd, _ in opened:
                os.close(fd)
            raise
        tuning = settings.tuning
        io = IoRecord(
            backend=engine.backend, alignment=alignment, request_bytes=request_bytes, queue_depth=tuning.queue_depth,
            workers=tuning.workers, copied_bytes=0, direct_bytes=0, requests=0, origin=settings.origin,
            explicit=settings.explicit,
        )
        return LocalWriting(self, job, opened, io)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadRows, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False,
    ) -> LocalReading:
        settings = self.settings("read")
        fds: list[int] = []
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        try:
            natives = []
            for path in paths:
                with self._told("open", path):
                    fd, alignment = self._open_to_read(path, direct)
                fds.append(fd)
                natives.append(_native.File(fd=fd, path=str(self.root / path), alignment=alignment))
            # Made as one for writing, so that both directions share it where they are tuned alike.
            engine = self._open_engine(settings, self.settings("write").tuning.request_bytes)
            job = engine.read(
                arena, natives, rows, stop_at_bad=stop_at_bad, in_place=settings.tuning.in_place,
                request_bytes=settings.tuning.request_bytes,
            )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return LocalReading(self, job, fds)

    def close(self) -> None:
        """Stop the engines and give the lock back."""
        while self._engines:
            self._engines.popitem()[1].close()
        self.unlock()

    def forget(self) -> None:
        """In a forked child: threads are gone and the lock is the parent's; drop both, touch neither."""
        self._engines.clear()
        self.unlock()

    # Settings and engines

    @property
    def options(self) -> EngineOptions:
        return self._options

    def settings(self, direction: Direction) -> Settings:
        if self._settings is None:
            self._settings = find_settings(self.root, self._options)
        return self._settings[direction]

    def _open_engine(self, settings: Settings, request_bytes: int) -> _native.Engine:
        tuning, backend = settings.tuning, self._backend(settings)
        made_of = (backend, tuning.queue_depth, request_bytes, tuning.workers)
        if made_of not in self._engines:
            with self._told(f"start the {backend} engine", ""):
                self._engines[made_of] = _native.Engine(
                    backend=backend, queue_depth=tuning.queue_depth, request_bytes=request_bytes,
                    workers=tuning.workers,
                )
        return self._engines[made_of]

    def _backend(self, settings: Settings) -> Literal["io_uring", "posix"]:
        """What the caller insists on; else what was tuned or is better, as far as it can be had here."""
        wanted = settings.tuning.backend
        if "backend" in settings.explicit and wanted != "auto":
            return wanted
        if wanted == "posix" or _native.has_io_uring():
            return "posix" if wanted == "posix" else "io_uring"
        if wanted == "io_uring":
            _log.warning("%s is tuned for io_uring, which is refused here: POSIX threads instead", self.root)
        return "posix"

    def _alignment_to_write(self, direct: Direct) -> int:
        """BLOCK_BYTES when O_DIRECT is wanted and works here with real aligned buffers, else 1 (the page cache)."""
        if direct == "off":
            return 1
        if self._write_alignment is None:
            with self._told("probe", ""):
                needed = _native.probe_direct(str(self.root))
            if direct == "on" and not 0 < needed <= BLOCK_BYTES:
                raise StorageError(
                    f"{self.root} refuses direct I/O (O_DIRECT)", expected="alignment up to 4096",
                    found=needed or "refused", next='use direct="auto", or another file system',
                )
            self._write_alignment = BLOCK_BYTES if 0 < needed <= BLOCK_BYTES else 1
        return self._write_alignment

    def _open_to_read(self, path: str, direct: Direct) -> tuple[int, int]:
        """A descriptor and its alignment; direct where a real aligned read of this file succeeds."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct != "off" and self._read_alignment != 1:
            try:
                fd = os.open(self.root / path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._read_alignment = 1
            else:
                if self._read_alignment or _reads_direct(fd):
                    self._read_alignment = BLOCK_BYTES
                    return fd, BLOCK_BYTES
                os.close(fd)
                self._read_alignment = 1
        return os.open(self.root / path, flags), 1

    @contextmanager
    def _told(self, operation: str, path: str, *, needed_bytes: int | None = None) -> Iterator[None]:
        """Turn an OSError into a StorageError that says what was being done, and to what."""
        try:
            yield
        except OSError as error:
            raise self.explain(operation, error.errno or 0, str(self.root / path), needed_bytes=needed_bytes) from error

    def explain(
        self, operation: str, code: int, path: str, *, reach: str = "", needed_bytes: int | None = None
    ) -> StorageError:
        """The one place where a refusal of the system becomes an error of ours."""
        facts: dict[str, object] = {"reason": f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"}
        if reach:
            facts["range"] = reach
        if code in _NO_SPACE:
            try:
                free: object = shutil.disk_usage(self.root).free
            except OSError:
                free = "unknown"  # safe: only a fact less in the message
            facts |= {"needed": f"{needed_bytes} bytes" if needed_bytes else "unknown", "free": f"{free} bytes"}
            facts["next"] = "free some space, or prune old checkpoints; the previous checkpoint is untouched"
            return FullError(f"no space to {operation} {path}", errno=code, **facts)
        facts["next"] = {
            errno.EACCES: "give this user the permission, or choose another path",
            errno.EPERM: "give this user the permission, or choose another path",
            errno.EROFS: "mount the file system for writing, or choose another path",
            errno.ELOOP: "a checkpoint holds no symbolic links; copy it with its files, not links to them",
            errno.ENOENT: "check the path",
        }.get(code, "check the device and the file system's log")
        return StorageError(f"cannot {operation} {path}", errno=code, **facts)


class LocalWriting:
    """Segments of one save on their way; owns their descriptors."""

    def __init__(
        self, store: LocalStore, job: _native.WriteJob, opened: Sequence[tuple[int, FilePlan]], io: IoRecord
    ) -> None:
        self._store, self._job, self._opened, self._io = store, job, opened, io

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def cancel(self) -> None:
        self._job.cancel()

    def wait_captured(self) -> None:
        while not self._job.wait_captured(POLL_S):
            pass  # returns to Python in between, so that Ctrl-C is heard

    def receipt(self) -> Receipt:
        while not self._job.wait(POLL_S):
            pass
        try:
            error = self._error() or self._sync_error()
        finally:
            for fd, _ in self._opened:
                os.close(fd)
        job = self._job
        io = msgspec.structs.replace(
            self._io, copied_bytes=job.copied_bytes, direct_bytes=job.direct_bytes, requests=job.requests
        )
        digests = job.digests if error is None else np.zeros(0, np.uint64)
        return Receipt(error, digests, io)

    def _error(self) -> FlowstoneError | None:
        fault = self._job.fault
        if fault is not None:
            needed = sum(file.bytes for _, file in self._opened)
            reach = f"bytes {fault.offset}..{fault.offset + fault.length}"
            return self._store.explain(fault.operation, fault.errno, fault.path, reach=reach, needed_bytes=needed)
        if self._job.cancelled:
            return CancelledError("the save was cancelled", next="save again")
        return None

    def _sync_error(self) -> FlowstoneError | None:
        for fd, file in self._opened:
            try:
                self._store.system.sync(fd)
            except OSError as error:
                return self._store.explain("fsync", error.errno or 0, str(self._store.root / file.path))
        return None


class LocalReading:
    """Extents of one load on their way; owns the descriptors."""

    def __init__(self, store: LocalStore, job: _native.ReadJob, fds: Sequence[int]) -> None:
        self._store, self._job, self._fds = store, job, fds

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def wait(self, timeout_s: float) -> bool:
        return self._job.wait(timeout_s)

    def cancel(self) -> None:
        self._job.cancel()

    def receipt(self) -> ReadReceipt:
        while not self._job.wait(POLL_S):
            pass
        for fd in self._fds:
            os.close(fd)
        job, fault = self._job, self._job.fault
        error: FlowstoneError | None = None
        if fault is not None:
            reach = f"bytes {fault.offset}..{fault.offset + fault.length}"
            error = self._store.explain(fault.operation, fault.errno, fault.path, reach=reach)
        elif job.cancelled:
            error = CancelledError("the load was cancelled", next="load again before saving")
        return ReadReceipt(
            error, job.bad_chunks, job.touched, job.requested_bytes, job.copied_bytes, job.direct_bytes, job.requests
        )


def _forget_after_fork(store: weakref.ref[LocalStore]) -> None:
    alive = store()
    if alive is not None:
        alive.forget()


def _reads_direct(fd: int) -> bool:
    """Whether one aligned block can be read past the page cache; some systems accept the flag and fail here."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            os.preadv(fd, [block], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


