"""A store in a directory of a POSIX file system. The native engine reads and writes its segments."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from flowstone.config import BLOCK_BYTES, Direction, EngineOptions
from flowstone.errors import DamagedError
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace
from flowstone.store.descriptors import Descriptors
from flowstone.store.directories import directory, entry_exists, is_link, parent
from flowstone.store.engines import EngineChoice, open_file
from flowstone.store.forks import forget_in_children
from flowstone.store.lock import WriterLock
from flowstone.store.os_errors import translated
from flowstone.store.settings import Settings
from flowstone.store.system import System

if TYPE_CHECKING:
    from flowstone._native import Arena, ReadExtents, WriteExtents
    from flowstone.store.appendable import AppendFile
    from flowstone.store.local_io import LocalReadHandle, LocalWriteHandle
    from flowstone.store.local_segments import LocalOpenExtents, LocalOpenSegments
    from flowstone.store.striped.stripe_member import FailoverLimits

_CAPABILITIES = Capabilities(
    atomic_rename=True, conditional_put=False, directory_sync=True, durable_on_return=False, range_reads=True,
    appends=True, direct=True, links=True, parts=True,
)


class LocalStore:
    """See store.base.Store. Creates and probes nothing before the first write.

    system  the system calls that change the disk; tests replace them by a simulation
    """

    def __init__(
        self, root: str | os.PathLike[str], options: EngineOptions | None = None, system: System | None = None
    ) -> None:
        self.root = Path(root).absolute()
        self.system = system or System()
        self._engines = EngineChoice(self.root, options or EngineOptions())
        self._lock = WriterLock(self.root, self.system)
        forget_in_children(self)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        return str(self.root)

    # Names and small files

    def exists(self, path: str = "") -> bool:
        with self._translated("look for", path):
            return entry_exists(self.root / path, follow=not path)

    def is_link(self, path: str) -> bool:
        with self._translated("look at", path):
            return is_link(self.root / path)

    def names(self, path: str = "") -> tuple[str, ...]:
        with self._translated("list", path):
            try:
                return tuple(sorted(os.listdir(self.root / path)))
            except FileNotFoundError:
                return ()

    def size(self, path: str) -> int:
        with self._translated("stat", path):
            status = os.stat(self.root / path, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):  # the error of `read`, instead of the one for a file of another size
                raise OSError(errno.ELOOP, "the file is a symbolic link")
            return status.st_size

    def stamp(self, path: str) -> str | None:
        with self._translated("stat", path):
            try:
                status = os.stat(self.root / path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return f"{status.st_dev}/{status.st_ino}/{status.st_size}/{status.st_mtime_ns}/{status.st_ctime_ns}"

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        opened = Descriptors()
        with self._translated("read", path):
            try:
                file = FileIO(open_file(self.root / path, opened), closefd=False)
                size = os.fstat(file.fileno()).st_size
                if bytes_max is not None and size > bytes_max:
                    raise DamagedError(
                        f"{self.root / path} is too long", expected=f"at most {bytes_max} bytes",
                        found=f"{size} bytes", next="restore the file from a copy, or use an older step",
                    )
                if offset:
                    file.seek(offset)
                rest = max(0, size - offset)
                # Read no more than the file has: Python allocates the requested length before it reads.
                return _read_all(file, rest if length is None else min(length, rest))
            finally:
                opened.close()

    def make_directory(self, path: str = "") -> None:
        with self._translated("mkdir", path):
            if path:
                with parent(self.root, path) as dir_fd:
                    self.system.make_directory(self.root / path, dir_fd)
                return
            ancestors = (self.root, *self.root.parents)
            missing = [ancestor for ancestor in ancestors if not entry_exists(ancestor, follow=True)]
            for ancestor in reversed(missing):
                try:
                    self.system.make_directory(ancestor)
                except FileExistsError:
                    if not ancestor.is_dir():
                        raise  # if the directory exists now, another rank has created it meanwhile
            self._sync_ancestors()

    def _sync_ancestors(self) -> None:
        """Sync all directories above the root, even if they existed: the process that created them may have died before
        its sync.
        """
        device = os.stat(self.root).st_dev
        for ancestor in self.root.parents:
            if os.stat(ancestor).st_dev != device:
                return  # a mount point has existed before this job, so its name is durable
            try:
                self.system.sync_directory(ancestor)
            except PermissionError:
                return  # no job of this user has created a directory that this user cannot open

    def sync_directory(self, path: str = "") -> None:
        with self._translated("fsync", path), directory(self.root, path) as fd:
            self.system.sync_directory(self.root / path, fd)

    def put(self, path: str, data: bytes) -> None:
        with self._translated("write", path, needed_bytes=len(data)), parent(self.root, path) as dir_fd:
            fd = self.system.create(self.root / path, os.O_WRONLY | os.O_EXCL, dir_fd)
            try:
                self.system.write(fd, data)
                self.system.sync(fd)
            finally:
                os.close(fd)

    def rename(self, source: str, target: str) -> None:
        with (
            self._translated("rename", source),
            parent(self.root, source) as source_fd, parent(self.root, target) as target_fd,
        ):
            if entry_exists(self.root / target):
                raise FileExistsError(errno.EEXIST, f"{target} exists already")
            self.system.rename(self.root / source, self.root / target, source_fd, target_fd)

    def link(self, source: str, target: str) -> None:
        with (
            self._translated("link", source),
            parent(self.root, source) as source_fd, parent(self.root, target) as target_fd,
        ):
            self.system.link(self.root / source, self.root / target, source_fd, target_fd)

    def replace(self, source: str, target: str, aside: str) -> str | None:
        """Rename the directory `source` to `target`, even if `target` exists. All names are in the store's root
        directory.

        returns  the new name of the old `target`; None if it did not exist or was an empty directory

        Atomic if the file system can exchange names. Otherwise the old `target` is first renamed to `aside`, and a
        crash may leave no directory at `target`.
        """
        with self._translated("rename", source), directory(self.root) as dir_fd:
            if not entry_exists(self.root / target) or not os.listdir(self.root / target):
                # A rename replaces an empty directory atomically, so the name is never free in between.
                self.system.rename(self.root / source, self.root / target, dir_fd, dir_fd)
                return None
            try:
                self.system.exchange(self.root / source, self.root / target, dir_fd)
                return source
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                    raise
            self.system.rename(self.root / target, self.root / aside, dir_fd, dir_fd)
            self.system.rename(self.root / source, self.root / target, dir_fd, dir_fd)
            return aside

    def remove(self, path: str) -> None:
        with self._translated("remove", path), parent(self.root, path) as dir_fd:
            name = path.rpartition("/")[2]
            if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
                self.system.remove_directory(self.root / path, dir_fd)
            else:
                self.system.unlink(self.root / path, dir_fd)

    def free_bytes(self) -> int:
        with self._translated("statvfs", ""):
            # When a striped store is saved to for the first time, its further paths do not exist yet.
            existing = next((path for path in (self.root, *self.root.parents) if path.exists()), self.root)
            return shutil.disk_usage(existing).free

    # The writer lock

    def lock(self, holder: str) -> None:
        self._lock.acquire(holder)

    def check_lock(self) -> None:
        self._lock.check()

    def unlock(self) -> None:
        self._lock.release()

    # Bulk bytes

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> LocalWriteHandle:
        from flowstone.store.local_io import LocalWriteHandle  # imported here: it needs numpy, which a listing does not

        return LocalWriteHandle(self.system, self._engines, files, rows, arena, pace, reserved=reserved)

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> LocalReadHandle:
        from flowstone.store.local_io import LocalReadHandle  # imported here: it needs numpy

        settings = self._engines.settings("read")
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        return LocalReadHandle(self._engines, paths, rows, arena, direct=direct, stop_at_bad=stop_at_bad, ahead=ahead)

    def open_segments(
        self, files: Sequence[FilePlan], arena: Arena, *, of_path: int, moving: FailoverLimits | None
    ) -> LocalOpenSegments:
        from flowstone.store.local_segments import (  # imported here: only striped stores need it
            LocalOpenSegments,
            LocalSegments,
        )

        direct = self._engines.settings("write").direct_at(sum(file.bytes for file in files))
        segments = LocalSegments(self.system, self._engines, files, direct)
        try:
            running = self._engines.running("write", arena.block_bytes)
            return LocalOpenSegments(segments, running.engine, of_path=of_path, may_move=moving is not None)
        except BaseException:
            segments.close()
            raise

    def open_extents(
        self, paths: Sequence[str], arena: Arena, *, of_path: int, wanted_bytes: int, past_cache: bool  # noqa: ARG002
    ) -> LocalOpenExtents:
        from flowstone.store.local_segments import LocalOpenExtents  # imported here: only striped stores need it

        settings = self._engines.settings("read")
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        return LocalOpenExtents(self._engines, paths, direct, self._engines.running("read").engine, of_path=of_path)

    def append_to_new(self, path: str) -> AppendFile:
        from flowstone.store.local_append import LocalAppendFile  # imported here: only journals need it

        return LocalAppendFile(self.root, self.system, self._engines, path)

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        """See store.appendable.AppendableStore. Reads past the page cache where that works."""
        opened = Descriptors()
        with self._translated("read", path):
            try:
                fd, _ = self._engines.open_to_read(self.root / path, self._engines.options.direct, opened)
                done = 0
                while done < len(target):
                    count = os.preadv(fd, [target[done:]], offset_bytes + done)
                    done += count
                    if not count or count % BLOCK_BYTES:
                        break
                return done
            finally:
                opened.close()

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        direct = self._engines.settings("read").direct_at(wanted_bytes)
        if direct == "off":
            return False
        opened = Descriptors()
        with self._translated("open", path):
            try:
                _, alignment = self._engines.open_to_read(self.root / path, direct, opened)
            finally:
                opened.close()
        return alignment > 1

    def close(self) -> None:
        """Stop the engines, and release the lock."""
        self._engines.close()
        self.unlock()

    def forget(self) -> None:
        """Called in a forked child: drop engines and lock without releasing them, as both belong to the parent."""
        self._engines.forget()
        self.unlock()

    @property
    def options(self) -> EngineOptions:
        return self._engines.options

    def settings(self, direction: Direction) -> Settings:
        return self._engines.settings(direction)

    def backend(self) -> str:
        """The name of the engine for writes, "io_uring" or "posix". Starts the engine."""
        return self._engines.running("write").engine.backend

    def _translated(
        self, operation: str, path: str, *, needed_bytes: int | None = None
    ) -> AbstractContextManager[None]:
        return translated(self.root, operation, path, needed_bytes=needed_bytes)


def _read_all(file: FileIO, length: int) -> bytes:
    """The next `length` bytes, fewer only if the file ends before them."""
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
