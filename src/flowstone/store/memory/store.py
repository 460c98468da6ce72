"""Stores whose files are anonymous memory (memfd_create(2)); `MemoryStore` is in the memory of this process.

The engine captures (copies) a state into the mapped memory of files, computes digests there, and copies from there in a
load. A `MemoryTree` has the names of the files: in this process, for simulations and examples, or in the node's memory
agent (store/memory/node_memory.py).
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from threading import Lock, RLock
from typing import Protocol

import msgspec

from flowstone import _native
from flowstone.config import MIB, READ_WORKERS_IN_MEMORY, Direction, EngineOptions
from flowstone.errors import DamagedError, FlowstoneError, LockedError, StorageError
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace, Receipt
from flowstone.store.holders import acquire_with_grace, describe_holder, holder_name, holder_note
from flowstone.store.jobs import GAP_BYTES, JobReadHandle, JobWriteHandle
from flowstone.store.memory.contents import MemoryDirectory, MemoryFile, new_memory
from flowstone.store.os_errors import translated
from flowstone.store.settings import Settings, resolve
from flowstone.store.system import System

_SPARE_PART_BYTES = 64 * MIB  # bytes allocated at once: allocating new memory of this size takes about 0.1 s


class MemoryTree(Protocol):
    """The names of files in memory, and the files. Can be used on any thread. Failures raise OSError or a
    FlowstoneError.
    """

    def hold(self) -> AbstractContextManager[object]:
        """A context for several calls that belong together. No other thread uses the tree meanwhile."""

    def exists(self, path: str) -> bool: ...
    def names(self, path: str) -> tuple[str, ...]: ...
    def stat(self, path: str) -> tuple[int, int]:
        """The number of a file, and its size in bytes."""

    def open(self, path: str) -> MemoryFile:
        """Open a file to read. Its memory does not change as long as the result exists, even if the file is removed."""

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        """Create a file to write. It may get the memory of a removed file, with the old content."""

    def spare(self, files: Sequence[MemoryFile]) -> Sequence[MemoryFile]:
        """If there are too few spare files for the next write, create more with the sizes of `files`. They have no
        memory yet. Can be called on any thread.
        """

    def put(self, path: str, content: bytes) -> None: ...
    def resize(self, file: MemoryFile, size_bytes: int) -> None:
        """Give a new file another size."""

    def make_directory(self, path: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def rename(self, source: str, target: str, *, directories: bool) -> None: ...
    def link(self, source: str, target: str) -> None: ...
    def lock(self, holder: str) -> str | None:
        """Take the lock. Returns None if this process has it now, or the note (store/holders.py) of another holder."""

    def lost_lock(self) -> str | None:
        """Why this tree no longer holds the lock: the other holder's note, or how the lock was lost. None if it holds
        the lock.
        """

    def unlock(self) -> None: ...
    def free_bytes(self) -> int: ...
    def close(self) -> None: ...


class StoreInMemory:
    """A store of files in memory. See store.base.Store. A subclass provides its `tree`."""

    def __init__(
        self, tree: MemoryTree, location: str, options: EngineOptions | None, capabilities: Capabilities
    ) -> None:
        self.options = replace(options or EngineOptions(), backend="posix", direct="off")
        self.location, self.capabilities = location, capabilities
        self._tree = tree
        self._is_closed = False
        # (longest request in bytes, number of workers) -> engine
        self._engines: dict[tuple[int, int], _native.Engine] = {}
        self._starting = Lock()  # held while an engine is started

    # Names

    def exists(self, path: str = "") -> bool:
        with self._acting("look for", path):
            return self._tree.exists(path)

    def is_link(self, path: str) -> bool:
        return False

    def names(self, path: str = "") -> tuple[str, ...]:
        with self._acting("list", path):
            return self._tree.names(path)

    def size(self, path: str) -> int:
        with self._acting("stat", path):
            return self._tree.stat(path)[1]

    def stamp(self, path: str) -> str | None:
        with self._acting("stat", path):
            try:
                return str(self._tree.stat(path)[0])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EISDIR):
                    return None
                raise

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        with self._acting("read", path):
            file = self._tree.open(path)
        if bytes_max is not None and file.size_bytes > bytes_max:
            raise DamagedError(
                f"{self.location}/{path} is too long", expected=f"at most {bytes_max} bytes",
                found=f"{file.size_bytes} bytes", next="restore the file from a copy, or use an older step",
            )
        end = file.size_bytes if length is None else min(file.size_bytes, offset + length)
        return file.read(offset, end)

    def make_directory(self, path: str = "") -> None:
        with self._acting("mkdir", path):
            self._tree.make_directory(path)

    def remove(self, path: str) -> None:
        with self._acting("remove", path):
            self._tree.remove(path)

    # Commit

    def put(self, path: str, data: bytes) -> None:
        with self._acting("write", path, len(data)):
            self._tree.put(path, data)

    def rename(self, source: str, target: str) -> None:
        with self._acting("rename", source):
            self._tree.rename(source, target, directories=self.capabilities.atomic_rename)

    def link(self, source: str, target: str) -> None:
        with self._acting("link", source):
            self._tree.link(source, target)

    def sync_directory(self, path: str = "") -> None:
        with self._acting("fsync", path):
            if not self._tree.exists(path):
                raise OSError(errno.ENOENT, "no such directory")

    # Lock

    def lock(self, holder: str) -> None:
        other = acquire_with_grace(lambda: self._tree.lock(holder_note(holder)), self.location)
        if other is not None:
            raise LockedError(
                f"cannot save into {self.location}: another Checkpointer has locked it", holder=holder_name(other),
                found=describe_holder(other),
                next="close the other Checkpointer first, or save into another store",
            )

    def check_lock(self) -> None:
        holder = self._tree.lost_lock()
        if holder is not None:
            raise LockedError(
                f"this job has lost the lock of {self.location}", found=holder_name(holder),
                next="stop the other job that writes there; the next save takes the lock again",
            )

    def unlock(self) -> None:
        self._tree.unlock()

    # Bulk bytes

    def free_bytes(self) -> int:
        with self._acting("ask for memory of", ""):
            return self._tree.free_bytes()

    def settings(self, direction: Direction) -> Settings:
        return resolve(direction, self.options, None)

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> MemoryWriteHandle:
        made = []
        for plan in files:
            with self._acting("create", plan.path, plan.bytes):
                made.append(self._tree.create(plan.path, plan.bytes))
        fresh = [file for file in made if file.touched_bytes < file.size_bytes]

        def allocate() -> None:
            for file in fresh:
                with self._acting("allocate", file.path, file.size_bytes):
                    file.allocate()

        if reserved:
            allocate()
        with self._acting("begin to write into", ""):
            natives = [(native_file(file, writable=True), plan.bytes) for file, plan in zip(made, files, strict=True)]
        job = self._engine(arena, self.settings("write").tuning.workers).write(
            arena, natives, rows, _native.WriteOptions(
                gap_bytes=GAP_BYTES, blocks=pace.blocks, bytes_per_s=pace.bytes_per_s or 0,
                cap_bytes_per_s=pace.cap or 0, watch=self.options.watch, files_ready=reserved or not fresh,
            ),
        )
        later = None if reserved or not fresh else allocate
        return MemoryWriteHandle(self, _SegmentFiles(made, files), job, later)

    def allocate_spare(self, files: Sequence[MemoryFile]) -> None:
        """Allocate memory for the next write of files like these in advance, since allocating memory takes longer than
        filling it.

        Returns early if the store is closed or the system refuses. In that case the next write allocates the memory.
        """
        with suppress(StorageError, OSError):
            with self._acting("allocate", ""):
                spare = self._tree.spare(files)
            for file in spare:
                for begin in range(0, file.size_bytes, _SPARE_PART_BYTES):
                    if self._is_closed:
                        return
                    _native.reserve_memory(file.fd, begin, min(begin + _SPARE_PART_BYTES, file.size_bytes))

    def replicate(
        self, files: Sequence[tuple[str, MemoryFile]], job: _native.WriteJob
    ) -> FlowstoneError | None:
        """Called once `files` are written; a subclass makes copies elsewhere. Returns an error if there are fewer
        copies than the store promises.
        """
        return None

    def set_final_sizes(self, written: _SegmentFiles, sizes: Sequence[int]) -> None:
        """Set the sizes of written files whose size an encoder has decided, and write their headers."""
        for file, plan, size in zip(written.files, written.plans, sizes, strict=True):
            if plan.header is not None:
                with self._acting("write", plan.path, size):
                    self._tree.resize(file, size)
                    os.pwrite(file.fd, plan.header(size), 0)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReadHandle:
        files: dict[int, MemoryFile] = {}
        for number in chain.from_iterable(rows.file_groups):
            with self._acting("open", paths[number]):
                files[number] = self._tree.open(paths[number])
        natives = [native_file(files[index], writable=False) if index in files else None for index in range(len(paths))]
        tuning = self.settings("read").tuning
        job = self._engine(arena, self._read_workers).read(
            arena, natives, rows, _native.ReadOptions(
                stop_at_bad=stop_at_bad, in_place=tuning.in_place, request_bytes=tuning.request_bytes, ahead=ahead
            ),
        )
        return JobReadHandle(Path(self.location), job, files)

    def snapshot(self, directory: str) -> MemoryStore:
        """A read-only store with the files that the directory has now. Later changes of their names do not affect it.
        """
        contents = SharedMemoryDirectory()
        contents.directories |= {"", directory}
        with self._acting("open", directory):
            for name in self._tree.names(directory):
                contents.files[f"{directory}/{name}"] = self._tree.open(f"{directory}/{name}")
        return MemoryStore(contents, location=self.location, options=self.options)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return False

    def close(self) -> None:
        """Stop the engines, and release the lock. The files stay in memory."""
        self._is_closed = True
        with self._starting:
            engines, self._engines = tuple(self._engines.values()), {}
        for engine in engines:
            engine.close()
        self._tree.close()

    @property
    def _read_workers(self) -> int:
        """The number of threads for loads. It is larger than for saves, as no training runs during a load."""
        settings = self.settings("read")
        return settings.tuning.workers if "workers" in settings.explicit else READ_WORKERS_IN_MEMORY

    def _engine(self, arena: _native.Arena, workers: int) -> _native.Engine:
        tuning = self.settings("write").tuning
        asked_for = min(tuning.request_bytes, arena.block_bytes), workers
        with translated(Path(self.location), "start the engine for", ""), self._starting:
            if asked_for not in self._engines:
                self._engines[asked_for] = _native.Engine(
                    backend="posix", queue_depth=tuning.queue_depth, request_bytes=asked_for[0], workers=workers,
                    background=True,
                )
            return self._engines[asked_for]

    @contextmanager
    def _acting(self, operation: str, path: str, needed_bytes: int | None = None) -> Iterator[None]:
        with translated(Path(self.location), operation, path, needed_bytes=needed_bytes), self._tree.hold():
            yield


def native_file(file: MemoryFile, *, writable: bool) -> _native.File:
    """The file, mapped into this process' memory, as an object of the native engine."""
    return _native.File(fd=file.fd, path=file.path, alignment=1, mapping=file.mapped(writable=writable))


class _SegmentFiles(msgspec.Struct, frozen=True, eq=False):
    """The files of one write, and the plan of each."""

    files: Sequence[MemoryFile]
    plans: Sequence[FilePlan]


class MemoryWriteHandle(JobWriteHandle):
    """The write of segments that are captured directly into the memory of their files.

    allocate  allocates the files' memory; None: they already have memory
    """

    def __init__(
        self, store: StoreInMemory, written: _SegmentFiles, job: _native.WriteJob, allocate: Callable[[], None] | None
    ) -> None:
        super().__init__(
            Path(store.location), job, store.settings("write"), store.options.watch, written.plans,
            lambda sizes: store.set_final_sizes(written, sizes),
        )
        self._store, self._written = store, written
        self._allocate = allocate
        self._allocating = Lock()  # guards the attributes above
        self._refusal: BaseException | None = None

    def reserve(self) -> None:
        if self._allocating.acquire(blocking=False):  # otherwise another thread is allocating
            try:
                is_new = self._allocate is not None
                self._allocate_once()
            finally:
                self._allocating.release()
            if is_new and self._refusal is None:
                self._store.allocate_spare(self._written.files)

    def _allocate_once(self) -> None:
        """Allocate the files' memory, unless this was already done. If the allocation fails, this write is cancelled,
        and `receipt` reports the error. The caller holds the lock.
        """
        allocate, self._allocate = self._allocate, None
        if allocate is None or self._job.cancelled or self._job.fault is not None:
            return
        try:
            allocate()
        except BaseException as error:
            self._refusal = error
            self._job.cancel()
        else:
            self._job.files_ready()

    def receipt(self) -> Receipt:
        with self._allocating:
            self._allocate_once()
        receipt = super().receipt()
        if receipt.error is None:
            paths = (plan.path for plan in self._written.plans)
            error = self._store.replicate(list(zip(paths, self._written.files, strict=True)), self._job)
            return receipt if error is None else msgspec.structs.replace(receipt, error=error)
        if self._refusal is None:
            return receipt
        if not isinstance(self._refusal, FlowstoneError):
            raise self._refusal
        return msgspec.structs.replace(receipt, error=self._refusal)


class SharedMemoryDirectory(MemoryDirectory):
    """Directories and files that several open stores of this process share, as several processes share a directory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count()
        self.guard = RLock()


class OwnTree:
    """Names and files in the memory of this process. See MemoryTree."""

    def __init__(self, contents: SharedMemoryDirectory, location: str) -> None:
        self._contents, self._location = contents, location

    def hold(self) -> AbstractContextManager[object]:
        return self._contents.guard

    def exists(self, path: str) -> bool:
        return self._contents.exists(path)

    def names(self, path: str) -> tuple[str, ...]:
        return self._contents.names(path)

    def stat(self, path: str) -> tuple[int, int]:
        file = self._contents.file(path)
        return file.number, file.size_bytes

    def open(self, path: str) -> MemoryFile:
        return self._contents.file(path)

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        self._contents.check_free(path)
        file = MemoryFile(
            next(self._contents.numbers), new_memory("flowstone"), size_bytes, path=f"{self._location}/{path}"
        )
        file.allocate()
        self._contents.add(path, file)
        return file

    def spare(self, files: Sequence[MemoryFile]) -> Sequence[MemoryFile]:
        return ()

    def put(self, path: str, content: bytes) -> None:
        System().write(self.create(path, len(content)).fd, content)

    def resize(self, file: MemoryFile, size_bytes: int) -> None:
        file.resize(size_bytes)

    def make_directory(self, path: str) -> None:
        self._contents.make_directory(path)

    def remove(self, path: str) -> None:
        self._contents.remove(path)

    def rename(self, source: str, target: str, *, directories: bool) -> None:
        self._contents.rename(source, target, directories=directories)

    def link(self, source: str, target: str) -> None:
        self._contents.link(source, target)

    def lock(self, holder: str) -> str | None:
        with self._contents.guard:
            return None if self._contents.lock(self, holder) else self._contents.holder

    def lost_lock(self) -> str | None:
        with self._contents.guard:
            return None if self._contents.writer is self else self._contents.holder or "no holder"

    def unlock(self) -> None:
        with self._contents.guard:
            self._contents.unlock(self)

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self.unlock()


class MemoryStore(StoreInMemory):
    """A store in the memory of this process. Its contents are lost when the process ends.

    Each file needs a file descriptor. A file is freed once it has no name and no read or write uses it.

    contents       the `contents` of another MemoryStore, if this is to be a second view of the same files; None: a new,
                   empty store
    atomic_rename  False: behave like an object store, which cannot rename directories, but has conditional puts
    """

    def __init__(
        self, contents: SharedMemoryDirectory | None = None, *, location: str | None = None, options: EngineOptions
        | None = None,
        atomic_rename: bool = True,
    ) -> None:
        self.contents = contents or SharedMemoryDirectory()
        location = location or f"memory-{secrets.token_hex(4)}"
        super().__init__(OwnTree(self.contents, location), location, options, Capabilities(
            atomic_rename=atomic_rename, conditional_put=True, directory_sync=False, durable_on_return=True,
            range_reads=True, appends=False, direct=False, links=atomic_rename, volatile=True,
        ))
