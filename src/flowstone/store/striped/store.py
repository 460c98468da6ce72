"""A store whose segments are spread over several paths, which are written and read at once.

The first path has the marker, the lock and the checkpoints, and so everything that commits: it is a store like any
other. Further paths have segments alone, under names that never change (docs/FORMAT.md, Paths).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from flowstone import _native
from flowstone.config import QUEUE_DEPTH_MAX, Direction, Share, Watch
from flowstone.errors import ArgumentError, FlowstoneError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, decode_manifest
from flowstone.format.segment import path_of
from flowstone.log import log
from flowstone.store.appends import Appending, Appends
from flowstone.store.base import UNPACED, Capabilities, FilePlan, Pace, Store
from flowstone.store.forks import forget_in_children
from flowstone.store.parts import OpenExtents, Parts
from flowstone.store.settings import Settings
from flowstone.store.striped import notes, records
from flowstone.store.striped.path import PartStore, StripedPath, weights

if TYPE_CHECKING:
    from flowstone.store.striped.reading import StripedReading
    from flowstone.store.striped.writing import StripedWriting

T = TypeVar("T")
_GONE = (errno.ENOENT, errno.ENOTDIR)


class StripedStore:
    """See store.base.Store. Asks no path for anything before it is used.

    paths    the first one has the checkpoints
    weights  of the paths, parallel to them; None for one: its measured rate
    opened   opens the store at a location that a path's note names, to read what earlier lists of paths have written
    writes_noted  noted paths that were not given are written, too
    watch    how changes before capture are detected: see EngineOptions
    now      seconds of a monotonic clock
    """

    def __init__(
        self, paths: Sequence[Store], given: Sequence[float | None] | None = None, *,
        opened: Callable[[str], Store] | None = None, watch: Watch = "auto",
        writes_noted: bool = False, now: Callable[[], float] = time.monotonic,
    ) -> None:
        given = given or [None] * len(paths)
        notes.check_paths(paths, given)
        self._first = cast("PartStore", paths[0])
        self._listed = [(cast("PartStore", path), weight) for path, weight in zip(paths, given, strict=True)]
        self._opened, self._now, self._watch, self._writes_noted = opened, now, watch, writes_noted
        self._paths: dict[int, StripedPath] | None = None  # by number, once they are known
        self._weights: dict[int, float] = {}
        self._directories: dict[str, tuple[str | None, str]] = {}  # of checkpoints: the manifest's stamp, the segments'
        self._unsynced: dict[str, set[int]] = {}  # of drafts: paths with new names
        self._engines: dict[tuple[int, ...], tuple[_native.Engine, tuple[_native.Engine, ...]]] = {}
        self._is_noted, self._guard = False, Lock()  # the lock is of the engines
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
        """Of all its paths, the first one first."""
        return tuple(path.store.location for _, path in sorted(self.paths().items()))

    @property
    def watch(self) -> Watch:
        return self._watch

    # Paths

    def paths(self) -> dict[int, StripedPath]:
        """The paths by number: those that were given, and those that the first one has noted besides, to read."""
        if self._paths is None:
            self._paths = self._numbered()
        return self._paths

    def _numbered(self) -> dict[int, StripedPath]:
        noted = {}
        for number in records.noted_numbers(self._first.names()):
            noted[number] = records.read_note(self._first, records.note_name(number))
        by_location = {note.location: number for number, note in noted.items()}
        identity = notes.identity_of(self._first)
        found = {0: StripedPath(0, self._first, self._listed[0][1], self._now)}
        listed = [(store, weight, notes.own_note(self._first, store, identity)) for store, weight in self._listed[1:]]
        # A job that was killed may have noted a path there, and not here yet.
        free = max([*noted, *(own.path for _, _, own in listed if own is not None)], default=0)
        for store, weight, own in listed:
            known = own.path if own is not None else by_location.get(store.location)
            if known is None:
                free = known = free + 1
            if known in found:
                raise ArgumentError(f"{store.location} is given twice", next="give each path once")
            found[known] = StripedPath(known, store, weight, self._now)
        for number, note in noted.items():
            if number not in found and self._opened is not None:
                other = cast("PartStore", self._opened(note.location))
                found[number] = StripedPath(number, other, None, self._now, writes=self._writes_noted)
        return found

    def shares(self) -> tuple[Share, ...]:
        """See Spreads. A path that has failed lately gets nothing."""
        usable = [path for path in self.paths().values() if path.is_usable and (path.number == 0 or path.given != 0)]
        if not any(path.number == 0 for path in usable):
            usable.insert(0, self.paths()[0])
        self._weights = weights(usable, self._weights)
        return tuple(Share(number, weight) for number, weight in self._weights.items() if weight > 0)

    def measure(
        self, before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], of: Sequence[int]
    ) -> None:
        """Take note of what the paths `of` these numbers have written between two looks at an engine's traffic."""
        for number, old, new in zip(of, before, after, strict=True):
            self.paths()[number].measured(new[0] - old[0], new[1] - old[1])

    # Places

    def place(self, path: str, *, is_new: bool = False) -> tuple[int, str]:
        """The number of the path on which a file lies, and its name there. `is_new`: it is about to be made.

        A segment that is in the checkpoint's own directory, or on another path, is taken from there: its path had
        failed when it was made.
        """
        directory, _, name = path.rpartition("/")
        number = path_of(name)
        if not number or (not is_new and self._first.exists(path)):
            return 0, path
        segments = self.segments_of(directory)
        there = f"{segments}/{name}"
        holder = number if is_new or segments is None else self._holder(number, there)
        return (0, path) if segments is None or holder not in self.paths() else (holder, there)

    def _holder(self, number: int, there: str) -> int:
        """The further path that has a segment: its own, unless another one has taken it. That one is looked at first:
        what its own has kept of it, or has back after a loss of power, may be a part.
        """
        others = (one for other, one in sorted(self.paths().items()) if other not in (0, number))
        taken = (one.number for one in others if one.store.capabilities.directory_sync and notes.has(one.store, there))
        return next(taken, number)

    def segments_of(self, directory: str) -> str | None:
        """Where further paths have the segments of a checkpoint or draft; None if the directory is neither."""
        draft = records.of_draft(directory)
        if draft is not None or not directory or "/" in directory:
            return draft
        manifest = f"{directory}/{MANIFEST_NAME}"
        stamp, known = self._first.stamp(manifest), self._directories.get(directory)
        if known is not None and stamp in (known[0], None):
            return known[1]
        if stamp is None:
            return None
        try:
            found = decode_manifest(self._first.read(manifest), path=f"{self.location}/{manifest}")
        except (FlowstoneError, OSError):
            return None  # safe: who reads that manifest is told
        self._directories[directory] = stamp, records.segments_directory(found.step, found.id)
        return self._directories[directory][1]

    def _at(self, path: str, *, is_new: bool = False) -> tuple[Store, str]:
        number, there = self.place(path, is_new=is_new)
        return self._store(number), there

    def _store(self, number: int) -> Store:
        return self.paths()[number].store if number else self._first

    # Names and small files

    def exists(self, path: str = "") -> bool:
        """Raises StorageError where a segment's path is not there."""
        number, there = self.place(path)
        is_there = self._store(number).exists(there)
        if not is_there:
            self._check_path_of(path, number)
        return is_there

    def _check_path_of(self, path: str, number: int) -> None:
        """The same for a segment that is not found; one of a draft may be about to move."""
        if number and records.of_draft(path.rpartition("/")[0]) is None:
            self.check_path(number, path)

    def check_path(self, number: int, missing: str) -> None:
        """Raise StorageError, which names it, if a further path is not there. `missing`: what was looked for on it."""
        notes.check_there(self._first, number, self.paths()[number].store, missing)

    def is_link(self, path: str) -> bool:
        store, there = self._at(path)
        return store.is_link(there)

    def names(self, path: str = "") -> tuple[str, ...]:
        found = set(self._first.names(path))
        if not path and notes.is_bare(found):
            self._numbered()  # a further path may know that this one is not mounted
        if path and (segments := self.segments_of(path)) is not None:
            for number, one in self.paths().items():
                found |= set(one.store.names(segments)) if number else set()
        return tuple(sorted(found))

    def size(self, path: str) -> int:
        return self._asked(path, lambda store, there: store.size(there))

    def stamp(self, path: str) -> str | None:
        store, there = self._at(path)
        return store.stamp(there)

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        return self._asked(
            path, lambda store, there: store.read(there, offset=offset, length=length, bytes_max=bytes_max)
        )

    def _asked(self, path: str, ask: Callable[[Store, str], T]) -> T:
        number, there = self.place(path)
        try:
            return ask(self._store(number), there)
        except StorageError as error:
            if error.errno in _GONE:
                self._check_path_of(path, number)
            raise

    def make_directory(self, path: str = "") -> None:
        segments = records.of_draft(path)
        made: list[StripedPath] = []
        if segments is not None:
            self._note_paths()
            made = [
                one for number, one in self.paths().items()
                if number and one.is_usable and self._make_segments(one, segments)
            ]
        try:
            self._first.make_directory(path)
        except StorageError as error:
            if error.errno != errno.EEXIST:  # else another rank has made it
                for one in made:
                    with suppress(StorageError):  # safe: the next writer sweeps it
                        one.store.remove(segments or "")
            raise

    def _make_segments(self, path: StripedPath, segments: str) -> bool:
        """Make the directory of a draft's segments; where that is refused, they go to the first path.

        returns  whether it is new
        """
        try:
            if not path.store.exists():
                path.store.make_directory()
            path.store.make_directory(segments)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                path.failed(error)
            return False
        return True

    def remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        if not name.endswith(MANIFEST_NAME) and path_of(name) == 0:
            self._remove_segments_directories(path)
            self._first.remove(path)
            return
        if name == MANIFEST_NAME and records.of_draft(directory) is None:
            self._remove_segments(directory)  # first: only the manifest says where they are
        number, there = self.place(path)
        if not number or self._has_moved(directory):
            self._first.remove(path)
            return
        try:
            self.paths()[number].store.remove(there)
            if records.of_draft(directory) is not None:
                self.made(path, number)  # else a loss of power brings it back, beside a manifest that does not name it
        except StorageError as error:
            if error.errno not in _GONE or self._first.exists(f"{directory}/{MANIFEST_NAME}"):
                raise  # else it went with the manifest

    def _has_moved(self, directory: str) -> bool:
        """Whether a draft is none any more: its segments are those of the checkpoint that it has become, perhaps though
        the save that has renamed it has failed since, and gives it up.
        """
        return records.of_draft(directory) is not None and not self._first.exists(directory)

    def _remove_segments(self, directory: str) -> None:
        """Remove what further paths have of a checkpoint that is one no more. Raises StorageError if a path refuses."""
        segments = self.segments_of(directory)
        if segments is None:
            return
        for number, one in self.paths().items():
            if number and one.store.exists(segments):
                notes.remove_directory(one.store, segments)
            elif number and one.store.capabilities.needs_sync and one.store.exists():
                one.store.sync_directory()  # a writer that was killed may have removed them without that

    def _remove_segments_directories(self, directory: str) -> None:
        """Those of a draft that goes. Raises StorageError, ENOTEMPTY, while other ranks still write there."""
        segments = None if self._has_moved(directory) else records.of_draft(directory)
        for number, one in self.paths().items() if segments is not None else ():
            try:
                if number and one.store.exists(segments or ""):
                    one.store.remove(segments or "")
                    if one.store.capabilities.needs_sync:
                        one.store.sync_directory()  # as with the segments of a checkpoint
            except StorageError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                log.warning("%s/%s stays behind: %s", one.store.location, segments, error)
        self._unsynced.pop(directory, None)

    # Commit

    def put(self, path: str, data: bytes) -> None:
        store, there = self._at(path, is_new=True)
        store.put(there, data)

    def rename(self, source: str, target: str) -> None:
        if self.place(source)[0]:
            raise StorageError(
                f"cannot rename {self.location}/{source}", errno=errno.EOPNOTSUPP, reason="it is on another path",
                next="report this: it is a mistake in Flowstone",
            )
        self._first.rename(source, target)
        for moved in (source, target):
            self._directories.pop(moved, None)

    def link(self, source: str, target: str) -> None:
        number, there = self.place(source)
        if not number:
            self._first.link(source, target)
            return
        segments = self.segments_of(target.rpartition("/")[0])
        if segments is None:
            raise StorageError(
                f"cannot link {self.location}/{source}", errno=errno.EXDEV, reason=f"{target} is on another path",
                next="report this: it is a mistake in Flowstone",
            )
        self.paths()[number].store.link(there, f"{segments}/{target.rpartition('/')[2]}")
        self.made(target, number)

    def made(self, path: str, number: int) -> None:
        """A name in a draft's directory was made on a path, or removed there; that is not durable yet."""
        if number:
            self._unsynced.setdefault(path.rpartition("/")[0], set()).add(number)

    def brought(self, path: str, number: int) -> None:
        """What was made on a path is on another one now, durably."""
        self._unsynced.get(path.rpartition("/")[0], set()).discard(number)

    def sync_segments(self, directory: str, of: int | None = None) -> None:
        """See Spreads. `of`: on that path alone."""
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
        """Another job may have noted paths meanwhile. What is known of ours stays."""
        known, self._paths = self._paths or {}, None
        self._paths = {
            number: known[number] if number in known and known[number].store is path.store else path
            for number, path in self.paths().items()
        }
        mine = {id(path.store) for path in self._paths.values()}
        for path in known.values():
            if id(path.store) not in mine:
                path.store.close()

    def check_lock(self) -> None:
        self._first.check_lock()

    def unlock(self) -> None:
        self._first.unlock()

    def _note_paths(self) -> None:
        """Note the paths, on both sides, before anything is written there: by the one that holds the lock."""
        if self._is_noted:
            return
        try:
            self._first.check_lock()
        except FlowstoneError:
            return  # safe: another rank has it, and notes them
        identity = notes.identity_of(self._first)
        if identity is None:
            return  # safe: no store, no draft to be found again
        for number, one in self.paths().items():
            if number and one.writes and one.is_usable:
                try:
                    notes.note(self._first, one, identity)
                except StorageError as error:
                    one.failed(error)
        self._is_noted = all(one.is_usable for one in self.paths().values() if one.writes)

    # Bulk bytes

    def free_bytes(self) -> int:
        """How large a save may be, so that each path has room for its share."""
        room = []
        for number, weight in self.shares():
            try:
                room.append(int(self.paths()[number].store.free_bytes() / max(weight, 1e-6)))
            except StorageError as error:
                if not number:
                    raise
                self.paths()[number].failed(error)
        return min(room)

    def settings(self, direction: Direction) -> Settings:
        return self._first.settings(direction)

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> StripedWriting:
        from flowstone.store.striped.writing import StripedWriting  # imported here: it needs numpy

        return StripedWriting(self, files, rows, arena, pace, reserved=reserved)

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> StripedReading:
        from flowstone.store.striped.reading import StripedReading  # as above

        def opening(store: Parts, there: Sequence[str], of_path: int) -> OpenExtents:
            return store.open_extents(
                there, arena, of_path=of_path, wanted_bytes=wanted_bytes, past_cache=past_cache
            )

        return StripedReading(self, paths, rows, arena, opening, stop_at_bad=stop_at_bad, ahead=ahead)

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        store, there = self._at(path)
        return store.reads_past_cache(there, wanted_bytes)

    def append_to_new(self, path: str) -> Appending:
        return cast("Appends", self._first).append_to_new(path)

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        return cast("Appends", self._first).read_into(path, offset_bytes, target)

    def engine(self, queues: Sequence[_native.Engine], direction: Direction, arena: _native.Arena) -> _native.Engine:
        """One engine over these, whose numbers are the files' `of_path`; kept for the next job."""
        tuning = self.settings(direction).tuning
        request_bytes = min(tuning.request_bytes, arena.block_bytes)
        key = (request_bytes, *map(id, queues))
        with self._guard:
            if key not in self._engines:
                engine = _native.Engine(
                    backend="paths", queue_depth=min(QUEUE_DEPTH_MAX, tuning.queue_depth * len(queues)),
                    request_bytes=request_bytes, workers=tuning.workers, background=True, paths=queues,
                )
                self._engines[key] = engine, tuple(queues)
            return self._engines[key][0]

    def close(self) -> None:
        engines, self._engines = self._engines, {}
        for engine, _ in engines.values():
            engine.close()
        known = [path.store for path in (self._paths or {}).values()]
        for store in {id(one): one for one in (*(store for store, _ in self._listed), *known)}.values():
            store.close()

    def forget(self) -> None:
        """In a forked child: the threads are gone; if one of them held the lock, it stays locked, so replace it."""
        self._guard, self._engines = Lock(), {}
