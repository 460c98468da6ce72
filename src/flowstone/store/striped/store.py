"""A store whose segments (data files) are distributed over several paths, which are written and read concurrently.

The first path has the marker (the file that identifies the store), the lock and the manifests, and commits the
checkpoints, so it is a store like any other. The other paths have only segments, under names that never change
(docs/FORMAT.md, Paths).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from flowstone._native import Arena, Engine, ReadExtents, WriteExtents
from flowstone.config import QUEUE_DEPTH_MAX, Direction, PathShare, Watch
from flowstone.errors import ArgumentError, FlowstoneError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, decode_manifest
from flowstone.format.segment import path_of
from flowstone.log import log
from flowstone.store.appendable import AppendableStore, AppendFile
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace, Store
from flowstone.store.forks import forget_in_children
from flowstone.store.settings import Settings
from flowstone.store.striped import notes, records
from flowstone.store.striped.path import StripedPath, StripeMemberStore, weights
from flowstone.store.striped.stripe_member import OpenExtents, StripeMember

if TYPE_CHECKING:
    from flowstone.store.striped.reading import StripedReadHandle
    from flowstone.store.striped.writing import StripedWriteHandle

T = TypeVar("T")
_GONE = (errno.ENOENT, errno.ENOTDIR)


class StripedStore:
    """A Store (store.base) over several paths. Calls no path before the first call that needs it.

    paths    the first one has the manifests
    given    the weights of the paths, in the same order; None: the path's measured rate is used
    opened   opens a store by location. Called for paths that are only in notes (files that list them), not in `paths`
    writes_noted  whether paths that are only in notes are also written
    watch    how changes of memory before its capture are detected: see EngineOptions
    now      returns seconds of a monotonic clock
    """

    def __init__(
        self, paths: Sequence[Store], given: Sequence[float | None] | None = None, *,
        opened: Callable[[str], Store] | None = None, watch: Watch = "auto",
        writes_noted: bool = False, now: Callable[[], float] = time.monotonic,
    ) -> None:
        given = given or [None] * len(paths)
        notes.check_paths(paths, given)
        self._first = cast("StripeMemberStore", paths[0])
        self._listed = [(cast("StripeMemberStore", path), weight) for path, weight in zip(paths, given, strict=True)]
        self._opened, self._now, self._watch, self._writes_noted = opened, now, watch, writes_noted
        self._paths: dict[int, StripedPath] | None = None  # number -> path; None before the first use
        self._weights: dict[int, float] = {}
        # checkpoint's directory -> state of its manifest file, and the name of its directory of segments
        self._directories: dict[str, tuple[str | None, str]] = {}
        # directory of an unfinished checkpoint -> paths with names that are not durable yet
        self._unsynced: dict[str, set[int]] = {}
        self._engines: dict[tuple[int, ...], tuple[Engine, tuple[Engine, ...]]] = {}
        self._is_noted, self._guard = False, Lock()  # _guard protects the engines
        forget_in_children(self)

    @property
    def capabilities(self) -> Capabilities:
        first = self._first.capabilities
        return msgspec.structs.replace(
            first, parts=False, spreads=True, distant=any(path.capabilities.distant for path, _ in self._listed),
            links=all(path.capabilities.links for path, _ in self._listed),
        )

    @property
    def location(self) -> str:
        return self._first.location

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations of all its paths, in order."""
        return tuple(path.store.location for _, path in sorted(self.paths().items()))

    @property
    def watch(self) -> Watch:
        return self._watch

    # Paths

    def paths(self) -> dict[int, StripedPath]:
        """The paths by number: those given, and, for reading, those that are only in the first path's notes."""
        if self._paths is None:
            self._paths = self._numbered()
        return self._paths

    def _numbered(self) -> dict[int, StripedPath]:
        noted = {}
        for number in records.noted_numbers(self._first.names()):
            noted[number] = records.read_note(self._first, records.note_name(number))
        by_location = {note.location: number for number, note in noted.items()}
        identity = notes.identity_of(self._first)
        paths = {0: StripedPath(0, self._first, self._listed[0][1], self._now)}
        listed = [
            (store, weight, notes.read_own_note(self._first, store, identity)) for store, weight in self._listed[1:]
        ]
        # A job that was killed may have written the note only on the new path, not on the first.
        free = max([*noted, *(own.path for _, _, own in listed if own is not None)], default=0)
        for store, weight, own in listed:
            own_number = own.path if own is not None else by_location.get(store.location)
            if own_number is None:
                free = own_number = free + 1
            if own_number in paths:
                raise ArgumentError(f"the path {store.location} was given twice", next="give each path once")
            paths[own_number] = StripedPath(own_number, store, weight, self._now)
        for number, note in noted.items():
            if number not in paths and self._opened is not None:
                other = cast("StripeMemberStore", self._opened(note.location))
                paths[number] = StripedPath(number, other, None, self._now, writes=self._writes_noted)
        return paths

    def shares(self) -> tuple[PathShare, ...]:
        """The paths' shares: see MultiPath. A path that has failed recently gets none."""
        usable = [path for path in self.paths().values() if path.is_usable and (path.number == 0 or path.given != 0)]
        if not any(path.number == 0 for path in usable):
            usable.insert(0, self.paths()[0])
        self._weights = weights(usable, self._weights)
        return tuple(PathShare(number, weight) for number, weight in self._weights.items() if weight > 0)

    def measure(
        self, before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], of: Sequence[int]
    ) -> None:
        """Update the rates of the paths `of` from two measurements of an engine's traffic, `before` and `after`."""
        for number, old, new in zip(of, before, after, strict=True):
            self.paths()[number].add_measurement(new[0] - old[0], new[1] - old[1])

    # Where files are

    def locate(self, path: str, *, is_new: bool = False) -> tuple[int, str]:
        """The number of the path that has a file, and the file's name on that path. `is_new`: whether the file is about
        to be created.

        If a segment's path had failed when the segment was written, the segment is on another path than its name says,
        or in the checkpoint's directory on the first path.
        """
        directory, _, name = path.rpartition("/")
        number = path_of(name)
        if not number or (not is_new and self._first.exists(path)):
            return 0, path
        segments = self.segments_of(directory)
        name_there = f"{segments}/{name}"
        holder = number if is_new or segments is None else self._holder(number, name_there)
        return (0, path) if segments is None or holder not in self.paths() else (holder, name_there)

    def _holder(self, number: int, name: str) -> int:
        """The path (not the first) that has a segment: path `number`, unless another path took the segment over. The
        other paths are checked first, since path `number` may still have an incomplete file after a power loss.
        """
        others = (path for path_number, path in sorted(self.paths().items()) if path_number not in (0, number))
        others = (path for path in others if path.store.capabilities.directory_sync)
        return next((path.number for path in others if notes.has_file(path.store, name)), number)

    def segments_of(self, directory: str) -> str | None:
        """The name of the directory, on all paths but the first, with the segments of a checkpoint, finished or not.
        None if `directory` is not the directory of a checkpoint.
        """
        draft = records.segments_of_draft(directory)
        if draft is not None or not directory or "/" in directory:
            return draft
        manifest = f"{directory}/{MANIFEST_NAME}"
        stamp, cached = self._first.stamp(manifest), self._directories.get(directory)
        if cached is not None and stamp in (cached[0], None):
            return cached[1]
        if stamp is None:
            return None
        try:
            decoded = decode_manifest(self._first.read(manifest), path=f"{self.location}/{manifest}")
        except (FlowstoneError, OSError):
            return None  # a reader of that manifest gets the error
        self._directories[directory] = stamp, records.segments_directory(decoded.step, decoded.id)
        return self._directories[directory][1]

    def _at(self, path: str, *, is_new: bool = False) -> tuple[Store, str]:
        number, name = self.locate(path, is_new=is_new)
        return self._store(number), name

    def _store(self, number: int) -> Store:
        return self.paths()[number].store if number else self._first

    # Names and small files

    def exists(self, path: str = "") -> bool:
        """Whether a file or directory exists. Raises StorageError if a segment's path is not mounted."""
        number, name = self.locate(path)
        exists = self._store(number).exists(name)
        if not exists:
            self._check_path_of(path, number)
        return exists

    def _check_path_of(self, path: str, number: int) -> None:
        """Raise StorageError if the path of a missing segment is not mounted. Not for unfinished checkpoints, whose
        segments may move to another path.
        """
        if number and records.segments_of_draft(path.rpartition("/")[0]) is None:
            self.check_path(number, path)

    def check_path(self, number: int, missing: str) -> None:
        """Raise StorageError, which names the path, if path `number` is not mounted. `missing`: the missing file, for
        the message.
        """
        notes.check_mounted(self._first, number, self.paths()[number].store, missing)

    def is_link(self, path: str) -> bool:
        store, name = self._at(path)
        return store.is_link(name)

    def names(self, path: str = "") -> tuple[str, ...]:
        entries = set(self._first.names(path))
        if not path and notes.is_bare(entries):
            self._numbered()  # raises StorageError if the note of another path shows that the first path is not mounted
        if path and (segments := self.segments_of(path)) is not None:
            for number, further in self.paths().items():
                entries |= set(further.store.names(segments)) if number else set()
        return tuple(sorted(entries))

    def size(self, path: str) -> int:
        return self._call_there(path, lambda store, name: store.size(name))

    def stamp(self, path: str) -> str | None:
        store, name = self._at(path)
        return store.stamp(name)

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        return self._call_there(
            path, lambda store, name: store.read(name, offset=offset, length=length, bytes_max=bytes_max)
        )

    def _call_there(self, path: str, call: Callable[[Store, str], T]) -> T:
        number, name = self.locate(path)
        try:
            return call(self._store(number), name)
        except StorageError as error:
            if error.errno in _GONE:
                self._check_path_of(path, number)
            raise

    def make_directory(self, path: str = "") -> None:
        segments = records.segments_of_draft(path)
        changed: list[StripedPath] = []
        if segments is not None:
            self._note_paths()
            changed = [
                further for number, further in self.paths().items()
                if number and further.is_usable and self._make_segments(further, segments)
            ]
        try:
            self._first.make_directory(path)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # else another rank has created it
                for further in changed:
                    with suppress(StorageError):  # the next writer removes it
                        further.store.remove(segments or "")
            raise

    def _make_segments(self, path: StripedPath, segments: str) -> bool:
        """Create the directory for a checkpoint's segments on a path. Returns whether it was created. If the path
        fails, its segments are written to another path.
        """
        try:
            if not path.store.exists():
                path.store.make_directory()
            path.store.make_directory(segments)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                path.mark_failed(error)
            return False
        return True

    def remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if not name.endswith(MANIFEST_NAME) and path_of(name) == 0:
            self._remove_segments_directories(path)
            self._first.remove(path)
            return
        if name == MANIFEST_NAME and records.segments_of_draft(directory) is None:
            self._remove_segments(directory)  # removed before the manifest, which says where the segments are
        number, name_there = self.locate(path)
        if not number or self._has_moved(directory):
            self._first.remove(path)
            return
        try:
            self.paths()[number].store.remove(name_there)
            if records.segments_of_draft(directory) is not None:
                # otherwise a power loss may bring the name back, beside a manifest that does not list it
                self.mark_unsynced(path, number)
        except StorageError as error:
            if error.errno not in _GONE or self._first.exists(f"{directory}/{MANIFEST_NAME}"):
                raise  # if it does not exist, it was removed before the manifest

    def _has_moved(self, directory: str) -> bool:
        """Whether the unfinished checkpoint in `directory` was renamed to a checkpoint, which has the segments now. A
        save that fails after the rename still tries to remove the old name.
        """
        return records.segments_of_draft(directory) is not None and not self._first.exists(directory)

    def _remove_segments(self, directory: str) -> None:
        """Remove the segments of an expired checkpoint from all paths but the first. Raises StorageError if a path
        fails.
        """
        segments = self.segments_of(directory)
        if segments is None:
            return
        for number, path in self.paths().items():
            if number and path.store.exists(segments):
                notes.remove_directory(path.store, segments)
            elif number and path.store.capabilities.needs_sync and path.store.exists():
                path.store.sync_directory()  # a killed writer may have removed the segments without a sync

    def _remove_segments_directories(self, directory: str) -> None:
        """Remove the directories of an unfinished checkpoint's segments. Raises StorageError (ENOTEMPTY) while other
        ranks write there.
        """
        segments = None if self._has_moved(directory) else records.segments_of_draft(directory)
        for number, path in self.paths().items() if segments is not None else ():
            try:
                if number and path.store.exists(segments or ""):
                    path.store.remove(segments or "")
                    if path.store.capabilities.needs_sync:
                        path.store.sync_directory()  # for the same reason as for the segments of a checkpoint
            except StorageError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                log.warning("cannot remove %s/%s: %s", path.store.location, segments, error)
        self._unsynced.pop(directory, None)

    # Commit

    def put(self, path: str, data: bytes) -> None:
        store, name = self._at(path, is_new=True)
        store.put(name, data)

    def rename(self, source: str, target: str) -> None:
        if self.locate(source)[0]:
            raise StorageError(
                f"cannot rename {self.location}/{source}", errno=errno.EOPNOTSUPP,
                reason="it is on another of the store's paths (disks)", next="report this: it is a bug in Flowstone",
            )
        self._first.rename(source, target)
        for directory in (source, target):
            self._directories.pop(directory, None)

    def link(self, source: str, target: str) -> None:
        number, name = self.locate(source)
        if not number:
            self._first.link(source, target)
            return
        segments = self.segments_of(target.rpartition("/")[0])
        if segments is None:
            raise StorageError(
                f"cannot link {self.location}/{source}", errno=errno.EXDEV,
                reason=f"{target} is on another of the store's paths (disks)",
                next="report this: it is a bug in Flowstone",
            )
        self.paths()[number].store.link(name, f"{segments}/{target.rpartition('/')[2]}")
        self.mark_unsynced(target, number)

    def mark_unsynced(self, path: str, number: int) -> None:
        """Note that file `path` was created on or removed from storage path `number`: its directory needs a sync."""
        if number:
            self._unsynced.setdefault(path.rpartition("/")[0], set()).add(number)

    def mark_synced(self, path: str, number: int) -> None:
        """Note that storage path `number` needs no sync: file `path` was moved to another storage path, durably."""
        self._unsynced.get(path.rpartition("/")[0], set()).discard(number)

    def sync_segments(self, directory: str, of: int | None = None) -> None:
        """Make new names of segments durable: see MultiPath. `of`: only on this path; None: on all."""
        segments = self.segments_of(directory)
        for number in sorted(self._unsynced.get(directory, ())):
            store = self.paths()[number].store
            if segments is None or of not in (None, number):
                continue
            if store.capabilities.needs_sync:
                store.sync_directory(segments)
                store.sync_directory()
            self._unsynced.get(directory, set()).discard(number)  # another thread may have synced the same path
        if not self._unsynced.get(directory):
            self._unsynced.pop(directory, None)

    def sync_directory(self, path: str = "") -> None:
        self.sync_segments(path)
        self._first.sync_directory(path)

    # Lock

    def lock(self, holder: str) -> None:
        self._first.lock(holder)
        self._renew_paths()
        self._is_noted = False
        notes.sweep(self._first, self.paths(), self.segments_of)

    def _renew_paths(self) -> None:
        """Read the notes about paths again, as another job may have added paths. The state of known paths stays."""
        previous, self._paths = self._paths or {}, None
        self._paths = {
            number: previous[number] if number in previous and previous[number].store is path.store else path
            for number, path in self.paths().items()
        }
        mine = {id(path.store) for path in self._paths.values()}
        for path in previous.values():
            if id(path.store) not in mine:
                path.store.close()

    def check_lock(self) -> None:
        self._first.check_lock()

    def unlock(self) -> None:
        self._first.unlock()

    def _note_paths(self) -> None:
        """Write the notes about all paths, before segments are written to them. Only the holder of the lock does so."""
        if self._is_noted:
            return
        try:
            self._first.check_lock()
        except FlowstoneError:
            return  # another rank has the lock, and writes the notes
        identity = notes.identity_of(self._first)
        if identity is None:
            return  # without a store there are no unfinished checkpoints
        for number, path in self.paths().items():
            if number and path.writes and path.is_usable:
                try:
                    notes.write_notes(self._first, path, identity)
                except StorageError as error:
                    path.mark_failed(error)
        self._is_noted = all(path.is_usable for path in self.paths().values() if path.writes)

    # Bulk bytes

    def free_bytes(self) -> int:
        """The largest size of the next save, in bytes, for which each path has enough free space for its share."""
        limits = []
        for number, weight in self.shares():
            try:
                limits.append(int(self.paths()[number].store.free_bytes() / max(weight, 1e-6)))
            except StorageError as error:
                if not number:
                    raise
                self.paths()[number].mark_failed(error)
        return min(limits)

    def settings(self, direction: Direction) -> Settings:
        return self._first.settings(direction)

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> StripedWriteHandle:
        from flowstone.store.striped.writing import StripedWriteHandle  # imported here: it needs numpy

        return StripedWriteHandle(self, files, rows, arena, pace, reserved=reserved)

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> StripedReadHandle:
        from flowstone.store.striped.reading import StripedReadHandle  # imported here, too

        def opening(store: StripeMember, names: Sequence[str], of_path: int) -> OpenExtents:
            return store.open_extents(
                names, arena, of_path=of_path, wanted_bytes=wanted_bytes, past_cache=past_cache
            )

        return StripedReadHandle(self, paths, rows, arena, opening, stop_at_bad=stop_at_bad, ahead=ahead)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        store, name = self._at(path)
        return store.reads_past_cache(name, wanted_bytes)

    def append_to_new(self, path: str) -> AppendFile:
        return cast("AppendableStore", self._first).append_to_new(path)

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        return cast("AppendableStore", self._first).read_into(path, offset_bytes, target)

    def engine(self, queues: Sequence[Engine], direction: Direction, arena: Arena) -> Engine:
        """One engine that passes requests to these queues. Queue i serves the files whose `of_path` is i. The engine is
        kept for the next job.
        """
        tuning = self.settings(direction).tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        key = (request_bytes, *map(id, queues))
        with self._guard:
            if key not in self._engines:
                engine = Engine(
                    backend="paths", queue_depth=min(QUEUE_DEPTH_MAX, tuning.queue_depth * len(queues)),
                    request_bytes=request_bytes, workers=tuning.workers, background=True, paths=queues,
                )
                self._engines[key] = engine, tuple(queues)
            return self._engines[key][0]

    def close(self) -> None:
        engines, self._engines = self._engines, {}
        for engine, _ in engines.values():
            engine.close()
        stores = [path.store for path in (self._paths or {}).values()]
        for store in {id(member): member for member in (*(store for store, _ in self._listed), *stores)}.values():
            store.close()

    def forget(self) -> None:
        """Called in a forked child: forget the threads, and replace the lock, which one of them may have held."""
        self._guard, self._engines = Lock(), {}
