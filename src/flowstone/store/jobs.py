"""The engine's jobs as a store's Writing and Reading: the part that is the same for all stores."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from flowstone import _native
from flowstone.config import KIB, POLL_S, Watch
from flowstone.errors import CancelledError, DamagedError, FlowstoneError, StateChangedError
from flowstone.format.manifest import IoRecord
from flowstone.store.base import Encoded, FilePlan, ReadReceipt, Receipt, Watched
from flowstone.store.os_errors import explain
from flowstone.store.settings import Settings

GAP_BYTES = 64 * KIB  # padding up to this length is cheaper to write than a further request


class WriteWaits:
    """The waiting methods of a Writing, for its native `_job`."""

    _job: _native.WriteJob
    _watch: Watch
    _plans: Sequence[FilePlan]

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    @property
    def watched(self) -> Watched:
        job = self._job
        row, reason = job.sampled_first or (None, None)
        return Watched(job.exact_bytes, job.sampled_bytes, job.huge_bytes, self._watch == "exact", row, reason)

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
            pass  # returns to Python in between, so that Ctrl-C works

    def _wait(self) -> None:
        while not self._job.wait(POLL_S):
            pass

    def _io(self, backend: str, settings: Settings, *, alignment: int, request_bytes: int, depth: int) -> IoRecord:
        """How the segments were written, for the manifest; call it once the job has ended."""
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
        encoded = None if stored is None else Encoded(*stored, sizes)
        return Receipt(None, self._job.digests, io, encoded, spans, synced)


class ReservingWriting(WriteWaits):
    """A Writing of one job whose files may get their room after it has begun: by the first thread that asks for it."""

    _root: Path

    def __init__(self, *, reserved: bool) -> None:
        self._reserving = Lock()  # held while reserving; guards the next two
        self._reserved = reserved
        self._refusal: BaseException | None = None  # the exception of `_reserve_files`

    def _reserve_files(self) -> None:
        """Give all files their room. Raises FlowstoneError."""
        raise NotImplementedError

    def reserve(self) -> None:
        if self._reserving.acquire(blocking=False):  # else another thread is reserving
            try:
                self._reserve_once()
            finally:
                self._reserving.release()

    def _reserve_once(self) -> None:
        """Call with the lock held. A refusal ends the job, and is in the receipt."""
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
        """Until the files have their room and no byte moves any more."""
        with self._reserving:
            self._reserve_once()  # unless another thread has done it
        self._wait()

    def _ends(self) -> Sequence[int]:
        """The sizes of the files: as planned, but for those that an encoder decides."""
        return self._job.file_ends or [file.bytes for file in self._plans]

    def _early_end(self) -> FlowstoneError | None:
        """Why the job ended early, where that is no fault of a file; None if it did not."""
        if self._job.fault is None and self._refusal is not None:
            if not isinstance(self._refusal, FlowstoneError):
                raise self._refusal
            return self._refusal
        return write_error(self._root, self._job)


class JobWriting(WriteWaits):
    """A Writing of one job, into files of a store at `root` that already have their size and need no sync.

    fit  called with the sizes of all files, once these are known, if an encoder decides some of them. It is kept until
         this is dropped, and what it keeps open
    """

    def __init__(
        self, root: Path, job: _native.WriteJob, settings: Settings, watch: Watch, plans: Sequence[FilePlan],
        fit: Callable[[Sequence[int]], None],
    ) -> None:
        self._root, self._job, self._settings, self._watch = root, job, settings, watch
        self._plans, self._fit = plans, fit

    def reserve(self) -> None:
        """Nothing to do: the files have their size."""

    def receipt(self) -> Receipt:
        self._wait()
        tuning = self._settings.tuning
        receipt = self._receipt(write_error(self._root, self._job), self._io(
            "posix", self._settings, alignment=1, request_bytes=tuning.request_bytes, depth=tuning.queue_depth
        ))
        if receipt.encoded is not None:
            self._fit(receipt.encoded.file_bytes)
        return receipt


class JobReading:
    """A Reading of one job, of a store at `root`; `files` are kept open until this is dropped."""

    def __init__(self, root: Path, job: _native.ReadJob, files: object = None) -> None:
        self._root, self._job, self._files = root, job, files

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def aim(self, rows: _native.ReadExtents) -> None:
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


def capture_error(root: Path, fault: _native.Fault) -> FlowstoneError:
    """The error of a save that failed because of the state, or because the system did not copy it; not of the store."""
    if fault.errno not in (0, errno.EFAULT):
        return explain(root, "copy the state for", fault.errno, fault.path, reach=reach(fault))
    gone = fault.errno == errno.EFAULT
    what = "the state's memory went away" if gone else "the state changed"
    return StateChangedError(
        f"{what} before it was captured", path=fault.path, offset=fault.offset, length=fault.length, gone=gone
    )


def write_error(root: Path, job: _native.WriteJob) -> FlowstoneError | None:
    """Why a write ended early; None if it did not."""
    fault = job.fault
    if fault is not None and fault.operation == "capture":
        return capture_error(root, fault)
    if fault is not None:
        return explain(root, fault.operation, code_of(fault), fault.path, reach=reach(fault))
    return CancelledError("the save was cancelled", next="save again") if job.cancelled else None


def read_error(root: Path, fault: _native.Fault | None, *, cancelled: bool) -> FlowstoneError | None:
    """Why a read ended early; None if it did not."""
    if fault is not None and fault.operation == "end of file":
        return DamagedError(
            f"{fault.path} became shorter while it was read", range=reach(fault),
            next="restore the file from a copy, or load an older step",
        )
    if fault is not None:
        return explain(root, fault.operation, fault.errno, fault.path, reach=reach(fault))
    return CancelledError("the load was cancelled", next="load again before saving") if cancelled else None


def code_of(fault: _native.Fault) -> int:
    """The errno of a fault.

    The limit on the size of files cuts a write that crosses it. Where that is at no block's end, the kernel refuses the
    rest of a direct write as unaligned: that is EFBIG too.
    """
    if fault.errno != errno.EINVAL or fault.operation != "write":
        return fault.errno
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    crosses = limit != resource.RLIM_INFINITY and limit < fault.offset + fault.length
    return errno.EFBIG if crosses else fault.errno


def reach(fault: _native.Fault) -> str:
    """The range of a fault, as text."""
    return f"bytes {fault.offset}..{fault.offset + fault.length}"
