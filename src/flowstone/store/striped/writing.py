"""Segments of one save on their way to several paths, each through its own queue."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import msgspec

from flowstone import _native
from flowstone.config import MIB, POLL_S
from flowstone.errors import DamagedError, FlowstoneError, StorageError
from flowstone.format.digest import digest
from flowstone.log import log
from flowstone.store.base import FilePlan, Pace, Receipt
from flowstone.store.jobs import GAP_BYTES, ReservingWriting, code_of, reach
from flowstone.store.os_errors import MORE_THREADS, explain, translated
from flowstone.store.parts import Moving, OpenSegments
from flowstone.store.striped.elsewhere import copy_range, held_for_objects, other_path
from flowstone.store.striped.path import StripedPath, Striping

_COPIED_AT_ONCE_BYTES = 8 * MIB
_EVERY_GAP_BYTES = 1 << 40  # of an object every byte is written: gaps are zeros


class _Part(msgspec.Struct, eq=False):
    """Segments that lie on one path: their numbers in the save."""

    path: StripedPath
    numbers: list[int]
    opened: OpenSegments

    def native(self, number: int) -> _native.File:
        return self.opened.natives[self.numbers.index(number)]


class StripedWriting(ReservingWriting):
    """Segments of one save. Starts at once; raises if the first path refuses to create its own.

    What another path refuses goes to one of those that are left: segments that cannot be made or get no room, before a
    byte of them is written; what fails later, from the blocks that have it, and what is there already is read back and
    compared with the digests. Of a bucket's incomplete objects nothing comes back: what they are to have is kept here
    until they are complete. Only where it does not come back does the save fail.
    """

    def __init__(
        self, store: Striping, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena,
        pace: Pace, *, reserved: bool,
    ) -> None:
        super().__init__(reserved=reserved)
        self._store, self._plans, self._arena = store, files, arena
        self._root = Path(store.location)
        self._settings = store.settings("write")
        self._watch, self._held = store.watch, held_for_objects(store, files, arena)
        self._moving = Lock()  # held while segments move; guards the next
        self._instead: dict[int, OpenSegments] = {}  # on another path, by the number of a segment that moves
        self._targets: dict[int, StripedPath] = {}  # that path
        self._causes: dict[int, FlowstoneError] = {}  # why they move
        self._unwritten: set[int] = set()  # segments of which the failed path has no byte
        self._parts: list[_Part] = []
        try:
            self._open(reserved=reserved)
            self._engine = store.engine([part.opened.engine for part in self._parts], "write", arena)
            self._before = self._engine.traffic("write")
            self._job = self._begin(rows, pace, files_ready=reserved)
        except BaseException:
            for part in self._parts:
                part.opened.close()
            raise

    def _begin(self, rows: _native.WriteExtents, pace: Pace, *, files_ready: bool) -> _native.WriteJob:
        natives = {number: part.native(number) for part in self._parts for number in part.numbers}
        is_plain = all(part.path.store.capabilities.directory_sync for part in self._parts)
        with translated(self._root, "begin to write into", "", remedy=MORE_THREADS):
            job = self._engine.write(
                self._arena, [(natives[number], file.bytes) for number, file in enumerate(self._plans)], rows,
                gap_bytes=GAP_BYTES if is_plain else _EVERY_GAP_BYTES, blocks=self._blocks(pace),
                bytes_per_s=pace.bytes_per_s or 0, cap_bytes_per_s=pace.cap or 0, watch=self._watch,
                files_ready=files_ready,
            )
        try:
            for part in self._parts:
                part.opened.begin(job, part.numbers)
        except BaseException:
            job.cancel()
            while not job.wait(POLL_S):
                pass
            raise
        return job

    def _blocks(self, pace: Pace) -> int | None:
        """How many lazy windows may use: what is held for objects does not slow down the others."""
        buckets = [part for part in self._parts if not part.path.store.capabilities.directory_sync]
        held_bytes = len(buckets) * self._held[1]
        return None if pace.blocks is None else pace.blocks + held_bytes // self._arena.block_bytes

    # Where they lie

    def _open(self, *, reserved: bool) -> None:
        """Create all segments: those of each path there or, if that is refused, on the first one."""
        by_path: dict[int, list[int]] = {}
        for number, file in enumerate(self._plans):
            by_path.setdefault(self._store.place(file.path, is_new=True)[0], []).append(number)
        refused: list[int] = []
        for of_path in sorted(by_path, reverse=True):  # the first path last: it gets what others refuse
            if not of_path:
                continue
            path, numbers = self._store.paths()[of_path], by_path[of_path]
            if not path.is_usable:  # it has failed since the plan was made
                refused += numbers
                continue
            try:
                part = self._part(path, numbers)
                self._parts.append(part)
                if reserved:
                    part.opened.reserve()
            except StorageError as error:
                if error.errno == errno.EEXIST:
                    raise
                path.failed(error)
                if self._parts and self._parts[-1].path is path:
                    self._parts.pop().opened.close()
                    self._remove(numbers)
                refused += numbers
        rest = self._open_elsewhere(refused, reserved=reserved)
        self._parts.append(self._part(self._store.paths()[0], sorted([*by_path.get(0, ()), *rest])))
        if reserved:
            self._parts[-1].opened.reserve()

    def _open_elsewhere(self, refused: Sequence[int], *, reserved: bool) -> list[int]:
        """Create segments of paths that have failed on those that are left; what is left for the first path."""
        chosen: dict[int, list[int]] = {}
        for number in refused:
            own = self._store.place(self._plans[number].path, is_new=True)[0]
            chosen.setdefault(other_path(self._store, self._plans[number].path, own), []).append(number)
        rest = chosen.pop(0, [])
        for of_path, numbers in chosen.items():
            path = self._store.paths()[of_path]
            try:
                self._parts.append(self._part(path, numbers))
                if reserved:
                    self._parts[-1].opened.reserve()
            except StorageError as error:
                if error.errno == errno.EEXIST:
                    raise
                path.failed(error)
                if self._parts and self._parts[-1].path is path and self._parts[-1].numbers is numbers:
                    self._parts.pop().opened.close()
                    self._remove(numbers, of_path)
                rest += numbers
        return rest

    def _part(self, path: StripedPath, numbers: list[int]) -> _Part:
        opened = path.store.open_segments(
            [self._planned(number, path.number) for number in numbers], self._arena, of_path=len(self._parts),
            moving=Moving(*self._held, self._store.location) if path.number else None,
        )
        for number in numbers:
            self._store.made(self._plans[number].path, path.number)
        return _Part(path, numbers, opened)

    def _planned(self, number: int, of_path: int) -> FilePlan:
        """A segment as its path knows it."""
        file = self._plans[number]
        if not of_path:
            return file
        return msgspec.structs.replace(file, path=self._store.place(file.path, is_new=True)[1])

    def _remove(self, numbers: Sequence[int], of_path: int | None = None) -> None:
        """Remove what a path (None: that of its name) has of segments that are on another one now; it may refuse."""
        for number in numbers:
            own, there = self._store.place(self._plans[number].path, is_new=True)
            try:
                self._store.paths()[own if of_path is None else of_path].store.remove(there)
            except FlowstoneError:
                continue  # safe: nothing refers to it, and it goes with the checkpoint

    # Room

    def _reserve_files(self) -> None:
        for part in self._parts:
            self._reserve_part(part)

    def _reserve_part(self, part: _Part) -> None:
        try:
            part.opened.reserve()
        except StorageError as error:
            if not part.path.number:
                raise
            part.path.failed(error)
            for number in part.numbers:
                self._unwritten.add(number)
                self._move(part, number, error)

    # What a path refuses

    def _move(self, part: _Part, number: int, cause: FlowstoneError) -> None:
        """From now on a segment's bytes go into a file on another path. Raises StorageError if the first path, which is
        asked last, has no room either.
        """
        opened = self._open_instead(part, number)
        self._causes[number] = cause
        self._engine.move(part.native(number), opened.natives[0])

    def _open_instead(self, part: _Part, number: int) -> OpenSegments:
        """Create the file that a segment moves into, with its room. From further path to further path it moves once: a
        reader that finds it beside the first path, and beside its own, takes that.
        """
        queues = {one.path.number: at for at, one in enumerate(self._parts)}  # of paths that this save writes
        path = self._plans[number].path
        is_own = self._store.place(path, is_new=True)[0] == part.path.number
        chosen = other_path(self._store, path, part.path.number) if is_own else 0
        for of_path in (chosen, 0) if chosen in queues and chosen else (0,):
            target = self._store.paths()[of_path]
            file = self._planned(number, of_path)
            try:
                opened = target.store.open_segments([file], self._arena, of_path=queues[of_path], moving=None)
                try:
                    opened.reserve()
                except BaseException:
                    opened.close()
                    target.store.remove(file.path)
                    raise
            except StorageError as error:
                if not of_path:
                    raise
                target.failed(error)
                continue
            self._instead[number], self._targets[number] = opened, target
            return opened
        raise AssertionError("the first path has been asked")

    def _look(self) -> None:
        """Move the segments whose writes have failed, or let them fail where that is impossible too."""
        if not self._moving.acquire(blocking=False):
            return  # another thread is looking
        try:
            for part in self._parts[:-1]:
                for at, number in enumerate(part.numbers):
                    fault = self._engine.failed(part.native(number))
                    if fault is None or number in self._instead:
                        continue
                    error = self._fault_of(part, at, fault)
                    part.path.failed(error)
                    try:
                        if self._job.cancelled or self._job.fault is not None:
                            raise error
                        self._move(part, number, error)
                    except BaseException:
                        self._causes[number] = error
                        self._engine.refuse(part.native(number))
                        raise
        except FlowstoneError as error:
            log.warning("%s cannot take what a path has refused: %s", self._store.location, error)
        finally:
            self._moving.release()

    def _fault_of(self, part: _Part, at: int, fault: _native.Fault) -> FlowstoneError:
        """The error for a fault of a path's file."""
        return part.opened.refusal(at) or explain(
            part.path.root, fault.operation, code_of(fault), fault.path, reach=reach(fault)
        )

    def _until(self, is_over: Callable[[float], bool]) -> None:
        while not is_over(POLL_S):
            self._look()

    def wait_early(self) -> None:
        self._until(self._job.wait_early)

    def wait_queued(self) -> None:
        self._until(self._job.wait_queued)

    def wait_captured(self) -> None:
        self._until(self._job.wait_captured)

    def _wait(self) -> None:
        self._until(self._job.wait)

    def receipt(self) -> Receipt:
        self._wait_for_all()
        begin = time.monotonic()
        try:
            error = self._error() or self._make_durable()
        finally:
            self._let_go()
        numbers = [part.path.number for part in self._parts]
        self._store.measure(self._before, self._engine.traffic("write"), numbers)
        tuning = self._settings.tuning
        io = self._io(
            self._backend(), self._settings, alignment=self._alignment(), request_bytes=tuning.request_bytes,
            depth=tuning.queue_depth,
        )
        return self._receipt(error, io, (begin, time.monotonic()))

    def _backend(self) -> str:
        found = dict.fromkeys(part.opened.engine.backend for part in self._parts if part.numbers)
        return "+".join("objects" if one == "caller" else one for one in found)

    def _alignment(self) -> int:
        return min((native.alignment for part in self._parts for native in part.opened.natives), default=1)

    def _error(self) -> FlowstoneError | None:
        """Why the job has ended early, if it did; the path that is to blame is left out from the next save on."""
        for part in self._parts:
            if (told := part.opened.error()) is not None:
                part.path.failed(told)
                return told
        fault = self._job.fault
        if fault is not None and fault.operation != "capture":
            for part in self._parts:
                for at, native in enumerate(part.opened.natives):
                    if native.path != fault.path:
                        continue
                    error = self._fault_of(part, at, fault)
                    if part.path.number:
                        part.path.failed(error)
                    return error
        return self._early_end()

    # Durable

    def _make_durable(self) -> FlowstoneError | None:
        """Sync all paths at once; what one of them cannot make durable is brought to another one."""
        ends = self._ends()
        with ThreadPoolExecutor(len(self._parts), thread_name_prefix="flowstone-path") as threads:
            found = list(threads.map(lambda part: self._end(part, ends), self._parts))
        return next((error for error in found if error is not None), None)

    def _end(self, part: _Part, ends: Sequence[int]) -> FlowstoneError | None:
        """On a thread of its own."""
        stays = not any(number in self._instead for number in part.numbers)
        error = part.opened.end(self._job, [ends[number] for number in part.numbers])
        if not part.path.store.capabilities.directory_sync:
            return error or self._end_uploads(part, ends)
        if error is None and stays:
            try:
                self._sync_names(part)
            except FlowstoneError as refusal:
                error = refusal
        if error is None and stays:
            if part.numbers:
                part.path.worked()
            return None
        if not part.path.number:
            return error
        if stays and error is not None:
            part.path.failed(error)
        error = self._bring_all(part, part.numbers, ends, error)
        if error is None:
            self._remove(part.numbers, part.path.number)
        return error

    def _end_uploads(self, part: _Part, ends: Sequence[int]) -> FlowstoneError | None:
        """Objects that are complete stay. What keeps the name of another one goes with the checkpoint."""
        refused = {
            number: error for at, number in enumerate(part.numbers) if (error := part.opened.refusal(at)) is not None
        }
        if not refused:
            part.path.worked()
            return None
        if not any(number in self._causes for number in refused):
            part.path.failed(next(iter(refused.values())))
        return self._bring_all(part, [*refused], ends, next(iter(refused.values())))

    def _sync_names(self, part: _Part) -> None:
        if part.path.number:
            for directory in {self._plans[number].path.rpartition("/")[0] for number in part.numbers}:
                self._store.sync_segments(directory, of=part.path.number)

    def _bring_all(
        self, part: _Part, numbers: Sequence[int], ends: Sequence[int], cause: FlowstoneError | None
    ) -> FlowstoneError | None:
        """Bring segments of a failed path to others."""
        for number in numbers:
            try:
                if number not in self._instead:
                    self._open_instead(part, number)
                moved = self._engine.forget(part.native(number)) if number in self._causes else []
                if number not in self._unwritten:
                    self._bring(part, number, ends[number], moved)
                error = self._instead[number].end(self._job, [ends[number]])
                if error is None:
                    error = self._check(number)
                if error is None:
                    self._sync_target(number)
            except OSError as refusal:
                error = explain(part.path.root, "read back", refusal.errno or 0, part.native(number).path)
            except FlowstoneError as refusal:
                error = refusal
            if error is not None:
                log.warning("what is on %s does not come back: %s", part.path.store.location, error)
                return self._causes.get(number) or cause or error
        for number in numbers:
            self._store.brought(self._plans[number].path, part.path.number)
        return None

    def _sync_target(self, number: int) -> None:
        """Make the new name durable. What else that path syncs may have come before it was made."""
        target = self._targets[number]
        if target.number:
            target.store.sync_directory(self._planned(number, target.number).path.rpartition("/")[0])
            target.store.sync_directory()

    def _bring(self, part: _Part, number: int, size: int, moved: Sequence[tuple[int, int]]) -> None:
        """Copy what the failed path has of a segment, but for the ranges that were moved, into its new file.

        raises  OSError
        """
        at_part, target = part.numbers.index(number), self._instead[number].natives[0].path
        at, gaps = 0, []
        for begin, end in [*sorted(moved), (size, size)]:
            if at < begin:
                gaps.append((at, min(begin, size)))
            at = max(at, end)
        with (
            mmap.mmap(-1, _COPIED_AT_ONCE_BYTES) as room, part.opened.open_written(at_part) as old,
            open(target, "r+b", 0) as new,
        ):
            view = memoryview(room)
            try:
                for begin, end in gaps:
                    copy_range(old.fileno(), new.fileno(), begin, end, view)
                os.fsync(new.fileno())
            finally:
                view.release()

    def _check(self, number: int) -> FlowstoneError | None:
        """Whether the file on the other path is what was to be written."""
        file, path = self._plans[number], self._instead[number].natives[0].path
        with open(path, "rb", 0) as opened:
            bad = self._job.first_bad(number, opened.fileno())
            if bad is None and file.begins is not None and digest(opened.read(file.begins[0])) != file.begins[1]:
                bad = 0
        return None if bad is None else DamagedError(
            f"{path} is not what was written", range=f"from byte {bad} on", next="save again; the path is left out"
        )

    def _let_go(self) -> None:
        for part in self._parts[:-1]:
            for number in part.numbers:
                self._engine.forget(part.native(number))
        for opened in (*(part.opened for part in self._parts), *self._instead.values()):
            opened.close()

    def stop(self) -> None:
        """Let go of the files once no byte moves any more, without a receipt."""
        self._wait()
        self._let_go()

    def cancel(self) -> None:
        super().cancel()
        for part in self._parts[:-1]:
            for number in part.numbers:
                if self._engine.failed(part.native(number)) is not None:
                    self._engine.refuse(part.native(number))

    def __del__(self) -> None:
        """Nothing may wait for a decision that will not come."""
        if hasattr(self, "_job") and not self._job.wait(0):
            self.cancel()
