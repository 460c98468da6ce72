"""A store in a directory of a POSIX file system; bulk bytes go through the native engine."""

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

from flowstone.config import Direction, EngineOptions
from flowstone.errors import DamagedError
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace
from flowstone.store.descriptors import Descriptors
from flowstone.store.directories import directory, is_link, is_there, parent
from flowstone.store.engines import EngineChoice, open_file
from flowstone.store.forks import forget_in_children
from flowstone.store.lock import WriterLock
from flowstone.store.os_errors import translated
from flowstone.store.settings import Settings
from flowstone.store.system import System

if TYPE_CHECKING:
    from flowstone import _native
    from flowstone.store.appending import LocalAppending
    from flowstone.store.local_io import LocalReading, LocalWriting
    from flowstone.store.local_segments import LocalExtents, LocalPart
    from flowstone.store.parts import Moving

_CAPABILITIES = Capabilities(
    atomic_rename=True, conditional_put=False, directory_sync=True, durable_on_return=False, range_reads=True,
    appends=True, direct=True, links=True, parts=True,
)


class LocalStore:
    """See store.base.Store. Creates and probes nothing before the first write.

    system  the calls that change the disk; tests put a simulation there
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
            return is_there(self.root / path, follow=not path)

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
            found = os.stat(self.root / path, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):  # refuse it as `read` does, rather than as a file of another size
                raise OSError(errno.ELOOP, "a symbolic link")
            return found.st_size

    def stamp(self, path: str) -> str | None:
        with self._translated("stat", path):
            try:
                found = os.stat(self.root / path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return f"{found.st_dev}/{found.st_ino}/{found.st_size}/{found.st_mtime_ns}/{found.st_ctime_ns}"

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
                # Read no more than the file has: Python allocates the requested length before the first byte arrives.
                return _read_all(file, rest if length is None else min(length, rest))
            finally:
                opened.close()

    def make_directory(self, path: str = "") -> None:
        with self._translated("mkdir", path):
            if path:
                with parent(self.root, path) as at:
                    self.system.make_directory(self.root / path, at)
                return
            missing = [at for at in (self.root, *self.root.parents) if not is_there(at, follow=True)]
            for above in reversed(missing):
                try:
                    self.system.make_directory(above)
                except FileExistsError:
                    if not above.is_dir():
                        raise  # else another rank has made it meanwhile
            self._sync_way_to_root()

    def _sync_way_to_root(self) -> None:
        """Sync the entries that lead to the root, existing ones too: their creator may have died before its sync."""
        device = os.stat(self.root).st_dev
        for at in self.root.parents:
            if os.stat(at).st_dev != device:
                return  # a mount point existed before us
            try:
                self.system.sync_directory(at)
            except PermissionError:
                return  # safe: a job of ours cannot have created a directory that we cannot open

    def sync_directory(self, path: str = "") -> None:
        with self._translated("fsync", path), directory(self.root, path) as fd:
            self.system.sync_directory(self.root / path, fd)

    def put(self, path: str, data: bytes) -> None:
        with self._translated("write", path, needed_bytes=len(data)), parent(self.root, path) as at:
            fd = self.system.create(self.root / path, os.O_WRONLY | os.O_EXCL, at)
            try:
                self.system.write(fd, data)
                self.system.sync(fd)
            finally:
                os.close(fd)

    def rename(self, source: str, target: str) -> None:
        with (
            self._translated("rename", source), parent(self.root, source) as at, parent(self.root, target) as target_at,
        ):
            if is_there(self.root / target):
                raise FileExistsError(errno.EEXIST, f"{target} exists")
            self.system.rename(self.root / source, self.root / target, at, target_at)

    def link(self, source: str, target: str) -> None:
        with (
            self._translated("link", source), parent(self.root, source) as at, parent(self.root, target) as target_at,
        ):
            self.system.link(self.root / source, self.root / target, at, target_at)

    def replace(self, source: str, target: str, aside: str) -> str | None:
        """Give the directory `source` the name `target`, whichever has it. All lie in the store's own directory.

        returns  the name that has now what was at `target`; None where nothing was, or an empty directory

        At once where the file system exchanges names. Elsewhere what was at `target` is called `aside` first, and a
        crash may leave it so, with nothing at `target`.
        """
        with self._translated("rename", source), directory(self.root) as at:
            if not is_there(self.root / target) or not os.listdir(self.root / target):
                # An empty directory gives way at once: it keeps a name that must not be free in between.
                self.system.rename(self.root / source, self.root / target, at, at)
                return None
            try:
                self.system.exchange(self.root / source, self.root / target, at)
                return source
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                    raise
            self.system.rename(self.root / target, self.root / aside, at, at)
            self.system.rename(self.root / source, self.root / target, at, at)
            return aside

    def remove(self, path: str) -> None:
        with self._translated("remove", path), parent(self.root, path) as at:
            name = path.rpartition("/")[2]
            if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                self.system.remove_directory(self.root / path, at)
            else:
                self.system.unlink(self.root / path, at)

    def free_bytes(self) -> int:
        with self._translated("statvfs", ""):
            # A further path of a striped store is made by its first save.
            there = next((at for at in (self.root, *self.root.parents) if at.exists()), self.root)
            return shutil.disk_usage(there).free

    # The writer lock

    def lock(self, holder: str) -> None:
        self._lock.take(holder)

    def check_lock(self) -> None:
        self._lock.check()

    def unlock(self) -> None:
        self._lock.release()

    # Bulk bytes

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> LocalWriting:
        from flowstone.store.local_io import LocalWriting  # imported here: it needs numpy, which a listing does not

        return LocalWriting(self.system, self._engines, files, rows, arena, pace, reserved=reserved)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> LocalReading:
        from flowstone.store.local_io import LocalReading  # as above

        settings = self._engines.settings("read")
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        return LocalReading(self._engines, paths, rows, arena, direct=direct, stop_at_bad=stop_at_bad, ahead=ahead)

    def open_segments(
        self, files: Sequence[FilePlan], arena: _native.Arena, *, of_path: int, moving: Moving | None
    ) -> LocalPart:
        from flowstone.store.local_segments import (  # imported here: only striped stores need it
            LocalPart,
            LocalSegments,
        )

        direct = self._engines.settings("write").direct_at(sum(file.bytes for file in files))
        segments = LocalSegments(self.system, self._engines, files, direct)
        try:
            running = self._engines.running("write", arena.block_bytes)
            return LocalPart(segments, running.engine, of_path=of_path, may_move=moving is not None)
        except BaseException:
            segments.close()
            raise

    def open_extents(
        self, paths: Sequence[str], arena: _native.Arena, *, of_path: int, wanted_bytes: int, past_cache: bool  # noqa: ARG002
    ) -> LocalExtents:
        from flowstone.store.local_segments import LocalExtents  # as above

        settings = self._engines.settings("read")
        direct = settings.direct if past_cache else settings.direct_at(wanted_bytes)
        return LocalExtents(self._engines, paths, direct, self._engines.running("read").engine, of_path=of_path)

    def append_to_new(self, path: str) -> LocalAppending:
        from flowstone.store.appending import LocalAppending  # imported here: only journals need it

        return LocalAppending(self.root, self.system, self._engines, path)

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        from flowstone.store.appending import read_past_cache  # as above

        return read_past_cache(self.root, self._engines, path, offset_bytes, target)

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
        """Stop the engines and release the lock."""
        self._engines.close()
        self.unlock()

    def forget(self) -> None:
        """In a forked child: the threads are gone and the lock is the parent's; drop both, release neither."""
        self._engines.forget()
        self.unlock()

    @property
    def options(self) -> EngineOptions:
        return self._engines.options

    def settings(self, direction: Direction) -> Settings:
        return self._engines.settings(direction)

    def backend(self) -> str:
        """The engine for writes, "io_uring" or "posix"; starts it."""
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
