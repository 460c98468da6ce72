"""A segment from one store into another, through a few buffers: read and verified, written, and compared once more.

The target's engine captures rows in the order of the file. They lie in buffers that are used by turns: a buffer is
filled again once everything in it is captured (`_native.Feed`), while what was captured is written.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, MIB, POLL_S
from flowstone.errors import BudgetError, DamagedError, FlowstoneError
from flowstone.format.digest import digest
from flowstone.format.manifest import SegmentRow
from flowstone.store.base import FilePlan, Pace, Reading, ReadReceipt, Store, finish_reading, stop_reading
from flowstone.tiers.runs import Runs

_BUFFERS = 4  # rows of one window lie in two of them at most, and in a third one that it shares with the window before
_READS = 2  # under way at once
_BLOCKS = 4  # of each arena: two are read or written while two are copied and digested
_BATCH_BYTES_MIN = 4 * MIB


class SourceFailedError(FlowstoneError):
    """A flush could not read its source: another tier may have the same checkpoint whole.

    error  what the source has raised
    """

    def __init__(self, error: FlowstoneError) -> None:
        super().__init__(error.message, **error.facts)
        self.error = error


@contextmanager
def reading() -> Iterator[None]:
    """What fails inside is the source's failure."""
    try:
        yield
    except FlowstoneError as error:
        raise SourceFailedError(error) from error


class Buffers:
    """The memory of one flush: buffers, and an arena for each side. Closed by its owner.

    raises  BudgetError where the system refuses it
    """

    def __init__(self, source: Store, target: Store) -> None:
        read, written = source.settings("read").tuning.request_bytes, target.settings("write").tuning.request_bytes
        self.batch_bytes = max(_BATCH_BYTES_MIN, written)
        try:
            self._map = mmap.mmap(-1, _BUFFERS * self.batch_bytes)
            self.reads = _native.Arena(budget_bytes=_BLOCKS * read, block_bytes=read, background=True)
            self.writes = _native.Arena(budget_bytes=_BLOCKS * written, block_bytes=written, background=True)
        except OSError as error:
            raise BudgetError(
                "the operating system refused the memory of a flush", reason=error.strerror,
                next="raise the limits on address space (ulimit -v)",
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.writes.grow(_BLOCKS * written)

    def close(self) -> None:
        self.reads.close()
        self.writes.close()


def flush_bytes(read_request_bytes: int, write_request_bytes: int) -> int:
    """How much memory a flush takes besides the index, objects and headers."""
    return _BUFFERS * max(_BATCH_BYTES_MIN, write_request_bytes) + _BLOCKS * (read_request_bytes + write_request_bytes)


class Copy(msgspec.Struct, frozen=True, eq=False):
    """How segments are copied.

    pace   of the target's writes
    rest   called before each batch: waits while the machine is needed elsewhere; raises CancelledError to end the copy
    """

    source: Store
    target: Store
    buffers: Buffers
    pace: Pace
    rest: Callable[[], None]


class _Batch(msgspec.Struct, frozen=True):
    """Rows [begin, end), which fill a buffer."""

    begin: int
    end: int
    number: int


def _batches(length: NDArray[np.uint64], batch_bytes: int) -> Iterator[_Batch]:
    begin, filled, number = 0, 0, 0
    for at, size in enumerate(length.tolist()):
        if filled + size > batch_bytes:
            yield _Batch(begin, at, number)
            begin, filled, number = at, 0, number + 1
        filled += size
    if begin < len(length):
        yield _Batch(begin, len(length), number)


def copy_segment(copy: Copy, row: SegmentRow, paths: tuple[str, str], runs: Runs) -> None:
    """Copy one segment: its header, and its chunks. All other bytes are zero in the copy. Durable on return.

    paths   in the source, and in the target
    raises  DamagedError where the source's bytes are not what was written; what writing raises, then no file is left
            open, and the target's file is its caller's to remove
    """
    with reading():
        header = _header(copy.source, paths[0], row)
    batches = list(_batches(runs.length, copy.buffers.batch_bytes))
    feed, rows, addresses = _rows(header, runs, batches, copy.buffers)
    writing = copy.target.write([FilePlan(paths[1], row.bytes)], rows, copy.buffers.writes, copy.pace)
    try:
        _feed(copy, paths[0], runs, batches, addresses, feed)
    except BaseException:
        writing.cancel()
        writing.receipt()
        raise
    receipt = writing.receipt()
    if receipt.error is not None:
        raise receipt.error
    if not np.array_equal(receipt.digests, runs.digest):
        raise DamagedError(
            f"{copy.target.location}/{paths[1]}: bytes changed in memory on their way",
            next="check the machine's memory; the flush is tried again",
        )


def _header(source: Store, path: str, row: SegmentRow) -> bytes:
    header = source.read(path, length=row.header_bytes)
    size = source.size(path)
    if size != row.bytes or digest(header) != row.header_digest:
        raise DamagedError(
            f"the header or the size of {source.location}/{path} is not what was written",
            expected=f"{row.bytes} bytes", found=f"{size} bytes", next="restore the file from a copy",
        )
    return header


def _rows(
    header: bytes, runs: Runs, batches: list[_Batch], buffers: Buffers
) -> tuple[_native.Feed, _native.WriteExtents, NDArray[np.uint64]]:
    """Rows of the whole file, the header first, and the addresses of the runs."""
    kept = np.frombuffer(header, np.uint8)
    count = len(runs.length)
    addresses = np.zeros(count, np.uint64)
    for batch in batches:
        length = runs.length[batch.begin : batch.end]
        begin = buffers.address + batch.number % _BUFFERS * buffers.batch_bytes
        addresses[batch.begin : batch.end] = begin + np.cumsum(length) - length
    length = np.concatenate([np.array([len(header)], np.uint64), runs.length])
    feed = _native.Feed(length)
    rows = _native.WriteExtents(
        file=np.zeros(count + 1, np.uint32), offset=np.concatenate([np.zeros(1, np.uint64), runs.offset]),
        length=length, address=np.concatenate([np.array([kept.ctypes.data], np.uint64), addresses]),
        chunk=np.concatenate([np.array([_native.NO_DIGEST], np.uint64), np.arange(count, dtype=np.uint64)]),
        layout=np.full(count + 1, -1, np.int64), layouts=[], chunks=count, feed=feed,
    )
    return feed, rows, addresses


def _feed(
    copy: Copy, path: str, runs: Runs, batches: list[_Batch], addresses: NDArray[np.uint64], feed: _native.Feed
) -> None:
    """Read batch after batch into its buffer, and offer each once it is verified. Ends early where the write has."""
    feed.offer(1)  # the header
    under_way: deque[tuple[_Batch, Reading]] = deque()
    try:
        for batch in batches:
            copy.rest()
            if batch.number >= _BUFFERS and not _are_captured(feed, batches[batch.number - _BUFFERS].end):
                break
            with reading():
                under_way.append((batch, _begin_read(copy, path, runs, batch, addresses)))
            if len(under_way) == _READS:
                _offer(copy, path, runs, *under_way.popleft(), feed)
        while under_way:
            _offer(copy, path, runs, *under_way.popleft(), feed)
    except BaseException:
        for _, begun in under_way:
            stop_reading(begun)
        raise


def _are_captured(feed: _native.Feed, rows: int) -> bool:
    """Wait until so many runs, and the header, are captured. False once the write has ended early."""
    while feed.await_captured(rows, POLL_S) <= rows:
        if feed.ended:
            return False
    return True


def _begin_read(copy: Copy, path: str, runs: Runs, batch: _Batch, addresses: NDArray[np.uint64]) -> Reading:
    part = runs.slice(batch.begin, batch.end)
    count = len(part.length)
    rows = _native.ReadExtents(
        file=np.zeros(count, np.uint32), offset=part.offset, length=part.length,
        address=addresses[batch.begin : batch.end], chunk=np.arange(count, dtype=np.uint64),
        first=np.zeros(count, np.uint64), last=np.ones(count, np.uint64), layout=np.full(count, -1, np.int64),
        layouts=[], digests=part.digest,
    )
    return copy.source.read_extents([path], rows, copy.buffers.reads, wanted_bytes=int(part.length.sum()))


def _offer(copy: Copy, path: str, runs: Runs, batch: _Batch, under_way: Reading, feed: _native.Feed) -> None:
    receipt = finish_reading(under_way)
    with reading():
        _check_read(copy, path, runs, batch, receipt)
    feed.offer(batch.end + 1)


def _check_read(copy: Copy, path: str, runs: Runs, batch: _Batch, receipt: ReadReceipt) -> None:
    if len(receipt.bad):
        offset = int(runs.offset[batch.begin + int(receipt.bad[0])])
        raise DamagedError(
            f"{copy.source.location}/{path} is not what was written", range=f"the chunk at byte {offset}",
            next="restore the file from a copy, or use another tier",
        )
    if receipt.error is not None:
        raise receipt.error


assert CHUNK_BYTES <= _BATCH_BYTES_MIN, "a buffer holds any chunk"
