"""A complete store in the memory of this process: for simulations and examples, and as a short example of a store.

Each file is anonymous (memfd_create(2)), so the engine captures, digests, writes and reads as on a disk. A file costs
a descriptor, and is freed once it has no name and no job uses it. Nothing outlives the process.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from threading import RLock

from flowstone import _native
from flowstone.config import Direction, EngineOptions
from flowstone.errors import DamagedError, LockedError
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace
from flowstone.store.descriptors import Descriptors
from flowstone.store.jobs import GAP_BYTES, JobReading, JobWriting
from flowstone.store.os_errors import translated
from flowstone.store.settings import Settings, resolve
from flowstone.store.system import System


class _File:
    """An anonymous file; `number` is unique."""

    def __init__(self, number: int, path: str, size_bytes: int, content: bytes = b"") -> None:
        self.number, self.path, self.size_bytes = number, path, size_bytes
        self._fd = os.memfd_create("flowstone", os.MFD_CLOEXEC)
        self._owner = Descriptors()  # closes it
        self._owner.take(self._fd)
        if size_bytes:
            _native.reserve_file(self._fd, size_bytes)
        System().write(self._fd, content)

    def fit(self, size_bytes: int, header: bytes) -> None:
        """Give it another size, and its first bytes."""
        os.ftruncate(self._fd, size_bytes)
        os.pwrite(self._fd, header, 0)
        self.size_bytes = size_bytes

    def native(self) -> _native.File:
        return _native.File(fd=self._fd, path=self.path, alignment=1)

    def read(self, begin: int, end: int) -> bytes:
        parts = []
        while begin < end:
            parts.append(os.pread(self._fd, end - begin, begin))  # 2 GiB per call at most
            begin += len(parts[-1])
        return b"".join(parts)


@dataclass(slots=True, eq=False)
class Contents:
    """Content shared by stores that are open at once, as several processes share a directory."""

    files: dict[str, _File] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)
    guard: RLock = field(default_factory=RLock)
    writer: MemoryStore | None = None
    holder: str = ""


class MemoryStore:
    """See store.base.Store.

    contents       of another store, to open the same content again; None for a new store
    atomic_rename  False: act as an object store, with conditional put and without renaming directories
    """

    def __init__(
        self, contents: Contents | None = None, *, location: str | None = None, options: EngineOptions | None = None,
        atomic_rename: bool = True,
    ) -> None:
        self.contents = contents or Contents()
        self.options = replace(options or EngineOptions(), backend="posix", direct="off")
        self.location = location or f"memory-{secrets.token_hex(4)}"
        self._engines: dict[int, _native.Engine] = {}  # by the longest request
        self.capabilities = Capabilities(
            atomic_rename=atomic_rename, conditional_put=True, directory_sync=False, durable_on_return=True,
            range_reads=True, appends=False, direct=False, links=atomic_rename,
        )

    # Names

    def exists(self, path: str = "") -> bool:
        with self.contents.guard:
            return path in self.contents.files or path in self.contents.directories

    def is_link(self, path: str) -> bool:
        return False

    def names(self, path: str = "") -> tuple[str, ...]:
        with self.contents.guard:
            split = (entry.rpartition("/") for entry in (*self.contents.files, *self.contents.directories) if entry)
            return tuple(sorted(name for parent, _, name in split if parent == path))

    def size(self, path: str) -> int:
        with self._acting("stat", path):
            return self._file(path).size_bytes

    def stamp(self, path: str) -> str | None:
        with self.contents.guard:
            file = self.contents.files.get(path)
            return None if file is None else str(file.number)

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        with self._acting("read", path):
            file = self._file(path)
        if bytes_max is not None and file.size_bytes > bytes_max:
            raise DamagedError(
                f"{self.location}/{path} is too long", expected=f"at most {bytes_max} bytes",
                found=f"{file.size_bytes} bytes", next="restore the file from a copy, or use an older step",
            )
        end = file.size_bytes if length is None else min(file.size_bytes, offset + length)
        return file.read(offset, end)

    def make_directory(self, path: str = "") -> None:
        with self._acting("mkdir", path):
            if path:
                self._check_free(path)
            self.contents.directories.add(path)

    def remove(self, path: str) -> None:
        with self._acting("remove", path):
            if self.names(path):
                raise OSError(errno.ENOTEMPTY, "a directory with entries")
            if path in self.contents.directories:
                self.contents.directories.remove(path)
            else:
                self._file(path)
                del self.contents.files[path]

    # Commit

    def put(self, path: str, data: bytes) -> None:
        self._create("write", path, len(data), data)

    def rename(self, source: str, target: str) -> None:
        with self._acting("rename", source):
            self._check_free(target)
            files, directories = self.contents.files, self.contents.directories
            if source not in directories:
                files[target] = self._file(source)
                del files[source]
                return
            if not self.capabilities.atomic_rename:
                raise OSError(errno.EOPNOTSUPP, "a directory")
            for entry in [entry for entry in files if entry.startswith(f"{source}/")]:
                files[target + entry.removeprefix(source)] = files.pop(entry)
            for entry in [entry for entry in directories if f"{entry}/".startswith(f"{source}/")]:
                directories.remove(entry)
                directories.add(target + entry.removeprefix(source))

    def link(self, source: str, target: str) -> None:
        with self._acting("link", source):
            self._check_free(target)
            self.contents.files[target] = self._file(source)

    def sync_directory(self, path: str = "") -> None:
        with self._acting("fsync", path):
            if path not in self.contents.directories:
                raise OSError(errno.ENOENT, "no such directory")

    # Lock

    def lock(self, holder: str) -> None:
        with self.contents.guard:
            if self.contents.writer not in (None, self):
                raise LockedError(
                    f"cannot save into {self.location}: it is locked", holder=self.contents.holder,
                    next="close the other Checkpointer first, or save into another store",
                )
            self.contents.writer, self.contents.holder = self, holder

    def check_lock(self) -> None:
        with self.contents.guard:
            if self.contents.writer is not self:
                raise LockedError(
                    f"this job has lost the lock of {self.location}", found=self.contents.holder or "no holder",
                    next="stop the other job that writes there; the next save takes the lock again",
                )

    def unlock(self) -> None:
        with self.contents.guard:
            if self.contents.writer is self:
                self.contents.writer, self.contents.holder = None, ""

    # Bulk bytes

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def settings(self, direction: Direction) -> Settings:
        return resolve(direction, self.options, None)

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,  # the memory is allocated here in any case
    ) -> JobWriting:
        made = [self._create("create", plan.path, plan.bytes) for plan in files]
        settings, engine = self.settings("write"), self._engine(arena)
        job = engine.write(
            arena, [(file.native(), file.size_bytes) for file in made], rows, gap_bytes=GAP_BYTES,
            blocks=pace.blocks, bytes_per_s=pace.bytes_per_s or 0, cap_bytes_per_s=pace.cap or 0,
            watch=self.options.watch,
        )

        def fit(sizes: Sequence[int]) -> None:
            for file, plan, size in zip(made, files, sizes, strict=True):
                if plan.header is not None:
                    file.fit(size, plan.header(size))

        return JobWriting(Path(self.location), job, settings, self.options.watch, files, fit)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReading:
        files: dict[int, _File] = {}
        for number in chain.from_iterable(rows.file_groups):
            with self._acting("open", paths[number]):
                files[number] = self._file(paths[number])
        natives = [files[number].native() if number in files else None for number in range(len(paths))]
        tuning = self.settings("read").tuning
        job = self._engine(arena).read(
            arena, natives, rows, stop_at_bad=stop_at_bad, in_place=tuning.in_place, request_bytes=tuning.request_bytes,
            ahead=ahead,
        )
        return JobReading(Path(self.location), job, files)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return False

    def close(self) -> None:
        """Stop the engines and release the lock. The contents stay, for a store that is opened with them."""
        with self.contents.guard:
            engines, self._engines = tuple(self._engines.values()), {}
        for engine in engines:
            engine.close()
        self.unlock()

    def _engine(self, arena: _native.Arena) -> _native.Engine:
        tuning = self.settings("write").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        with self._acting("start the engine for", ""):
            if request_bytes not in self._engines:
                self._engines[request_bytes] = _native.Engine(
                    backend="posix", queue_depth=tuning.queue_depth, request_bytes=request_bytes,
                    workers=tuning.workers, background=True,
                )
            return self._engines[request_bytes]

    def _create(self, operation: str, path: str, size_bytes: int, content: bytes = b"") -> _File:
        with self._acting(operation, path, size_bytes):
            self._check_free(path)
            file = _File(next(self.contents.numbers), f"{self.location}/{path}", size_bytes, content)
            self.contents.files[path] = file
            return file

    def _file(self, path: str) -> _File:
        if path in self.contents.directories:
            raise OSError(errno.EISDIR, "a directory")
        if path not in self.contents.files:
            raise OSError(errno.ENOENT, "no such file")
        return self.contents.files[path]

    def _check_free(self, path: str) -> None:
        if path.rpartition("/")[0] not in self.contents.directories:
            raise OSError(errno.ENOENT, "no such directory")
        if self.exists(path):
            raise OSError(errno.EEXIST, "a name that is taken")

    @contextmanager
    def _acting(self, operation: str, path: str, needed_bytes: int | None = None) -> Iterator[None]:
        with translated(Path(self.location), operation, path, needed_bytes=needed_bytes), self.contents.guard:
            yield
