"""Copy a segment from one store into another through a few buffers: read it, verify its digests, write it, and check
the digests of the written bytes once more.

The engine that writes the target file copies (captures) rows from the buffers, in order; a row is a range of the file,
such as a chunk. The buffers are used in turn: a buffer is refilled once all its rows are captured
(`_native.SourceSupply`), while the captured bytes are still being written.
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

from flowstone._native import NO_DIGEST, Arena, ReadExtents, SourceSupply, WriteExtents
from flowstone.config import CHUNK_BYTES, MIB, POLL_S
from flowstone.errors import BudgetError, DamagedError, FlowstoneError
from flowstone.format.digest import digest
from flowstone.format.manifest import SegmentRow
from flowstone.store.base import FilePlan, Pace, ReadHandle, ReadReceipt, Store, finish_reading, stop_reading
from flowstone.tiered.runs import ChunkRuns

# Rows that the engine captures at once are in at most three buffers, of which one may have earlier rows, too.
_BUFFERS = 4
_READS = 2  # concurrent reads
_BLOCKS = 4  # blocks of each arena: two are read or written while two others are copied and digested
_BATCH_BYTES_MIN = 4 * MIB


class SourceFailedError(FlowstoneError):
    """A flush (a copy into a farther tier) could not read the checkpoint in its source tier. Another tier may have the
    checkpoint undamaged.

    error  the source's error
    """

    def __init__(self, error: FlowstoneError) -> None:
        super().__init__(error.message, **error.facts)
        self.error = error


@contextmanager
def source_errors() -> Iterator[None]:
    """Context that turns errors of the source into a SourceFailedError."""
    try:
        yield
    except FlowstoneError as error:
        raise SourceFailedError(error) from error


class Buffers:
    """The memory of one flush: some buffers, an arena (an engine's staging memory) for reads, and an arena for writes.
    The owner closes it.

    raises  BudgetError if the system refuses the memory
    """

    def __init__(self, source: Store, target: Store) -> None:
        read, written = source.settings("read").tuning.request_bytes, target.settings("write").tuning.request_bytes
        self.batch_bytes = max(_BATCH_BYTES_MIN, written)
        try:
            self._map = mmap.mmap(-1, _BUFFERS * self.batch_bytes)
            self.reads = Arena(budget_bytes=_BLOCKS * read, block_bytes=read, background=True)
            self.writes = Arena(budget_bytes=_BLOCKS * written, block_bytes=written, background=True)
        except OSError as error:
            raise BudgetError(
                "the operating system refused memory for a flush", reason=error.strerror,
                next="raise the limits on address space (ulimit -v)",
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.writes.grow(_BLOCKS * written)

    def close(self) -> None:
        self.reads.close()
        self.writes.close()


def flush_bytes(read_request_bytes: int, write_request_bytes: int) -> int:
    """The memory that one flush needs, in bytes, without the checkpoint's index, objects and headers."""
    return _BUFFERS * max(_BATCH_BYTES_MIN, write_request_bytes) + _BLOCKS * (read_request_bytes + write_request_bytes)


class Copy(msgspec.Struct, frozen=True, eq=False):
    """Stores, memory and pace of a copy.

    pace      limits the rate of writes to the target
    on_batch  called before each batch of rows. Waits while a save is running, and raises CancelledError to end the copy
    """

    source: Store
    target: Store
    buffers: Buffers
    pace: Pace
    on_batch: Callable[[], None]


class _Batch(msgspec.Struct, frozen=True):
    """The rows (ranges of a file) from number `begin` to `end` - 1, which fill a buffer. `number`: of the batch."""

    begin: int
    end: int
    number: int


def _batches(length: NDArray[np.uint64], batch_bytes: int) -> Iterator[_Batch]:
    begin, filled, number = 0, 0, 0
    for index, size in enumerate(length.tolist()):
        if filled + size > batch_bytes:
            yield _Batch(begin, index, number)
            begin, filled, number = index, 0, number + 1
        filled += size
    if begin < len(length):
        yield _Batch(begin, len(length), number)


def copy_segment(copy: Copy, row: SegmentRow, paths: tuple[str, str], runs: ChunkRuns) -> None:
    """Copy one segment: its header, and the chunks in `runs`. The copy has zeros elsewhere. Durable on return.

    paths   (path in the source, path in the target)
    raises  SourceFailedError if the source's bytes are damaged or cannot be read; errors of writes. After an error the
            caller removes the target's file
    """
    with source_errors():
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
            f"{copy.target.location}/{paths[1]}: bytes changed in memory while they were copied",
            next="check the machine's memory; the flush is tried again",
        )


def _header(source: Store, path: str, row: SegmentRow) -> bytes:
    header = source.read(path, length=row.header_bytes)
    size = source.size(path)
    if size != row.bytes or digest(header) != row.header_digest:
        raise DamagedError(
            f"the header or the size of {source.location}/{path} differs from the manifest",
            expected=f"{row.bytes} bytes", found=f"{size} bytes", next="restore the file from a copy",
        )
    return header


def _rows(
    header: bytes, runs: ChunkRuns, batches: list[_Batch], buffers: Buffers
) -> tuple[SourceSupply, WriteExtents, NDArray[np.uint64]]:
    """Returns what the engine needs to write the complete file: the supply of rows (the header, then the chunks), their
    ranges in the file, and the addresses of the chunks in the buffers.
    """
    header_bytes = np.frombuffer(header, np.uint8)
    count = len(runs.length)
    addresses = np.zeros(count, np.uint64)
    for batch in batches:
        length = runs.length[batch.begin : batch.end]
        begin = buffers.address + batch.number % _BUFFERS * buffers.batch_bytes
        addresses[batch.begin : batch.end] = begin + np.cumsum(length) - length
    length = np.concatenate([np.array([len(header)], np.uint64), runs.length])
    feed = SourceSupply(length)
    rows = WriteExtents(
        file=np.zeros(count + 1, np.uint32), offset=np.concatenate([np.zeros(1, np.uint64), runs.offset]),
        length=length, address=np.concatenate([np.array([header_bytes.ctypes.data], np.uint64), addresses]),
        chunk=np.concatenate([np.array([NO_DIGEST], np.uint64), np.arange(count, dtype=np.uint64)]),
        layout=np.full(count + 1, -1, np.int64), layouts=[], chunks=count,
    )
    rows.attach_supply(feed)
    return feed, rows, addresses


def _feed(
    copy: Copy, path: str, runs: ChunkRuns, batches: list[_Batch], addresses: NDArray[np.uint64],
    feed: SourceSupply
) -> None:
    """Read and verify each batch, then let the write have it. Returns early if the write has ended."""
    feed.offer(1)  # the first row is the header
    under_way: deque[tuple[_Batch, ReadHandle]] = deque()
    try:
        for batch in batches:
            copy.on_batch()
            if batch.number >= _BUFFERS and not _are_captured(feed, batches[batch.number - _BUFFERS].end):
                break
            with source_errors():
                under_way.append((batch, _begin_read(copy, path, runs, batch, addresses)))
            if len(under_way) == _READS:
                _offer(copy, path, runs, *under_way.popleft(), feed)
        while under_way:
            _offer(copy, path, runs, *under_way.popleft(), feed)
    except BaseException:
        for _, pending in under_way:
            stop_reading(pending)
        raise


def _are_captured(feed: SourceSupply, rows: int) -> bool:
    """Wait until the header and the first `rows` chunks are captured. Returns False if the write has ended early."""
    while feed.await_captured(rows, POLL_S) <= rows:
        if feed.ended:
            return False
    return True


def _begin_read(copy: Copy, path: str, runs: ChunkRuns, batch: _Batch, addresses: NDArray[np.uint64]) -> ReadHandle:
    part = runs.slice(batch.begin, batch.end)
    count = len(part.length)
    rows = ReadExtents(
        file=np.zeros(count, np.uint32), offset=part.offset, length=part.length,
        chunk=np.arange(count, dtype=np.uint64), first=np.zeros(count, np.uint64), last=np.ones(count, np.uint64),
        digests=part.digest,
    )
    rows.aim(addresses[batch.begin : batch.end], np.full(count, -1, np.int64), [])
    return copy.source.read_extents([path], rows, copy.buffers.reads, wanted_bytes=int(part.length.sum()))


def _offer(
    copy: Copy, path: str, runs: ChunkRuns, batch: _Batch, under_way: ReadHandle, feed: SourceSupply
) -> None:
    receipt = finish_reading(under_way)
    with source_errors():
        _check_read(copy, path, runs, batch, receipt)
    feed.offer(batch.end + 1)


def _check_read(copy: Copy, path: str, runs: ChunkRuns, batch: _Batch, receipt: ReadReceipt) -> None:
    if len(receipt.bad):
        offset = int(runs.offset[batch.begin + int(receipt.bad[0])])
        raise DamagedError(
            f"{copy.source.location}/{path} is damaged", range=f"the chunk at byte {offset}",
            next="restore the file from a copy, or use another tier",
        )
    if receipt.error is not None:
        raise receipt.error


assert CHUNK_BYTES <= _BATCH_BYTES_MIN, "a buffer holds any chunk"
