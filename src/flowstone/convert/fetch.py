"""Fetch any range of a tensor's elements from the files that contain its boxes (parts). The files are read in batches
of bounded size. The bytes are verified, cut to the range, and converted to another type.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.config import CHUNK_BYTES, MIB
from flowstone.convert.cast import cast_into
from flowstone.convert.file_io import AlignedMemory, FileReader, FileRun, staging_bytes_max
from flowstone.convert.layout import Output
from flowstone.convert.source import SourceCheckpoint
from flowstone.errors import BudgetError, DamagedError
from flowstone.layouts.views import strides_of
from flowstone.table.box import Box
from flowstone.table.stored import DigestedRun, StoredBox, reach_elements

_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
"""A NumPy type of each item size: copies only move bytes, so any type of that size will do."""
_READERS = 2  # number of threads: one reads while the other waits for the last requests of its batch
_LANES_MAX = 4
_LANE_BYTES_MIN = 4 * MIB
_SPARSE = 4  # a region is cut if its read would have more than this many times the bytes that are needed


class FetchRequest(msgspec.Struct, frozen=True, eq=False):
    """A request for the bytes `begin` to `end` - 1 of a tensor, in the target's dtype and in row-major order. `memory`
    is filled with them.
    """

    output: Output
    begin: int
    end: int
    memory: NDArray[np.uint8]


class _RegionCopy(msgspec.Struct, frozen=True, eq=False):
    """A region inside of a stored box (part of a tensor), and the elements of the target to which it is copied."""

    output: Output
    stored: StoredBox
    region: Box
    target: NDArray[np.generic]


class _Read(msgspec.Struct, frozen=True, eq=False):
    """A region to copy, the range of a file that is read for it, and the offset of the region's first element in that
    range.
    """

    part: _RegionCopy
    run: FileRun
    skipped_bytes: int


_Patch: TypeAlias = tuple[NDArray[Any], NDArray[Any] | int]
"""(target, source), to be copied once all reads of the group of requests are done."""


class _ReadBatch(msgspec.Struct, frozen=True, eq=False):
    """Reads that fit into the memory of one `_Lane`. `patches`: copies that are made at the end of a group of requests;
    only the group's last batch has them.
    """

    reads: Sequence[_Read]
    patches: Sequence[_Patch] = ()
    ends_group: bool = False


class _Lane:
    """Memory for one batch of reads, with open files of its own. For one thread at a time."""

    def __init__(self, source: SourceCheckpoint, memory_bytes: int) -> None:
        self._reads, self._memory = FileReader(source.files), AlignedMemory(memory_bytes)

    def read(self, batch: _ReadBatch) -> list[NDArray[np.uint8]]:
        """The bytes of each read. They are valid until the next call."""
        return self._reads.read([read.run for read in batch.reads], self._memory)

    def close(self) -> None:
        self._reads.close()


class Fetcher:
    """Fills memory with elements of a source's tensors. `memory_bytes` limits the staging memory, and so how many bytes
    are read at once.

    The memory is divided into lanes: the fetcher's threads read into two of them, while the caller's thread verifies,
    cuts and casts the content of another. So requests are always in flight.
    """

    def __init__(self, source: SourceCheckpoint, memory_bytes: int) -> None:
        self._source = source
        count = max(1, min(_LANES_MAX, memory_bytes // _LANE_BYTES_MIN))
        self._lane_bytes = memory_bytes // count
        if self._part_bytes < 2 * CHUNK_BYTES:
            raise BudgetError(
                f"budget_bytes is too small: only {memory_bytes} bytes of it are left for reading",
                next="raise budget_bytes to 64 MiB",
            )
        self._lanes = [_Lane(source, self._lane_bytes) for _ in range(count)]
        self._readers = ThreadPoolExecutor(_READERS, "flowstone-convert-read")

    @property
    def _part_bytes(self) -> int:
        """How many bytes one read may have at most."""
        return self._lane_bytes - staging_bytes_max(0)

    def fetch(self, requests: Sequence[FetchRequest]) -> None:
        """Fill the memory of each request. Blocks.

        raises  DamagedError  a chunk does not match its digest, or a file ends too early
                StorageError
        """
        for _ in self.fetch_each([requests]):
            pass

    def fetch_each(self, groups: Iterable[Sequence[FetchRequest]]) -> Iterator[None]:
        """Fill the memory of one group after the other; yields after each group.

        Later groups are planned and read in advance, but their memory is not written before all earlier groups are
        complete.

        raises  the errors of `fetch`
        """
        batches = self._batches(groups)
        free = deque(self._lanes)
        ahead: deque[tuple[_ReadBatch, _Lane, Future[list[NDArray[np.uint8]]]]] = deque()
        try:
            while True:
                while free and (batch := next(batches, None)) is not None:
                    lane = free.popleft()
                    ahead.append((batch, lane, self._readers.submit(lane.read, batch)))
                if not ahead:
                    return
                batch, lane, reading = ahead.popleft()
                self._scatter(batch, reading.result())
                free.append(lane)
                if batch.ends_group:
                    yield
        finally:
            # wait for the pending reads: lanes are free only after them; `close` may have cancelled some of them
            for _, _, reading in ahead:
                if not reading.cancel():
                    reading.exception()

    def close(self) -> None:
        """Wait for the reads in flight, and close the source's files."""
        self._readers.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def _batches(self, groups: Iterable[Sequence[FetchRequest]]) -> Iterator[_ReadBatch]:
        for requests in groups:
            batch: list[_Read] = []
            patches: list[_Patch] = []
            taken = 0
            for read in self._all_reads(requests, patches):
                needed = staging_bytes_max(read.run.end - read.run.begin)
                if batch and taken + needed > self._lane_bytes:
                    yield _ReadBatch(batch)
                    batch, taken = [], 0
                batch.append(read)
                taken += needed
            yield _ReadBatch(batch, patches, ends_group=True)

    def _all_reads(self, requests: Sequence[FetchRequest], patches: list[_Patch]) -> Iterator[_Read]:
        for request in requests:
            item = request.output.dtype.item_bytes
            if request.begin % item or request.end % item:
                yield from self._reads_of_cut_elements(request, patches)
            else:
                yield from self._reads_of(request, patches)

    def _reads_of_cut_elements(self, request: FetchRequest, patches: list[_Patch]) -> Iterator[_Read]:
        """The reads of a request that begins or ends in the middle of an element. Such an element is read into separate
        memory.
        """
        item = request.output.dtype.item_bytes
        first, last = -(-request.begin // item) * item, request.end // item * item
        edges = {request.begin // item * item, last} if first <= last else {request.begin // item * item}
        for begin in sorted(edges):
            low, high = max(request.begin, begin), min(request.end, begin + item)
            if low < high and (low, high) != (begin, begin + item):
                whole = np.zeros(item, np.uint8)
                yield from self._reads_of(FetchRequest(request.output, begin, begin + item, whole), patches)
                memory = request.memory[low - request.begin : high - request.begin]
                patches.append((memory, whole[low - begin : high - begin]))
        if first < last:
            inner = request.memory[first - request.begin : last - request.begin]
            yield from self._reads_of(FetchRequest(request.output, first, last, inner), patches)

    def _reads_of(self, request: FetchRequest, patches: list[_Patch]) -> Iterator[_Read]:
        item = request.output.dtype.item_bytes
        elements = request.memory.view(_CARRIERS[item])
        tensor = request.output.tensor
        position = 0
        for box in linear_boxes(tensor.shape, request.begin // item, request.end // item):
            target = elements[position : position + box.elements].reshape(box.shape)
            position += box.elements
            for stored in tensor.boxes:
                if box.shape and not _rows_overlap(box, stored.box):
                    # there may be thousands of boxes (stacked layers, groups of heads), and most do not overlap
                    continue
                common = box.intersect(stored.box) if box.shape else box
                if common is not None:
                    inside = common.within(box)
                    where = tuple(slice(o, end) for o, end in zip(inside.offset, inside.end, strict=True))
                    if stored.file is None:
                        patches.append((target[where] if where else target, 0))
                    else:
                        yield from self._cut(
                            _RegionCopy(request.output, stored, common, target[where] if where else target)
                        )

    def _cut(self, part: _RegionCopy) -> Iterator[_Read]:
        """The reads for a region. A read takes all bytes from the region's first to its last. As long as these are too
        many for one read, or most of them do not belong to the region, the region is cut in two.
        """
        read, useful = self._read_of(part), part.region.elements * part.output.tensor.dtype.item_bytes
        length = read.run.end - read.run.begin
        if length <= self._part_bytes and (length <= _SPARSE * useful or length <= 2 * CHUNK_BYTES):
            yield read
            return
        dim = _dimension_to_cut(part)
        if dim is None:
            yield read
            return
        middle = self._index_to_cut(part, read, dim)
        for begin, end in ((0, middle), (middle, part.region.shape[dim])):
            offset, shape = list(part.region.offset), list(part.region.shape)
            offset[dim] += begin
            shape[dim] = end - begin
            where = tuple(slice(begin, end) if d == dim else slice(None) for d in range(len(shape)))
            yield from self._cut(
                _RegionCopy(part.output, part.stored, Box(tuple(offset), tuple(shape)), part.target[where])
            )

    def _index_to_cut(self, part: _RegionCopy, read: _Read, dim: int) -> int:
        """The index in dimension `dim` at which a region is cut. If the region has too many bytes for one read, it is
        cut near the end of a chunk, because chunks are always read completely. The place is chosen so that there are
        few reads of about equal length. If most bytes of the read do not belong to the region, the
        region is cut in half.
        """
        length = read.run.end - read.run.begin
        if length > self._part_bytes:
            chunks = -(-length // CHUNK_BYTES)
            each = -(-chunks // -(-chunks // (self._part_bytes // CHUNK_BYTES))) * CHUNK_BYTES
            step = strides_of(part.stored)[dim] * part.output.tensor.dtype.item_bytes
            place = (each - read.skipped_bytes) // step
            if 0 < place < part.region.shape[dim]:
                return place
        return part.region.shape[dim] // 2

    def _read_of(self, part: _RegionCopy) -> _Read:
        stored, tensor = part.stored, part.output.tensor
        item, strides = tensor.dtype.item_bytes, strides_of(stored)
        inside = part.region.within(stored.box)
        assert stored.file is not None, "only boxes in a file are read"
        begin = stored.offset_bytes + sum(o * s for o, s in zip(inside.offset, strides, strict=True)) * item
        end = begin + reach_elements(part.region.shape, strides) * item
        first, last = begin, end
        run = stored.digested
        if run is not None:  # digests are of full chunks, so ranges begin and end with a chunk
            first = run.offset_bytes + (begin - run.offset_bytes) // CHUNK_BYTES * CHUNK_BYTES
            last = run.offset_bytes + min(run.bytes, -(-(end - run.offset_bytes) // CHUNK_BYTES) * CHUNK_BYTES)
        return _Read(part, FileRun(stored.file, first, last), begin - first)

    def _scatter(self, batch: _ReadBatch, arrived: Sequence[NDArray[np.uint8]]) -> None:
        for read, content in zip(batch.reads, arrived, strict=True):
            if read.part.stored.digested is not None:
                self._verify(read, content)
            _copy_values(read, content)
        for target, source in batch.patches:
            target[...] = source

    def _verify(self, read: _Read, content: NDArray[np.uint8]) -> None:
        run, digests = read.part.stored.digested, self._source.digests
        assert digests is not None, "boxes have digests only if the source has"
        assert run is not None, "only boxes with digests are verified"
        first = (read.run.begin - run.offset_bytes) // CHUNK_BYTES
        for number, begin in enumerate(range(0, len(content), CHUNK_BYTES), first):
            if xxh3_64(content[begin : begin + CHUNK_BYTES]) != int(digests[run.first_chunk + number]):
                offset = read.run.begin + begin
                raise DamagedError(
                    f"{self._source.files[read.run.file].path} is damaged: {self._name_of(run)!r}, "
                    f"chunk {number}, does not match its digest",
                    range=f"bytes {offset}..{offset + min(CHUNK_BYTES, len(content) - begin)}",
                    next="restore the file from a copy, or convert another step",
                )

    def _name_of(self, run: DigestedRun) -> str:
        """The name of the tensor to which a file range belongs. If rules derive several tensors from this one, they all
        use the same range.
        """
        boxes = ((tensor.name, stored.digested) for tensor in self._source.tensors for stored in tensor.boxes)
        return next(name for name, digested in boxes if digested == run)


def linear_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The elements `begin` to `end` - 1, in row-major order, of a tensor with this shape, as boxes in order: at most
    two for each dimension.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    row, first = divmod(begin, inner)
    last_row, rest = divmod(end, inner)
    if row == last_row:
        return [_box_in_row(row, box) for box in linear_boxes(shape[1:], first, rest)]
    boxes = []
    if first:
        boxes += [_box_in_row(row, box) for box in linear_boxes(shape[1:], first, inner)]
        row += 1
    if row < last_row:
        boxes.append(Box((row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])))
    if rest:
        boxes += [_box_in_row(last_row, box) for box in linear_boxes(shape[1:], 0, rest)]
    return boxes


def _rows_overlap(a: Box, b: Box) -> bool:
    first, other = a.offset[0], b.offset[0]
    return first < other + b.shape[0] and other < first + a.shape[0]


def _box_in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))


def _dimension_to_cut(part: _RegionCopy) -> int | None:
    """The dimension of a region that spans most bytes in the file; None if the region is a single element."""
    reach = [(n - 1) * s for n, s in zip(part.region.shape, strides_of(part.stored), strict=True)]
    longest = max(range(len(reach)), key=lambda dim: (reach[dim], part.region.shape[dim]), default=None)
    return None if longest is None or part.region.shape[longest] < 2 else longest


def _copy_values(read: _Read, content: NDArray[np.uint8]) -> None:
    part, tensor = read.part, read.part.output.tensor
    item = tensor.dtype.item_bytes
    reach = reach_elements(part.region.shape, strides_of(part.stored)) * item
    raw = content[read.skipped_bytes : read.skipped_bytes + reach]
    values: NDArray[np.generic] = np.ndarray(
        part.region.shape, _CARRIERS[item], raw.data, 0, tuple(s * item for s in strides_of(part.stored))
    )
    if part.output.dtype is tensor.dtype:
        part.target[...] = values
    else:
        cast_into(part.target, values, tensor.dtype, part.output.dtype)
