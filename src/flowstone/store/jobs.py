"""Reads and writes of the native engine (jobs) as a store's ReadHandle and WriteHandle. All stores use these classes.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from flowstone._native import Fault, ReadExtents, ReadJob, WriteJob
from flowstone.config import KIB, POLL_S, Watch
from flowstone.errors import CancelledError, DamagedError, FlowstoneError, StateChangedError
from flowstone.format.manifest import IoRecord
from flowstone.store.base import EncodedChunks, FilePlan, ReadReceipt, Receipt, WatchCoverage
from flowstone.store.os_errors import explain
from flowstone.store.settings import Settings

GAP_BYTES = 64 * KIB  # up to this length, writing the padding between two ranges costs less than a second request


class WriteWaits:
    """The methods of a WriteHandle that wait for its native `_job`."""

    _job: WriteJob
    _watch: Watch
    _plans: Sequence[FilePlan]

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    @property
    def watched(self) -> WatchCoverage:
        job = self._job
        row, reason = job.sampled_first or (None, None)
        return WatchCoverage(job.exact_bytes, job.sampled_bytes, job.huge_bytes, self._watch == "exact", row, reason)

    def cancel(self) -> None:
        self._job.cancel()

    def expedite(self) -> None:
        self._job.expedite()

    def wait_early(self) -> None:
        while not self._job.wait_early(POLL_S):
            pass

    def wait_queued(self) -> None:
        while not self._job.wait_queued(POLL_S):
            pass

    def wait_captured(self) -> None:
        while not self._job.wait_captured(POLL_S):
            pass  # returns to Python from time to time, so that Ctrl-C works

    def _wait(self) -> None:
        while not self._job.wait(POLL_S):
            pass

    def _io(self, backend: str, settings: Settings, *, alignment: int, request_bytes: int, depth: int) -> IoRecord:
        """The manifest's record of how the segments were written. Call this once the job has ended."""
        job, watched = self._job, self.watched
        return IoRecord(
            backend=backend, alignment=alignment, request_bytes=request_bytes, queue_depth=depth,
            workers=settings.tuning.workers, copied_bytes=job.copied_bytes,
            requests=job.requests, origin=settings.origin, explicit=settings.explicit,
            exact_bytes=watched.exact_bytes, sampled_bytes=watched.sampled_bytes, sampled_because=watched.reason,
            huge_bytes=watched.huge_bytes,
        )

    def _receipt(
        self, error: FlowstoneError | None, io: IoRecord, synced: tuple[float, float] | None = None
    ) -> Receipt:
        spans = [self._job.spans]
        if error is not None:
            return Receipt(error, np.zeros(0, np.uint64), io, spans=spans)
        stored = self._job.stored
        ends = zip(self._plans, self._job.file_ends, strict=False)
        sizes = [plan.bytes if plan.header is None else end for plan, end in ends]
        encoded = None if stored is None else EncodedChunks(*stored, sizes)
        return Receipt(None, self._job.digests, io, encoded, spans, synced)


class ReservingWriteHandle(WriteWaits):
    """A WriteHandle of one job whose files may get their space later: the first thread that calls `reserve` allocates
    it.
    """

    _root: Path

    def __init__(self, *, reserved: bool) -> None:
        self._reserving = Lock()  # held by the thread that reserves space; guards the next two attributes
        self._reserved = reserved
        self._refusal: BaseException | None = None  # the exception of `_reserve_files`

    def _reserve_files(self) -> None:
        """Reserve the space of all files. Raises FlowstoneError."""
        raise NotImplementedError

    def reserve(self) -> None:
        if self._reserving.acquire(blocking=False):  # otherwise another thread is reserving
            try:
                self._reserve_once()
            finally:
                self._reserving.release()

    def _reserve_once(self) -> None:
        """Reserve the space of all files, unless that was done. The caller holds the lock. An error ends the job, and
        is in the receipt.
        """
        if self._reserved:
            return
        self._reserved = True
        if self._job.cancelled or self._job.fault is not None:
            return
        try:
            self._reserve_files()
        except BaseException as error:
            self._refusal = error
            self._job.cancel()
        else:
            self._job.files_ready()

    def _wait_for_all(self) -> None:
        """Wait until the files have their space, and all writes have ended."""
        with self._reserving:
            self._reserve_once()  # does nothing if another thread has done it
        self._wait()

    def _ends(self) -> Sequence[int]:
        """The sizes of the files in bytes: as planned, or as an encoder has decided."""
        return self._job.file_ends or [file.bytes for file in self._plans]

    def _early_end(self) -> FlowstoneError | None:
        """Why the job has ended early; None if it has not. The caller handles a fault in one file before this call.
        """
        if self._job.fault is None and self._refusal is not None:
            if not isinstance(self._refusal, FlowstoneError):
                raise self._refusal
            return self._refusal
        return write_error(self._root, self._job)


class JobWriteHandle(WriteWaits):
    """A WriteHandle of one job, into files of a store at `root` that already have their size and need no sync.

    fit  if an encoder decides sizes of files: called with the sizes of all files, once they are known. A reference to
         `fit` is kept, and with it the open files
    """

    def __init__(
        self, root: Path, job: WriteJob, settings: Settings, watch: Watch, plans: Sequence[FilePlan],
        fit: Callable[[Sequence[int]], None],
    ) -> None:
        self._root, self._job, self._settings, self._watch = root, job, settings, watch
        self._plans, self._fit = plans, fit

    def reserve(self) -> None:
        """Does nothing, since the files already have their size."""

    def receipt(self) -> Receipt:
        self._wait()
        tuning = self._settings.tuning
        receipt = self._receipt(write_error(self._root, self._job), self._io(
            "posix", self._settings, alignment=1, request_bytes=tuning.request_bytes, depth=tuning.queue_depth
        ))
        if receipt.encoded is not None:
            self._fit(receipt.encoded.file_bytes)
        return receipt


class JobReadHandle:
    """A ReadHandle of one job. `root`: the root of the store. `files`: the open files, to which a reference is kept as
    long as this object exists.
    """

    def __init__(self, root: Path, job: ReadJob, files: object = None) -> None:
        self._root, self._job, self._files = root, job, files

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def aim(self, rows: ReadExtents) -> None:
        self._job.aim(rows)

    def wait(self, timeout_s: float) -> bool:
        return self._job.wait(timeout_s)

    def cancel(self) -> None:
        self._job.cancel()

    def receipt(self) -> ReadReceipt:
        while not self._job.wait(POLL_S):
            pass
        job = self._job
        return ReadReceipt(
            self._error(), job.bad_chunks, job.touched, job.requested_bytes, job.copied_bytes, job.direct_bytes,
            job.requests, [job.spans],
        )

    def _error(self) -> FlowstoneError | None:
        return read_error(self._root, self._job.fault, cancelled=self._job.cancelled)


def capture_error(root: Path, fault: Fault) -> FlowstoneError:
    """The error of a save that failed because of the state (such as memory that has changed), or because the system
    could not copy it.
    """
    if fault.errno not in (0, errno.EFAULT):
        return explain(root, "copy the state for", fault.errno, fault.path, reach=byte_range(fault))
    gone = fault.errno == errno.EFAULT
    cause = "the state's memory was freed" if gone else "the state changed"
    return StateChangedError(
        f"{cause} before it was captured", path=fault.path, offset=fault.offset, length=fault.length, gone=gone
    )


def write_error(root: Path, job: WriteJob) -> FlowstoneError | None:
    """Why a write has ended early; None if it has not."""
    fault = job.fault
    if fault is not None and fault.operation == "capture":
        return capture_error(root, fault)
    if fault is not None:
        return explain(root, fault.operation, errno_of(fault), fault.path, reach=byte_range(fault))
    return CancelledError("the save was cancelled", next="save again") if job.cancelled else None


def read_error(root: Path, fault: Fault | None, *, cancelled: bool) -> FlowstoneError | None:
    """Why a read has ended early; None if it has not."""
    if fault is not None and fault.operation == "end of file":
        return DamagedError(
            f"{fault.path} became shorter while it was read", range=byte_range(fault),
            next="restore the file from a copy, or load an older step",
        )
    if fault is not None:
        return explain(root, fault.operation, fault.errno, fault.path, reach=byte_range(fault))
    return CancelledError("the load was cancelled", next="load again before saving") if cancelled else None


def errno_of(fault: Fault) -> int:
    """The errno of a fault.

    A write beyond the limit on the size of files (ulimit -f) is cut at the limit. If the limit is in the middle of a
    block, the rest of a write with O_DIRECT is unaligned, so the kernel refuses it with EINVAL. For this EINVAL, EFBIG
    is returned.
    """
    if fault.errno != errno.EINVAL or fault.operation != "write":
        return fault.errno
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    crosses = limit != resource.RLIM_INFINITY and limit < fault.offset + fault.length
    return errno.EFBIG if crosses else fault.errno


def byte_range(fault: Fault) -> str:
    """The range of bytes that a fault concerns, as text."""
    return f"bytes {fault.offset}..{fault.offset + fault.length}"
