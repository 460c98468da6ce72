"""A store in a bucket; bulk bytes go through the native engine, and threads here carry out its requests."""

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

from flowstone import _native
from flowstone.config import BLOCK_BYTES, Direction, EngineOptions
from flowstone.errors import BudgetError, DamagedError, StorageError
from flowstone.store.at_once import at_once
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace
from flowstone.store.forks import forget_in_children
from flowstone.store.jobs import JobReading
from flowstone.store.objects.ahead import AheadStore
from flowstone.store.objects.client import DIRECTORY_NAME, Client, Patience, open_bucket, same_tag
from flowstone.store.objects.downloads import ObjectExtents, ObjectReading, give_up
from flowstone.store.objects.failures import begins_behind, storage_error
from flowstone.store.objects.file_system import FileSystemBucket, open_file_system
from flowstone.store.objects.kept import Held
from flowstone.store.objects.lease import LEASE_S, ObjectLease
from flowstone.store.objects.orphans import abort_unfinished
from flowstone.store.objects.uploads import ObjectPart, ObjectWriting, Upload, part_bytes
from flowstone.store.objects.urls import FSSPEC, object_url
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.parts import Moving
from flowstone.store.settings import Settings, resolve

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Bucket

_UNLIMITED_BYTES = 1 << 62
_GAP_BYTES = 1 << 40  # every byte of an object is written: gaps are zeros
_SEEN_MAX = 10_000
_CAPABILITIES = Capabilities(
    atomic_rename=False, conditional_put=True, directory_sync=False, durable_on_return=True, range_reads=True,
    appends=False, direct=False, links=False, distant=True, asks_ahead=True,
    parts=True,
)


class ObjectStore:
    """See store.base.Store. Asks the bucket nothing before the first call that needs it.

    bucket    a URL (s3://bucket/path, gs://bucket/path, az://container/path, fsspec+SCHEME://path), or an object store
              of obstore's, whose root is then the store's, or what acts as one
    location  for people; None: the URL
    lease_s   how long others wait until this writer counts as dead, if it does not renew its lease
    """

    def __init__(
        self, bucket: str | Bucket | FileSystemBucket, options: EngineOptions | None = None, *,
        location: str | None = None, patience: Patience | None = None, lease_s: float = LEASE_S,
    ) -> None:
        patience = patience or Patience()
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
        self._engines: dict[int, _native.Engine] = {}  # by the longest request
        self._next_file = 0  # see `_numbers`
        self._seen: set[str] = set()  # objects whose size was asked for: they are there, or were removed since
        self._tags: dict[str, str | None] = {}  # of segments that this store has claimed or written, and not removed
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
        found = self.client.entries(path)
        return tuple(sorted({*found.objects, *found.directories, *found.foreign} - {DIRECTORY_NAME}))

    def size(self, path: str) -> int:
        found = self.client.head(path)
        if found is None:
            raise self._missing("stat", path)
        self._note_seen(path)
        return found["size"]

    def _note_seen(self, path: str) -> None:
        """That the object is there: a read looks no more for it."""
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen.add(path)

    def stamp(self, path: str) -> str | None:
        found = self.client.head(path)
        if found is None:
            return None
        try:
            token = self.client.token(path)
        except FileNotFoundError:
            return None
        return f"{found['e_tag']}/{found.get('version')}/{found['last_modified']}/{found['size']}/{token}"

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
        wanted: GetOptions | None = None
        if length is not None:
            wanted = {"range": (offset, offset + length)}
        elif offset:
            wanted = {"range": {"offset": offset}}
        try:
            return self.client.get(path, wanted, check=check)
        except StorageError as error:
            if error.__cause__ is not None and begins_behind(error.__cause__):
                return b""
            raise

    def make_directory(self, path: str = "") -> None:
        """Whether the prefix has objects without that one is asked at once with the put, which is undone if it has."""
        token, marker = secrets.token_hex(8), f"{path}/{DIRECTORY_NAME}" if path else DIRECTORY_NAME
        calls: list[Callable[[], object]] = [lambda: self.client.put_new(marker, token.encode(), token)]
        if path:
            calls.append(lambda: self._has_entries(path))
        try:
            _, *others = at_once(self, calls)
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
        found = self.client.entries(path)
        return bool(found.directories or found.foreign or set(found.objects) - {DIRECTORY_NAME})

    def remove(self, path: str) -> None:
        found = self.client.head(path)
        if found is not None:
            self._check_own(path, found["e_tag"])
            self.client.delete(path)
            self._tags.pop(path, None)
            return
        inside = self.client.entries(path)
        if not inside:
            raise self._missing("remove", path)
        if inside.directories or inside.foreign or set(inside.objects) != {DIRECTORY_NAME}:
            raise StorageError(
                f"cannot remove {self.location}/{path}", errno=errno.ENOTEMPTY, reason="a directory with entries",
                next="remove what is in it first",
            )
        self.client.delete(f"{path}/{DIRECTORY_NAME}")

    def _check_own(self, path: str, tag: str | None) -> None:
        """Raise StorageError if another job has replaced a segment since this one began to write it.

        Drafts of one step have one directory here. A job that stood still, and gives up its draft, must not remove what
        the job after it has written there.
        """
        known = self._tags.get(path)
        if known is not None and not same_tag(tag, known):
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
        """Of a file: a copy within the bucket, then the removal of the source."""
        if self.exists(target):
            raise self._taken("rename", target)
        if self.client.head(source) is None:
            if self.client.entries(source):
                raise StorageError(
                    f"cannot rename {self.location}/{source}", errno=errno.EOPNOTSUPP, reason="a directory",
                    next="report this: it is a mistake in Flowstone",
                )
            raise self._missing("rename", source)
        self.client.copy(source, target)
        self.client.delete(source)

    def link(self, source: str, target: str) -> None:
        raise StorageError(
            f"cannot link {self.location}/{source}", errno=errno.ENOTSUP, reason="an object has one name",
            next="report this: it is a mistake in Flowstone",
        )

    # Lock

    def lock(self, holder: str) -> None:
        if self._lease.take(holder):
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
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> ObjectWriting:
        self._check_budget(files, arena)
        for plan, tag in zip(files, at_once(self, [partial(self._claim, plan.path) for plan in files]), strict=True):
            self._tags[plan.path] = tag
        engine, settings = self._engine(arena), self.settings("write")
        tokens = self._numbers(len(files))
        natives = [
            (
                _native.File(fd=token, path=f"{self.location}/{plan.path}", alignment=1),
                -(-plan.bytes // BLOCK_BYTES) * BLOCK_BYTES,  # what is behind its end is not sent
            )
            for token, plan in zip(tokens, files, strict=True)
        ]
        with translated(Path(self.location), "begin to write into", "", remedy=MORE_THREADS):
            job = engine.write(
                arena, natives, rows, gap_bytes=_GAP_BYTES, blocks=pace.blocks, bytes_per_s=pace.bytes_per_s or 0,
                cap_bytes_per_s=pace.cap or 0, watch=self.options.watch,
            )
        uploads: list[Upload] = []
        try:
            for number, (plan, token) in enumerate(zip(files, tokens, strict=True)):
                uploads.append(Upload(
                    self.client, engine, job, plan, numbers=(number, token), tags=self._tags,
                ))
        except RuntimeError as error:
            give_up(engine, job, "write", (tokens.start, tokens.stop))
            raise self._no_thread("write into", error) from error
        return ObjectWriting(self.location, job, settings, self.options.watch, files, uploads)

    def open_segments(
        self, files: Sequence[FilePlan], arena: _native.Arena, *, of_path: int, moving: Moving | None
    ) -> ObjectPart:
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
        return ObjectPart(
            self.client, self._engine(arena), files, tokens, self._tags, of_path=of_path,
            held=None if moving is None else Held(arena, moving),
        )

    def open_extents(
        self, paths: Sequence[str], arena: _native.Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> ObjectExtents:
        self._check_there(paths)
        tokens, tuning = self._numbers(len(paths)), self.settings("read").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        threads = max(1, min(tuning.queue_depth, -(-wanted_bytes // request_bytes))) if paths else 0
        return ObjectExtents(
            self.client, self._engine(arena), paths, first_file=tokens.start, threads=threads, of_path=of_path
        )

    def _claim(self, path: str) -> str | None:
        """Keep the segment's name, by a small object that the upload replaces. Returns its tag, which no other has."""
        token = secrets.token_hex(8)
        return self.client.put_new(path, token.encode(), token) or self.client.tag(path)

    def _check_budget(self, files: Sequence[FilePlan], arena: _native.Arena) -> None:
        """A part is sent at once: from blocks, or from a copy where these do not come soon."""
        longest = max((min(part_bytes(plan.bytes), plan.bytes) for plan in files), default=0)
        if arena.budget_bytes < longest:
            raise BudgetError(
                f"the memory budget is too small for a part of the upload to {self.location}",
                expected=f"at least {longest} bytes", found=f"{arena.budget_bytes} bytes",
                next="raise budget_bytes, or save from more ranks",
            )

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> JobReading:
        wanted = sorted(set(chain.from_iterable(rows.file_groups)))
        self._check_there([paths[number] for number in wanted])
        tokens = self._numbers(len(paths))
        natives: list[_native.File | None] = [None] * len(paths)
        for number in wanted:
            natives[number] = _native.File(
                fd=tokens[number], path=f"{self.location}/{paths[number]}", alignment=1
            )
        tuning, engine = self.settings("read").tuning, self._engine(arena)
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        with translated(Path(self.location), "begin to read from", "", remedy=MORE_THREADS):
            job = engine.read(
                arena, natives, rows, stop_at_bad=stop_at_bad, in_place=False, request_bytes=request_bytes, ahead=ahead,
                lent=True,
            )
        threads = max(1, min(tuning.queue_depth, -(-wanted_bytes // request_bytes)))
        try:
            return ObjectReading(self.client, engine, job, paths, first_file=tokens.start, threads=threads)
        except RuntimeError as error:
            give_up(engine, job, "read", (tokens.start, tokens.stop))
            raise self._no_thread("read from", error) from error

    def _no_thread(self, operation: str, error: RuntimeError) -> StorageError:
        return StorageError(
            f"cannot start the threads that {operation} {self.location}", errno=errno.EAGAIN, reason=str(error),
            next=MORE_THREADS,
        )

    def _check_there(self, paths: Sequence[str]) -> None:
        """Raise StorageError for the first object that is not there; one that goes later fails its read."""
        paths = [path for path in paths if path not in self._seen]
        found = at_once(self, [partial(self.client.head, path) for path in paths])
        for path, head in zip(paths, found, strict=True):
            if head is None:
                raise self._missing("open", path)

    def ahead(self) -> AheadStore | None:
        if isinstance(self.client.once, FileSystemBucket):
            return None  # where requests are made one after the other, one for nothing costs a round trip
        return AheadStore(self, self.client, self._note_seen)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return False

    def _numbers(self, files: int) -> range:
        """Numbers by which an engine knows so many files; no other job has them."""
        with self._guard:
            first, self._next_file = self._next_file, self._next_file + files
        return range(first, first + files)

    def _engine(self, arena: _native.Arena) -> _native.Engine:
        tuning = self.settings("write").tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        with translated(Path(self.location), "start the engine for", ""), self._guard:
            if request_bytes not in self._engines:
                self._engines[request_bytes] = _native.Engine(
                    backend="caller", queue_depth=tuning.queue_depth, request_bytes=request_bytes,
                    workers=tuning.workers, background=True,
                )
            return self._engines[request_bytes]

    def close(self) -> None:
        """Stop the engines and give up the lease."""
        with self._guard:
            engines, self._engines = tuple(self._engines.values()), {}
        for engine in engines:
            engine.close()
        self.unlock()

    def forget(self) -> None:
        """In a forked child: the threads are gone, and the lease is the parent's."""
        self._guard, self._engines = Lock(), {}
        self._lease.forget()

    def _missing(self, operation: str, path: str) -> StorageError:
        return storage_error(self.location, operation, path, FileNotFoundError("no such object"))

    def _taken(self, operation: str, path: str) -> StorageError:
        return StorageError(
            f"cannot {operation} {self.location}/{path}", errno=errno.EEXIST, reason="the name is taken",
            next="remove what has it, or choose another path",
        )
