"""A store in a bucket. The native engine captures and verifies bytes; threads of this process send the requests."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

from flowstone._native import Arena, Engine, File, ReadExtents, ReadOptions, WriteExtents, WriteOptions
from flowstone.config import BLOCK_BYTES, Direction, EngineOptions
from flowstone.errors import BudgetError, DamagedError, StorageError
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace
from flowstone.store.forks import forget_in_children
from flowstone.store.jobs import JobReadHandle
from flowstone.store.objects.client import DIRECTORY_NAME, Client, RetryPolicy, open_bucket, same_tag
from flowstone.store.objects.downloads import ObjectOpenExtents, ObjectReadHandle, cancel_unserved
from flowstone.store.objects.failures import begins_behind, storage_error
from flowstone.store.objects.file_system import FileSystemBucket, open_file_system
from flowstone.store.objects.lease import LEASE_S, ObjectLease
from flowstone.store.objects.orphans import abort_unfinished
from flowstone.store.objects.prefetcher import ObjectPrefetcher
from flowstone.store.objects.retry_buffer import HeldBlocks
from flowstone.store.objects.uploads import ObjectOpenSegments, ObjectWriteHandle, Upload, part_bytes
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.run_concurrently import run_concurrently
from flowstone.store.settings import Settings, resolve
from flowstone.store.urls import FSSPEC, object_url

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Bucket

    from flowstone.store.striped.stripe_member import FailoverLimits

_UNLIMITED_BYTES = 1 << 62
_GAP_BYTES = 1 << 40  # larger than any gap between two ranges, so that gaps are written, too, as zeros
_SEEN_MAX = 10_000
_CAPABILITIES = Capabilities(
    atomic_rename=False, conditional_put=True, directory_sync=False, durable_on_return=True, range_reads=True,
    appends=False, direct=False, links=False, distant=True, asks_ahead=True,
    parts=True,
)


class ObjectStore:
    """A Store (store.base) in a bucket. Makes no request before the first call that needs one.

    bucket    a URL (s3://bucket/path, gs://bucket/path, az://container/path, fsspec+SCHEME://path); or an obstore
              object store, or an object with the same interface; its root becomes the store's root
    location  what messages call the store; None: the URL
    lease_s   if this job does not renew its lease for so many seconds, other jobs consider it dead
    """

    def __init__(
        self, bucket: str | Bucket | FileSystemBucket, options: EngineOptions | None = None, *,
        location: str | None = None, patience: RetryPolicy | None = None, lease_s: float = LEASE_S,
    ) -> None:
        patience = patience or RetryPolicy()
        url = object_url(bucket) if isinstance(bucket, str) else None
        if url is not None and url.startswith(FSSPEC):
            file_system, path, name = open_file_system(url)
            once = repeating = cast("Bucket", FileSystemBucket(file_system, path))
            location = location or name
        elif isinstance(bucket, str):
            once, repeating = open_bucket(url or bucket, patience)
            location = location or str(url or bucket)
        else:
            once = repeating = cast("Bucket", bucket)
            location = location or repr(bucket)
        self.location = location
        self.options = replace(options or EngineOptions(), backend="posix", direct="off")
        self.client = Client(location, once, repeating, patience)
        self._lease = ObjectLease(self.client, lease_s)
        self._guard = Lock()
        self._engines: dict[int, Engine] = {}  # longest request in bytes -> engine
        self._next_file = 0  # see `_numbers`
        self._seen: set[str] = set()  # objects that were found when their size was read
        self._tags: dict[str, str | None] = {}  # path of a segment that this store has claimed or written -> its ETag
        forget_in_children(self)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # Names and small files

    def exists(self, path: str = "") -> bool:
        if path and self.client.head(path) is not None:
            return True
        return bool(self.client.entries(path))

    def is_link(self, path: str) -> bool:
        return False

    def names(self, path: str = "") -> tuple[str, ...]:
        listing = self.client.entries(path)
        return tuple(sorted({*listing.objects, *listing.directories, *listing.foreign} - {DIRECTORY_NAME}))

    def size(self, path: str) -> int:
        meta = self.client.head(path)
        if meta is None:
            raise self._missing("stat", path)
        self._note_seen(path)
        return meta["size"]

    def _note_seen(self, path: str) -> None:
        """Note that the object exists, so that later reads do not check that again."""
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen.add(path)

    def stamp(self, path: str) -> str | None:
        meta = self.client.head(path)
        if meta is None:
            return None
        try:
            token = self.client.token(path)
        except FileNotFoundError:
            return None
        return f"{meta['e_tag']}/{meta.get('version')}/{meta['last_modified']}/{meta['size']}/{token}"

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        def check(size: int) -> None:
            if bytes_max is not None and size > bytes_max:
                raise DamagedError(
                    f"{self.location}/{path} is too long", expected=f"at most {bytes_max} bytes",
                    found=f"{size} bytes", next="restore the file from a copy, or use an older step",
                )

        if length == 0:
            check(self.size(path))
            return b""
        options: GetOptions | None = None
        if length is not None:
            options = {"range": (offset, offset + length)}
        elif offset:
            options = {"range": {"offset": offset}}
        try:
            return self.client.get(path, options, check=check)
        except StorageError as error:
            if error.__cause__ is not None and begins_behind(error.__cause__):
                return b""
            raise

    def make_directory(self, path: str = "") -> None:
        """Put the store's marker (the file that identifies the store), and check at the same time that the prefix has
        no other objects. If there are any, remove the marker.
        """
        token, marker = secrets.token_hex(8), f"{path}/{DIRECTORY_NAME}" if path else DIRECTORY_NAME
        calls: list[Callable[[], object]] = [lambda: self.client.put_new(marker, token.encode(), token)]
        if path:
            calls.append(lambda: self._has_entries(path))
        try:
            _, *others = run_concurrently(self, calls)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            if path:
                raise self._taken("mkdir", path) from error
            return
        if any(others):
            self.client.delete(marker)
            raise self._taken("mkdir", path)

    def _has_entries(self, path: str) -> bool:
        listing = self.client.entries(path)
        return bool(listing.directories or listing.foreign or set(listing.objects) - {DIRECTORY_NAME})

    def remove(self, path: str) -> None:
        meta = self.client.head(path)
        if meta is not None:
            self._check_own(path, meta["e_tag"])
            self.client.delete(path)
            self._tags.pop(path, None)
            return
        listing = self.client.entries(path)
        if not listing:
            raise self._missing("remove", path)
        if listing.directories or listing.foreign or set(listing.objects) != {DIRECTORY_NAME}:
            raise StorageError(
                f"cannot remove {self.location}/{path}", errno=errno.ENOTEMPTY, reason="the directory is not empty",
                next="remove the files in this directory first",
            )
        self.client.delete(f"{path}/{DIRECTORY_NAME}")

    def _check_own(self, path: str, tag: str | None) -> None:
        """Raise StorageError if another job has replaced a segment since this job began to write it.

        In a bucket, all attempts to save a step use the same directory. If a job hangs, continues later, and removes
        its unfinished checkpoint, it must not remove the segments of another job.
        """
        own_tag = self._tags.get(path)
        if own_tag is not None and not same_tag(tag, own_tag):
            raise StorageError(
                f"cannot remove {self.location}/{path}", errno=errno.EPERM, reason="another job has replaced it",
                next="stop the other job that writes there; the next save takes the lock again",
            )

    def sync_directory(self, path: str = "") -> None:
        if not self.exists(path):
            raise self._missing("fsync", path)

    # Commit

    def put(self, path: str, data: bytes) -> None:
        self.client.put_new(path, data, secrets.token_hex(8))

    def rename(self, source: str, target: str) -> None:
        """Rename a file: copy the object within the bucket, then remove the source."""
        if self.exists(target):
            raise self._taken("rename", target)
        if self.client.head(source) is None:
            if self.client.entries(source):
                raise StorageError(
                    f"cannot rename {self.location}/{source}", errno=errno.EOPNOTSUPP, reason="the path is a directory",
                    next="report this: it is a bug in Flowstone",
                )
            raise self._missing("rename", source)
        self.client.copy(source, target)
        self.client.delete(source)

    def link(self, source: str, target: str) -> None:
        raise StorageError(
            f"cannot link {self.location}/{source}", errno=errno.ENOTSUP, reason="an object has only one name",
            next="report this: it is a bug in Flowstone",
        )

    # Lock

    def lock(self, holder: str) -> None:
        if self._lease.acquire(holder):
            abort_unfinished(self.location, self.client.once)

    def check_lock(self) -> None:
        self._lease.check()

    def unlock(self) -> None:
        self._lease.release()

    # Bulk bytes

    def free_bytes(self) -> int:
        return _UNLIMITED_BYTES

    def settings(self, direction: Direction) -> Settings:
        return resolve(direction, self.options, None)

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> ObjectWriteHandle:
        self._check_budget(files, arena)
        for plan, tag in zip(
            files, run_concurrently(self, [partial(self._claim, plan.path) for plan in files]), strict=True
        ):
            self._tags[plan.path] = tag
        engine, settings = self._engine(arena), self.settings("write")
        tokens = self._numbers(len(files))
        natives = [
            (
                File(fd=token, path=f"{self.location}/{plan.path}", alignment=1),
                -(-plan.bytes // BLOCK_BYTES) * BLOCK_BYTES,  # bytes after the segment's end are not sent
            )
            for token, plan in zip(tokens, files, strict=True)
        ]
        with translated(Path(self.location), "begin to write into", "", remedy=MORE_THREADS):
            job = engine.write(
                arena, natives, rows, WriteOptions(
                    gap_bytes=_GAP_BYTES, blocks=pace.blocks, bytes_per_s=pace.bytes_per_s or 0,
                    cap_bytes_per_s=pace.cap or 0, watch=self.options.watch,
                ),
            )
        uploads: list[Upload] = []
        try:
            for number, (plan, token) in enumerate(zip(files, tokens, strict=True)):
                uploads.append(Upload(
                    self.client, engine, job, plan, numbers=(number, token), tags=self._tags,
                ))
        except RuntimeError as error:
            cancel_unserved(engine, job, "write", (tokens.start, tokens.stop))
            raise self._no_thread("write into", error) from error
        return ObjectWriteHandle(self.location, job, settings, self.options.watch, files, uploads)

    def open_segments(
        self, files: Sequence[FilePlan], arena: Arena, *, of_path: int, moving: FailoverLimits | None
    ) -> ObjectOpenSegments:
        self._check_budget(files, arena)
        claimed: list[str] = []
        try:
            for plan in files:
                self._tags[plan.path] = self._claim(plan.path)
                claimed.append(plan.path)
        except StorageError:
            for path in claimed:
                self.remove(path)
            raise
        tokens = self._numbers(len(files))
        return ObjectOpenSegments(
            self.client, self._engine(arena), files, tokens, self._tags, of_path=of_path,
            held_blocks=None if moving is None else HeldBlocks(arena, moving),
        )

    def open_extents(
        self, paths: Sequence[str], arena: Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> ObjectOpenExtents:
        self._check_there(paths)
        tokens, tuning = self._numbers(len(paths)), self.settings("read").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        threads = max(1, min(tuning.queue_depth, -(-wanted_bytes // request_bytes))) if paths else 0
        return ObjectOpenExtents(
            self.client, self._engine(arena), paths, first_file=tokens.start, threads=threads, of_path=of_path
        )

    def _claim(self, path: str) -> str | None:
        """Reserve the segment's name with a small object, which the upload later replaces. Returns that object's unique
        ETag.
        """
        token = secrets.token_hex(8)
        return self.client.put_new(path, token.encode(), token) or self.client.tag(path)

    def _check_budget(self, files: Sequence[FilePlan], arena: Arena) -> None:
        """Raise BudgetError if a part of an upload does not fit into the arena (staging memory). A part is sent in
        one request, from memory.
        """
        longest = max((min(part_bytes(plan.bytes), plan.bytes) for plan in files), default=0)
        if arena.budget_bytes < longest:
            raise BudgetError(
                f"the memory budget is too small for a part of the upload to {self.location}",
                expected=f"at least {longest} bytes", found=f"{arena.budget_bytes} bytes",
                next="raise budget_bytes, or save from more ranks",
            )

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReadHandle:
        needed = sorted(set(chain.from_iterable(rows.file_groups)))
        self._check_there([paths[number] for number in needed])
        tokens = self._numbers(len(paths))
        natives: list[File | None] = [None] * len(paths)
        for number in needed:
            natives[number] = File(
                fd=tokens[number], path=f"{self.location}/{paths[number]}", alignment=1
            )
        tuning, engine = self.settings("read").tuning, self._engine(arena)
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        with translated(Path(self.location), "begin to read from", "", remedy=MORE_THREADS):
            job = engine.read(
                arena, natives, rows, ReadOptions(
                    stop_at_bad=stop_at_bad, in_place=False, request_bytes=request_bytes, ahead=ahead, lent=True
                ),
            )
        threads = max(1, min(tuning.queue_depth, -(-wanted_bytes // request_bytes)))
        try:
            return ObjectReadHandle(self.client, engine, job, paths, first_file=tokens.start, threads=threads)
        except RuntimeError as error:
            cancel_unserved(engine, job, "read", (tokens.start, tokens.stop))
            raise self._no_thread("read from", error) from error

    def _no_thread(self, operation: str, error: RuntimeError) -> StorageError:
        return StorageError(
            f"cannot start the threads that {operation} {self.location}", errno=errno.EAGAIN, reason=str(error),
            next=MORE_THREADS,
        )

    def _check_there(self, paths: Sequence[str]) -> None:
        """Raise StorageError for the first object that does not exist."""
        paths = [path for path in paths if path not in self._seen]
        metas = run_concurrently(self, [partial(self.client.head, path) for path in paths])
        for path, meta in zip(paths, metas, strict=True):
            if meta is None:
                raise self._missing("open", path)

    def ahead(self) -> ObjectPrefetcher | None:
        if isinstance(self.client.once, FileSystemBucket):
            # requests are made one after the other here, so a request that is not needed would cost a round trip
            return None
        return ObjectPrefetcher(self, self.client, self._note_seen)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return False

    def _numbers(self, files: int) -> range:
        """Numbers for the files of one write or read. No other write or read of the same engine gets these numbers."""
        with self._guard:
            first, self._next_file = self._next_file, self._next_file + files
        return range(first, first + files)

    def _engine(self, arena: Arena) -> Engine:
        tuning = self.settings("write").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        with translated(Path(self.location), "start the engine for", ""), self._guard:
            if request_bytes not in self._engines:
                self._engines[request_bytes] = Engine(
                    backend="caller", queue_depth=tuning.queue_depth, request_bytes=request_bytes,
                    workers=tuning.workers, background=True,
                )
            return self._engines[request_bytes]

    def close(self) -> None:
        """Stop the engines, and release the lease."""
        with self._guard:
            engines, self._engines = tuple(self._engines.values()), {}
        for engine in engines:
            engine.close()
        self.unlock()

    def forget(self) -> None:
        """Called in a forked child: forget the threads and the lease, which belong to the parent."""
        self._guard, self._engines = Lock(), {}
        self._lease.forget()

    def _missing(self, operation: str, path: str) -> StorageError:
        return storage_error(self.location, operation, path, FileNotFoundError("no such object"))

    def _taken(self, operation: str, path: str) -> StorageError:
        return StorageError(
            f"cannot {operation} {self.location}/{path}", errno=errno.EEXIST, reason="an object of this name exists",
            next="remove the existing object, or choose another path",
        )
