"""Write the segments (data files) of one save to several paths, each path through its own queue of requests."""

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

from flowstone._native import Arena, Fault, File, WriteExtents, WriteJob, WriteOptions
from flowstone.config import MIB, POLL_S
from flowstone.errors import DamagedError, FlowstoneError, StorageError
from flowstone.format.digest import digest
from flowstone.log import log
from flowstone.store.base import FilePlan, Pace, Receipt
from flowstone.store.jobs import GAP_BYTES, ReservingWriteHandle, byte_range, errno_of
from flowstone.store.os_errors import MORE_THREADS, explain, translated
from flowstone.store.striped.fallback_path import choose_fallback_path, copy_range, held_for_objects
from flowstone.store.striped.path import PathProvider, StripedPath
from flowstone.store.striped.stripe_member import FailoverLimits, OpenSegments

_COPIED_AT_ONCE_BYTES = 8 * MIB
# larger than any gap between two ranges, so that gaps are written, too, as zeros
_EVERY_GAP_BYTES = 1 << 40


class _Part(msgspec.Struct, eq=False):
    """The segments that are written to one path. `numbers`: their numbers in the save."""

    path: StripedPath
    numbers: list[int]
    opened: OpenSegments

    def native(self, number: int) -> File:
        return self.opened.natives[self.numbers.index(number)]


class StripedWriteHandle(ReservingWriteHandle):
    """The write of one save's segments to several paths. Starts when it is created; raises an error if the first path
    cannot create its segments.

    If another path cannot create or reserve a segment, the segment moves to a path that works, before any byte is
    written. If a write fails later, the rest of the segment is written to a path that works. The bytes that were
    already written are read from the failed path, copied, and compared with the digests. An incomplete object in a
    bucket cannot be read, so its bytes are kept in memory, or in a temporary file, until it is complete. The save fails
    only if bytes cannot be read.
    """

    def __init__(
        self, store: PathProvider, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena,
        pace: Pace, *, reserved: bool,
    ) -> None:
        super().__init__(reserved=reserved)
        self._store, self._plans, self._arena = store, files, arena
        self._root = Path(store.location)
        self._settings = store.settings("write")
        self._watch, self._held = store.watch, held_for_objects(store, files, arena)
        # held while segments move; guards the next four attributes, whose keys are numbers of moving segments
        self._moving = Lock()
        self._instead: dict[int, OpenSegments] = {}  # the segment's file on another path
        self._targets: dict[int, StripedPath] = {}  # the path of that file
        self._causes: dict[int, FlowstoneError] = {}  # why the segment moves
        self._unwritten: set[int] = set()  # segments of which the failed path has no bytes
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

    def _begin(self, rows: WriteExtents, pace: Pace, *, files_ready: bool) -> WriteJob:
        natives = {number: part.native(number) for part in self._parts for number in part.numbers}
        is_plain = all(part.path.store.capabilities.directory_sync for part in self._parts)
        with translated(self._root, "begin to write into", "", remedy=MORE_THREADS):
            job = self._engine.write(
                self._arena, [(natives[number], file.bytes) for number, file in enumerate(self._plans)], rows,
                WriteOptions(
                    gap_bytes=GAP_BYTES if is_plain else _EVERY_GAP_BYTES, blocks=self._blocks(pace),
                    bytes_per_s=pace.bytes_per_s or 0, cap_bytes_per_s=pace.cap or 0, watch=self._watch,
                    files_ready=files_ready,
                ),
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
        """How many blocks may be used by data that is captured after `save` has returned. Includes the blocks that may
        be kept for incomplete objects.
        """
        buckets = [part for part in self._parts if not part.path.store.capabilities.directory_sync]
        held_bytes = len(buckets) * self._held[1]
        return None if pace.blocks is None else pace.blocks + held_bytes // self._arena.block_bytes

    # Opening

    def _open(self, *, reserved: bool) -> None:
        """Create all segments, each on its own path; if that fails, on another path."""
        by_path: dict[int, list[int]] = {}
        for number, file in enumerate(self._plans):
            by_path.setdefault(self._store.locate(file.path, is_new=True)[0], []).append(number)
        refused: list[int] = []
        # the first path comes last, as it gets the segments that other paths cannot take
        for of_path in sorted(by_path, reverse=True):
            if not of_path:
                continue
            path, numbers = self._store.paths()[of_path], by_path[of_path]
            if not path.is_usable:  # the path has failed since the plan was made
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
                path.mark_failed(error)
                if self._parts and self._parts[-1].path is path:
                    self._parts.pop().opened.close()
                    self._remove(numbers)
                refused += numbers
        rest = self._open_elsewhere(refused, reserved=reserved)
        self._parts.append(self._part(self._store.paths()[0], sorted([*by_path.get(0, ()), *rest])))
        if reserved:
            self._parts[-1].opened.reserve()

    def _open_elsewhere(self, refused: Sequence[int], *, reserved: bool) -> list[int]:
        """Create the segments of failed paths on paths that work. Returns the numbers of the segments that are left for
        the first path.
        """
        chosen: dict[int, list[int]] = {}
        for number in refused:
            own = self._store.locate(self._plans[number].path, is_new=True)[0]
            chosen.setdefault(choose_fallback_path(self._store, self._plans[number].path, own), []).append(number)
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
                path.mark_failed(error)
                if self._parts and self._parts[-1].path is path and self._parts[-1].numbers is numbers:
                    self._parts.pop().opened.close()
                    self._remove(numbers, of_path)
                rest += numbers
        return rest

    def _part(self, path: StripedPath, numbers: list[int]) -> _Part:
        opened = path.store.open_segments(
            [self._planned(number, path.number) for number in numbers], self._arena, of_path=len(self._parts),
            moving=FailoverLimits(*self._held, self._store.location) if path.number else None,
        )
        for number in numbers:
            self._store.mark_unsynced(self._plans[number].path, path.number)
        return _Part(path, numbers, opened)

    def _planned(self, number: int, of_path: int) -> FilePlan:
        """The plan of segment `number`, with its name on path `of_path`."""
        file = self._plans[number]
        if not of_path:
            return file
        return msgspec.structs.replace(file, path=self._store.locate(file.path, is_new=True)[1])

    def _remove(self, numbers: Sequence[int], of_path: int | None = None) -> None:
        """Remove the files of segments that have moved to another path. `of_path`: remove them from this path; None:
        from each segment's own path.
        """
        for number in numbers:
            own, name = self._store.locate(self._plans[number].path, is_new=True)
            try:
                self._store.paths()[own if of_path is None else of_path].store.remove(name)
            except FlowstoneError:
                continue  # nothing refers to the file, and it is removed with the checkpoint

    # Reserving

    def _reserve_files(self) -> None:
        for part in self._parts:
            self._reserve_part(part)

    def _reserve_part(self, part: _Part) -> None:
        try:
            part.opened.reserve()
        except StorageError as error:
            if not part.path.number:
                raise
            part.path.mark_failed(error)
            for number in part.numbers:
                self._unwritten.add(number)
                self._move(part, number, error)

    # Moving

    def _move(self, part: _Part, number: int, cause: FlowstoneError) -> None:
        """Write the rest of a segment into a file on another path. Raises StorageError if no path has space. The first
        path is tried last.
        """
        opened = self._open_instead(part, number)
        self._causes[number] = cause
        self._engine.move(part.native(number), opened.natives[0])

    def _open_instead(self, part: _Part, number: int) -> OpenSegments:
        """On another path, create the file for a segment whose path has failed, and reserve its space.

        A segment may move twice: to another path, and from there only to the first path. Readers search the first path,
        then the others.
        """
        # number of a path of this save -> its queue
        queues = {candidate.path.number: queue for queue, candidate in enumerate(self._parts)}
        path = self._plans[number].path
        is_own = self._store.locate(path, is_new=True)[0] == part.path.number
        chosen = choose_fallback_path(self._store, path, part.path.number) if is_own else 0
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
                target.mark_failed(error)
                continue
            self._instead[number], self._targets[number] = opened, target
            return opened
        raise AssertionError("opening a file on the first path neither failed nor returned a file")

    def _move_failed(self) -> None:
        """Move segments whose writes have failed. If a segment cannot move, the whole write fails."""
        if not self._moving.acquire(blocking=False):
            return  # another thread moves the segments
        try:
            for part in self._parts[:-1]:
                for index, number in enumerate(part.numbers):
                    fault = self._engine.failed(part.native(number))
                    if fault is None or number in self._instead:
                        continue
                    error = self._fault_of(part, index, fault)
                    part.path.mark_failed(error)
                    try:
                        if self._job.cancelled or self._job.fault is not None:
                            raise error
                        self._move(part, number, error)
                    except BaseException:
                        self._causes[number] = error
                        self._engine.refuse(part.native(number))
                        raise
        except FlowstoneError as error:
            log.warning("%s: cannot move a file from a failed path to another path: %s", self._store.location, error)
        finally:
            self._moving.release()

    def _fault_of(self, part: _Part, index: int, fault: Fault) -> FlowstoneError:
        """The error for a fault of a file on a path."""
        return part.opened.refusal(index) or explain(
            part.path.root, fault.operation, errno_of(fault), fault.path, reach=byte_range(fault)
        )

    def _until(self, is_over: Callable[[float], bool]) -> None:
        while not is_over(POLL_S):
            self._move_failed()

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
            self._release()
        numbers = [part.path.number for part in self._parts]
        self._store.measure(self._before, self._engine.traffic("write"), numbers)
        tuning = self._settings.tuning
        io = self._io(
            self._backend(), self._settings, alignment=self._alignment(), request_bytes=tuning.request_bytes,
            depth=tuning.queue_depth,
        )
        return self._receipt(error, io, (begin, time.monotonic()))

    def _backend(self) -> str:
        backends = dict.fromkeys(part.opened.engine.backend for part in self._parts if part.numbers)
        return "+".join("objects" if backend == "caller" else backend for backend in backends)

    def _alignment(self) -> int:
        return min((native.alignment for part in self._parts for native in part.opened.natives), default=1)

    def _error(self) -> FlowstoneError | None:
        """The error that ended the job early, if any. The path that caused it is not used for the next saves."""
        for part in self._parts:
            if (failure := part.opened.error()) is not None:
                part.path.mark_failed(failure)
                return failure
        fault = self._job.fault
        if fault is not None and fault.operation != "capture":
            for part in self._parts:
                for index, native in enumerate(part.opened.natives):
                    if native.path != fault.path:
                        continue
                    error = self._fault_of(part, index, fault)
                    if part.path.number:
                        part.path.mark_failed(error)
                    return error
        return self._early_end()

    # Making the segments durable

    def _make_durable(self) -> FlowstoneError | None:
        """Sync all paths concurrently. Segments that a path cannot make durable move to another path."""
        ends = self._ends()
        with ThreadPoolExecutor(len(self._parts), thread_name_prefix="flowstone-path") as threads:
            errors = list(threads.map(lambda part: self._end(part, ends), self._parts))
        return next((error for error in errors if error is not None), None)

    def _end(self, part: _Part, ends: Sequence[int]) -> FlowstoneError | None:
        """End the write to one path. Runs on a separate thread."""
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
                part.path.mark_working()
            return None
        if not part.path.number:
            return error
        if stays and error is not None:
            part.path.mark_failed(error)
        error = self._copy_all(part, part.numbers, ends, error)
        if error is None:
            self._remove(part.numbers, part.path.number)
        return error

    def _end_uploads(self, part: _Part, ends: Sequence[int]) -> FlowstoneError | None:
        """End the uploads to a bucket. If the upload of a segment has failed, the segment is moved to another path. The
        small object that reserves the segment's name stays in the bucket until the checkpoint is removed.

        ends     the length of each segment of the save, in bytes
        returns  an error if a segment could not be moved
        """
        refused = {
            number: error for index, number in enumerate(part.numbers)
            if (error := part.opened.refusal(index)) is not None
        }
        if not refused:
            part.path.mark_working()
            return None
        if not any(number in self._causes for number in refused):
            part.path.mark_failed(next(iter(refused.values())))
        return self._copy_all(part, [*refused], ends, next(iter(refused.values())))

    def _sync_names(self, part: _Part) -> None:
        if part.path.number:
            for directory in {self._plans[number].path.rpartition("/")[0] for number in part.numbers}:
                self._store.sync_segments(directory, of=part.path.number)

    def _copy_all(
        self, part: _Part, numbers: Sequence[int], ends: Sequence[int], cause: FlowstoneError | None
    ) -> FlowstoneError | None:
        """Complete the moves of a failed path's segments to other paths: copy the bytes that only the failed path has.
        """
        for number in numbers:
            try:
                if number not in self._instead:
                    self._open_instead(part, number)
                moved = self._engine.forget(part.native(number)) if number in self._causes else []
                if number not in self._unwritten:
                    self._copy_written(part, number, ends[number], moved)
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
                log.warning(
                    "cannot read written files back from %s, which has failed: %s", part.path.store.location, error
                )
                return self._causes.get(number) or cause or error
        for number in numbers:
            self._store.mark_synced(self._plans[number].path, part.path.number)
        return None

    def _sync_target(self, number: int) -> None:
        """Make the name of a moved segment durable. The sync of its new path may have been before the name was created.
        """
        target = self._targets[number]
        if target.number:
            target.store.sync_directory(self._planned(number, target.number).path.rpartition("/")[0])
            target.store.sync_directory()

    def _copy_written(self, part: _Part, number: int, size: int, moved: Sequence[tuple[int, int]]) -> None:
        """Copy a segment's bytes from the failed path into its new file, except for the ranges `moved`, which the new
        file already has.

        raises  OSError
        """
        index, target = part.numbers.index(number), self._instead[number].natives[0].path
        offset, gaps = 0, []
        for begin, end in [*sorted(moved), (size, size)]:
            if offset < begin:
                gaps.append((offset, min(begin, size)))
            offset = max(offset, end)
        with (
            mmap.mmap(-1, _COPIED_AT_ONCE_BYTES) as buffer, part.opened.open_written(index) as old,
            open(target, "r+b", 0) as new,
        ):
            view = memoryview(buffer)
            try:
                for begin, end in gaps:
                    copy_range(old.fileno(), new.fileno(), begin, end, view)
                os.fsync(new.fileno())
            finally:
                view.release()

    def _check(self, number: int) -> FlowstoneError | None:
        """Compare the file of a moved segment with the digests. Returns an error if it differs."""
        file, path = self._plans[number], self._instead[number].natives[0].path
        with open(path, "rb", 0) as opened:
            bad = self._job.first_bad(number, opened.fileno())
            if bad is None and file.begins is not None and digest(opened.read(file.begins[0])) != file.begins[1]:
                bad = 0
        return None if bad is None else DamagedError(
            f"{path} differs from the saved bytes", range=f"from byte {bad} on",
            next="save again; the next save does not use the failed path",
        )

    def _release(self) -> None:
        for part in self._parts[:-1]:
            for number in part.numbers:
                self._engine.forget(part.native(number))
        for opened in (*(part.opened for part in self._parts), *self._instead.values()):
            opened.close()

    def stop(self) -> None:
        """End the write without a result: close the files once no requests are running."""
        self._wait()
        self._release()

    def cancel(self) -> None:
        super().cancel()
        for part in self._parts[:-1]:
            for number in part.numbers:
                if self._engine.failed(part.native(number)) is not None:
                    self._engine.refuse(part.native(number))

    def __del__(self) -> None:
        """Cancel a running job. Its failed requests would otherwise wait forever for a decision on their segments."""
        if hasattr(self, "_job") and not self._job.wait(0):
            self.cancel()
