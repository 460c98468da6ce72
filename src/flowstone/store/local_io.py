"""Writes segments into a local store, and reads ranges of files from it."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Sequence
from itertools import accumulate, chain, takewhile

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import POLL_S, READ_FILES_MAX, Direct
from flowstone.errors import FlowstoneError, StorageError
from flowstone.format.segment import path_of
from flowstone.store.base import FilePlan, Pace, ReadReceipt, Receipt
from flowstone.store.engines import EngineChoice
from flowstone.store.jobs import GAP_BYTES, ReservingWriteHandle, byte_range, errno_of, read_error
from flowstone.store.open_files import OpenFiles
from flowstone.store.os_errors import MORE_THREADS, explain, translated
from flowstone.store.system import System

_ELSEWHERE = {
    errno.ENOENT: "this file is on another path (disk) of a striped store: open the striped store, or copy the "
    "checkpoint with `flowstone pack`, which puts all its files into one directory"
}


class LocalWriteHandle(ReservingWriteHandle):
    """Writes the segments of one save, and owns their descriptors. The write starts when this is created. Raises an
    error if the system refuses to create the files.
    """

    def __init__(
        self, system: System, engines: EngineChoice, files: Sequence[FilePlan], rows: _native.WriteExtents,
        arena: _native.Arena, pace: Pace, *, reserved: bool = True,
    ) -> None:
        from flowstone.store.local_segments import (
            LocalSegments,  # imported here: a process that only loads does not need it
        )

        super().__init__(reserved=reserved)
        self._root, self._engines = engines.root, engines
        self._plans = files
        self._watch = engines.options.watch
        direct = engines.settings("write").direct_at(sum(file.bytes for file in files))
        self._segments = LocalSegments(system, engines, files, direct)
        try:
            if reserved:
                self._segments.reserve()
            self._running = engines.running("write", arena.block_bytes)
            # If an encoder decides a file's size, the file has no space yet. Touching memory that has none may end the
            # process.
            natives = [
                (opened.native(0 if file.header is not None else file.bytes), file.bytes)
                for opened, file in zip(self._segments.opened, files, strict=True)
            ]
            # Only this job writes these files, so the gaps between the places of tensors may be filled with zeros.
            with translated(self._root, "begin to write into", "", remedy=MORE_THREADS):
                self._job = self._running.engine.write(
                    arena, natives, rows, _native.WriteOptions(
                        gap_bytes=GAP_BYTES, blocks=pace.blocks, bytes_per_s=pace.bytes_per_s or 0,
                        cap_bytes_per_s=pace.cap or 0, watch=self._watch, files_ready=reserved,
                    ),
                )
        except BaseException:
            self._segments.close()
            raise

    def _reserve_files(self) -> None:
        self._segments.reserve()

    def receipt(self) -> Receipt:
        self._wait_for_all()
        begin = time.monotonic()
        try:
            error = self._error() or self._segments.make_durable(self._ends())
        finally:
            alignment = self._segments.alignment
            self._segments.close()
        synced = begin, time.monotonic()
        running = self._running
        io = self._io(
            running.engine.backend, running.settings, alignment=alignment, request_bytes=running.request_bytes,
            depth=running.queue_depth,
        )
        return self._receipt(error, io, synced)

    def stop(self) -> None:
        """Close the files once all writes have ended. Returns no result."""
        self._wait()
        self._segments.close()

    def _error(self) -> FlowstoneError | None:
        fault = self._job.fault
        if fault is not None and fault.operation != "capture":
            code = errno_of(fault)
            instead = None
            if code == fault.errno:
                instead = self._engines.adapt_to_failure(self._running, fault, direct=self._segments.alignment > 1)
            return explain(
                self._root, fault.operation, code, fault.path, reach=byte_range(fault),
                needed_bytes=self._segments.bytes, remedy=None if instead is None else f"save again: {instead}",
            )
        return self._early_end()


class LocalReadHandle:
    """Reads ranges of files for one load, and owns the descriptors. The read starts when this is created. Raises an
    error if the system refuses to open the files.

    Opens only files that are read. If they are more than may be open at once (READ_FILES_MAX), opens them in batches.
    Files whose chunks are computed from each other stay in one batch. Reading changes nothing on disk. So if the system
    refuses O_DIRECT or the engine in the middle of the read, everything is read again through the page cache, or with
    POSIX threads.
    """

    def __init__(
        self, engines: EngineChoice, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *,
        direct: Direct, stop_at_bad: bool, ahead: bool = False,
    ) -> None:
        self._root, self._engines, self._paths, self._rows, self._arena = engines.root, engines, paths, rows, arena
        self._direct, self._stop_at_bad, self._ahead = direct, stop_at_bad, ahead
        self._groups: list[list[int]] = rows.file_groups
        # how many groups of files were read, and how many further groups are open
        self._read_groups = self._open_groups = 0
        self._opened = OpenFiles()
        self._job: _native.ReadJob | None = None
        self._sums = _Sums()
        self._summed: _native.ReadJob | None = None  # the last job whose numbers are in _sums
        self._refusal: FlowstoneError | None = None  # the error of a retry, or of opening the next files
        self._cancelled = self._ended = False
        self._begin()

    def _begin(self) -> None:
        """Open the next batch of files, and start to read them."""
        try:
            self._running = self._engines.running("read")
            self._open()
            natives: list[_native.File | None] = [None] * len(self._paths)
            lot = self._groups[self._read_groups : self._read_groups + self._open_groups]
            for number, opened in zip(chain.from_iterable(lot), self._opened, strict=True):
                natives[number] = opened.native()
            with translated(self._root, "begin to read from", "", remedy=MORE_THREADS):
                self._job = self._running.engine.read(
                    self._arena, natives, self._rows, _native.ReadOptions(
                        stop_at_bad=self._stop_at_bad, in_place=self._is_in_place(),
                        request_bytes=self._running.request_bytes, ahead=self._ahead,
                    ),
                )
            if self._cancelled:  # by another thread, meanwhile
                self._job.cancel()
        except BaseException:
            if self._job is not None:  # so that the new job is stopped, even after an interrupt at this point
                self._job.cancel()
                while not self._job.wait(POLL_S):
                    pass
            self._opened.close()
            raise

    def _is_in_place(self) -> bool:
        """Whether to read directly into the memory to fill, instead of through the arena. The caller or the tuning
        decides. If neither does, True if the files are in memory (such as tmpfs): a direct read copies their bytes
        once, and a read through the arena copies them twice (docs/performance/in-place.md).
        """
        settings = self._running.settings
        if settings.tuning.in_place or settings.origin == "tuned" or "read_in_place" in settings.explicit:
            return settings.tuning.in_place
        return all(_native.is_byte_addressable(opened.fd) for opened in self._opened)

    def _open(self) -> None:
        self._open_groups = self._groups_within(_files_max())
        lot = self._groups[self._read_groups : self._read_groups + self._open_groups]
        for number in chain.from_iterable(lot):
            path = self._paths[number]
            try:
                with translated(self._root, "open", path, remedies=_ELSEWHERE if path_of(path) else {}):
                    fd, alignment = self._engines.open_to_read(
                        self._root / path, self._direct, self._opened.descriptors
                    )
            except StorageError as error:
                first = len(lot[0])
                if error.errno not in (errno.EMFILE, errno.ENFILE) or len(self._opened) < max(2, first):
                    raise
                # If fewer files can be open at once, some descriptors are left to other code of this process.
                self._open_groups = self._groups_within(len(self._opened) // 2)
                self._opened.close(leave=sum(map(len, lot[: self._open_groups])))
                return
            self._opened.add(self._root / path, fd, alignment)

    def _groups_within(self, files: int) -> int:
        """How many of the next groups have at most `files` files together; at least one group, even if it has more."""
        ends = accumulate(len(group) for group in self._groups[self._read_groups :])
        fitting = sum(1 for _ in takewhile(lambda end: end <= files, ends))
        return fitting or min(1, len(self._groups) - self._read_groups)

    def aim(self, rows: _native.ReadExtents) -> None:
        assert self._job is not None, "the constructor starts a job"
        self._rows, self._ahead = rows, False  # used by later jobs, which read the next files, or the same files again
        self._job.aim(rows)

    @property
    def done_bytes(self) -> int:
        return self._sums.done_bytes + (0 if self._job is None or self._job is self._summed else self._job.done_bytes)

    def wait(self, timeout_s: float) -> bool:
        assert self._job is not None, "the constructor starts a job"
        if not self._ended and self._job.wait(timeout_s):
            self._ended = not self._start_next(self._job)
        return self._ended

    def _start_next(self, job: _native.ReadJob) -> bool:
        """After a job has ended, start another one for the next files, or for the same files again. Returns False if no
        job is needed.
        """
        fault, direct = job.fault, any(opened.alignment > 1 for opened in self._opened)
        stopped = self._cancelled or job.cancelled
        if not stopped and fault is not None and self._engines.adapt_to_failure(
            self._running, fault, direct=direct
        ) is not None:
            self._sums.discount(job)
        else:
            self._sums.add(job)
            self._summed = job
            self._read_groups += self._open_groups
            is_bad = self._stop_at_bad and job.bad_chunks.size > 0
            if stopped or fault is not None or is_bad or self._read_groups >= len(self._groups):
                return False
        self._opened.close()
        try:
            self._begin()
        except FlowstoneError as error:
            self._refusal = error
            return False
        return True

    def cancel(self) -> None:
        self._cancelled = True
        if self._job is not None:
            self._job.cancel()

    def receipt(self) -> ReadReceipt:
        while not self.wait(POLL_S):
            pass
        self._opened.close()
        return self._sums.receipt(self._error())

    def _error(self) -> FlowstoneError | None:
        assert self._job is not None, "the constructor starts a job"
        fault = self._job.fault
        if self._refusal is not None:
            return self._refusal
        return read_error(self._root, fault, cancelled=self._cancelled or self._job.cancelled)


class _Sums:
    """Totals over all jobs of one read."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self._bad: list[NDArray[np.uint64]] = []
        self._touched: NDArray[np.bool_] | None = None
        self._requested = self._copied = self._direct = self._requests = 0
        self._spans: list[_native.SpanColumns] = []

    def discount(self, job: _native.ReadJob) -> None:
        """Record which memory a job has changed, and the job's times. Called by `add`; and alone, instead of `add`, for
        a failed job whose ranges are read again: that job's bytes are not counted.
        """
        self._touched = job.touched if self._touched is None else self._touched | job.touched
        self._spans.append(job.spans)

    def add(self, job: _native.ReadJob) -> None:
        self.discount(job)
        self.done_bytes += job.done_bytes
        self._bad.append(job.bad_chunks)
        self._requested += job.requested_bytes
        self._copied += job.copied_bytes
        self._direct += job.direct_bytes
        self._requests += job.requests

    def receipt(self, error: FlowstoneError | None) -> ReadReceipt:
        assert self._touched is not None, "a job has ended"
        bad = np.array(sorted({number for bad in self._bad for number in bad.tolist()}), np.uint64)
        return ReadReceipt(
            error, bad, self._touched, self._requested, self._copied, self._direct, self._requests, self._spans
        )


def _files_max() -> int:
    """How many files one read may have open. The other code of this process needs descriptors, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return READ_FILES_MAX if limit == resource.RLIM_INFINITY else max(1, min(READ_FILES_MAX, limit // 4))

