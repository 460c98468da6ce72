"""Any run of a tensor's elements, from wherever its boxes lie: read in batches of bounded size, verified, cut, cast."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, MIB
from flowstone.convert.cast import cast_into
from flowstone.convert.file_io import AlignedMemory, Reads, Run, room
from flowstone.convert.layout import Output
from flowstone.convert.source import Source
from flowstone.errors import BudgetError, DamagedError
from flowstone.plan.views import strides_of
from flowstone.table.box import Box
from flowstone.table.stored import DigestedRun, StoredBox, reach_elements

_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
"""A type of each item size: copies move bytes, whatever they mean."""
_READERS = 2  # threads: one reads while the last requests of the other's batch are under way
_LANES_MAX = 4
_LANE_BYTES_MIN = 4 * MIB
_SPARSE = 4  # a part is cut where it would read so many times what it needs


class Wanted(msgspec.Struct, frozen=True, eq=False):
    """Bytes [begin, end) of a whole tensor as the target has it, row-major, and the memory that they fill."""

    output: Output
    begin: int
    end: int
    memory: NDArray[np.uint8]


class _Part(msgspec.Struct, frozen=True, eq=False):
    """A region that a stored box holds, and the elements that it fills, as an array of the target's carriers."""

    output: Output
    stored: StoredBox
    region: Box
    target: NDArray[np.generic]


class _Read(msgspec.Struct, frozen=True, eq=False):
    """A part, the bytes to read for it, and where its first element lies in them."""

    part: _Part
    run: Run
    skipped_bytes: int


_Patch: TypeAlias = tuple[NDArray[Any], NDArray[Any] | int]
"""Memory, and what is copied into it once all of its group has been read."""


class _Batch(msgspec.Struct, frozen=True, eq=False):
    """Reads that one lane's memory has room for; the last batch of a group has its patches."""

    reads: Sequence[_Read]
    patches: Sequence[_Patch] = ()
    ends_group: bool = False


class _Lane:
    """Memory that one batch is read into, and open files of its own. One thread at a time."""

    def __init__(self, source: Source, memory_bytes: int) -> None:
        self._reads, self._memory = Reads(source.files), AlignedMemory(memory_bytes)

    def read(self, batch: _Batch) -> list[NDArray[np.uint8]]:
        """The bytes of each read; valid until the next call."""
        return self._reads.read([read.run for read in batch.reads], self._memory)

    def close(self) -> None:
        self._reads.close()


class Fetcher:
    """Fills memory from a source. `memory_bytes` bound what is read at once, and so the staging memory.

    That memory is divided into lanes: two of them are being read into by threads of the fetcher, while what has arrived
    in another is verified, cut and cast by the caller's thread. So requests are always under way.
    """

    def __init__(self, source: Source, memory_bytes: int) -> None:
        self._source = source
        count = max(1, min(_LANES_MAX, memory_bytes // _LANE_BYTES_MIN))
        self._lane_bytes = memory_bytes // count
        if self._part_bytes < 2 * CHUNK_BYTES:
            raise BudgetError(
                f"a window of {memory_bytes} bytes is too small to read through", next="raise budget_bytes to 64 MiB"
            )
        self._lanes = [_Lane(source, self._lane_bytes) for _ in range(count)]
        self._readers = ThreadPoolExecutor(_READERS, "flowstone-convert-read")

    @property
    def _part_bytes(self) -> int:
        """The most that one part may read."""
        return self._lane_bytes - room(0)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fill the memory of each. Blocks.

        raises  DamagedError for a chunk that is not what was written, or a file that ends early; StorageError
        """
        for _ in self.fetch_each([wanted]):
            pass

    def fetch_each(self, groups: Iterable[Sequence[Wanted]]) -> Iterator[None]:
        """Fill the memory of one group after the other; yields when a group's is filled.

        Later groups are asked for, and their bytes read, ahead of that; their memory is not touched before it.

        raises  as `fetch`
        """
        batches = self._batches(groups)
        free = deque(self._lanes)
        ahead: deque[tuple[_Batch, _Lane, Future[list[NDArray[np.uint8]]]]] = deque()
        try:
            while True:
                while free and (batch := next(batches, None)) is not None:
                    lane = free.popleft()
                    ahead.append((batch, lane, self._readers.submit(lane.read, batch)))
                if not ahead:
                    return
                batch, lane, reading = ahead.popleft()
                self._take(batch, reading.result())
                free.append(lane)
                if batch.ends_group:
                    yield
        finally:
            for _, _, reading in ahead:  # their lanes are free only then; `close` may have cancelled some
                if not reading.cancel():
                    reading.exception()

    def close(self) -> None:
        """Close the source's files, after the reads that are under way."""
        self._readers.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def _batches(self, groups: Iterable[Sequence[Wanted]]) -> Iterator[_Batch]:
        for wanted in groups:
            batch: list[_Read] = []
            patches: list[_Patch] = []
            taken = 0
            for read in self._all_reads(wanted, patches):
                needed = room(read.run.end - read.run.begin)
                if batch and taken + needed > self._lane_bytes:
                    yield _Batch(batch)
                    batch, taken = [], 0
                batch.append(read)
                taken += needed
            yield _Batch(batch, patches, ends_group=True)

    def _all_reads(self, wanted: Sequence[Wanted], patches: list[_Patch]) -> Iterator[_Read]:
        for one in wanted:
            item = one.output.dtype.item_bytes
            if one.begin % item or one.end % item:
                yield from self._ragged(one, patches)
            else:
                yield from self._reads_of(one, patches)

    def _ragged(self, one: Wanted, patches: list[_Patch]) -> Iterator[_Read]:
        """Of a window that cuts elements in two: those elements apart, through memory of their own."""
        item = one.output.dtype.item_bytes
        first, last = -(-one.begin // item) * item, one.end // item * item
        edges = {one.begin // item * item, last} if first <= last else {one.begin // item * item}
        for begin in sorted(edges):
            low, high = max(one.begin, begin), min(one.end, begin + item)
            if low < high and (low, high) != (begin, begin + item):
                whole = np.zeros(item, np.uint8)
                yield from self._reads_of(Wanted(one.output, begin, begin + item, whole), patches)
                patches.append((one.memory[low - one.begin : high - one.begin], whole[low - begin : high - begin]))
        if first < last:
            inner = one.memory[first - one.begin : last - one.begin]
            yield from self._reads_of(Wanted(one.output, first, last, inner), patches)

    def _reads_of(self, one: Wanted, patches: list[_Patch]) -> Iterator[_Read]:
        item = one.output.dtype.item_bytes
        elements = one.memory.view(_CARRIERS[item])
        tensor = one.output.tensor
        at = 0
        for box in linear_boxes(tensor.shape, one.begin // item, one.end // item):
            target = elements[at : at + box.elements].reshape(box.shape)
            at += box.elements
            for stored in tensor.boxes:
                if box.shape and not _share_rows(box, stored.box):
                    continue  # most of thousands of boxes: layers that are stacked, groups of heads
                common = box.intersect(stored.box) if box.shape else box
                if common is not None:
                    inside = common.within(box)
                    where = tuple(slice(o, end) for o, end in zip(inside.offset, inside.end, strict=True))
                    if stored.file is None:
                        patches.append((target[where] if where else target, 0))
                    else:
                        yield from self._cut(_Part(one.output, stored, common, target[where] if where else target))

    def _cut(self, part: _Part) -> Iterator[_Read]:
        """A part as it is read: whole, or in two, and so on, where it is too long, or mostly gaps."""
        read, useful = self._read_of(part), part.region.elements * part.output.tensor.dtype.item_bytes
        length = read.run.end - read.run.begin
        if length <= self._part_bytes and (length <= _SPARSE * useful or length <= 2 * CHUNK_BYTES):
            yield read
            return
        dim = _dimension_to_cut(part)
        if dim is None:
            yield read
            return
        middle = self._place_to_cut(part, read, dim)
        for begin, end in ((0, middle), (middle, part.region.shape[dim])):
            offset, shape = list(part.region.offset), list(part.region.shape)
            offset[dim] += begin
            shape[dim] = end - begin
            where = tuple(slice(begin, end) if d == dim else slice(None) for d in range(len(shape)))
            yield from self._cut(
                _Part(part.output, part.stored, Box(tuple(offset), tuple(shape)), part.target[where])
            )

    def _place_to_cut(self, part: _Part, read: _Read, dim: int) -> int:
        """What is too long is cut into as few reads as can be, about equal ones, and between chunks, which are read
        whole: in the middle of one, it would be read twice. What is mostly gaps is cut into halves."""
        length = read.run.end - read.run.begin
        if length > self._part_bytes:
            chunks = -(-length // CHUNK_BYTES)
            each = -(-chunks // -(-chunks // (self._part_bytes // CHUNK_BYTES))) * CHUNK_BYTES
            step = strides_of(part.stored)[dim] * part.output.tensor.dtype.item_bytes
            place = (each - read.skipped_bytes) // step
            if 0 < place < part.region.shape[dim]:
                return place
        return part.region.shape[dim] // 2

    def _read_of(self, part: _Part) -> _Read:
        stored, tensor = part.stored, part.output.tensor
        item, strides = tensor.dtype.item_bytes, strides_of(stored)
        inside = part.region.within(stored.box)
        assert stored.file is not None, "what lies in no file is not read"
        begin = stored.offset_bytes + sum(o * s for o, s in zip(inside.offset, strides, strict=True)) * item
        end = begin + reach_elements(part.region.shape, strides) * item
        first, last = begin, end
        run = stored.digested
        if run is not None:  # digests are of whole chunks
            first = run.offset_bytes + (begin - run.offset_bytes) // CHUNK_BYTES * CHUNK_BYTES
            last = run.offset_bytes + min(run.bytes, -(-(end - run.offset_bytes) // CHUNK_BYTES) * CHUNK_BYTES)
        return _Read(part, Run(stored.file, first, last), begin - first)

    def _take(self, batch: _Batch, arrived: Sequence[NDArray[np.uint8]]) -> None:
        for read, found in zip(batch.reads, arrived, strict=True):
            if read.part.stored.digested is not None:
                self._verify(read, found)
            _copy(read, found)
        for target, source in batch.patches:
            target[...] = source

    def _verify(self, read: _Read, found: NDArray[np.uint8]) -> None:
        run, digests = read.part.stored.digested, self._source.digests
        assert digests is not None, "boxes have digests where the source has some"
        assert run is not None, "what has no digest is not verified"
        first = (read.run.begin - run.offset_bytes) // CHUNK_BYTES
        for number, begin in enumerate(range(0, len(found), CHUNK_BYTES), first):
            if _native.xxh3_64(found[begin : begin + CHUNK_BYTES]) != int(digests[run.first_chunk + number]):
                at = read.run.begin + begin
                raise DamagedError(
                    f"{self._source.files[read.run.file].path} is damaged: {self._name_of(run)!r}, "
                    f"chunk {number}, is not what was written",
                    range=f"bytes {at}..{at + min(CHUNK_BYTES, len(found) - begin)}",
                    next="restore the file from a copy, or convert another step",
                )

    def _name_of(self, run: DigestedRun) -> str:
        """The tensor that a run belongs to: others may be made of it."""
        boxes = ((tensor.name, stored.digested) for tensor in self._source.tensors for stored in tensor.boxes)
        return next(name for name, digested in boxes if digested == run)


def linear_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes that elements [begin, end) of a row-major tensor are, in order: at most two for each dimension."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    row, first = divmod(begin, inner)
    last_row, rest = divmod(end, inner)
    if row == last_row:
        return [_under(row, box) for box in linear_boxes(shape[1:], first, rest)]
    found = []
    if first:
        found += [_under(row, box) for box in linear_boxes(shape[1:], first, inner)]
        row += 1
    if row < last_row:
        found.append(Box((row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])))
    if rest:
        found += [_under(last_row, box) for box in linear_boxes(shape[1:], 0, rest)]
    return found


def _share_rows(a: Box, b: Box) -> bool:
    first, other = a.offset[0], b.offset[0]
    return first < other + b.shape[0] and other < first + a.shape[0]


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))


def _dimension_to_cut(part: _Part) -> int | None:
    """That in which the region reaches farthest; None for a single element."""
    reach = [(n - 1) * s for n, s in zip(part.region.shape, strides_of(part.stored), strict=True)]
    longest = max(range(len(reach)), key=lambda dim: (reach[dim], part.region.shape[dim]), default=None)
    return None if longest is None or part.region.shape[longest] < 2 else longest


def _copy(read: _Read, found: NDArray[np.uint8]) -> None:
    part, tensor = read.part, read.part.output.tensor
    item = tensor.dtype.item_bytes
    reach = reach_elements(part.region.shape, strides_of(part.stored)) * item
    raw = found[read.skipped_bytes : read.skipped_bytes + reach]
    values: NDArray[np.generic] = np.ndarray(
        part.region.shape, _CARRIERS[item], raw.data, 0, tuple(s * item for s in strides_of(part.stored))
    )
    if part.output.dtype is tensor.dtype:
        part.target[...] = values
    else:
        cast_into(part.target, values, tensor.dtype, part.output.dtype)
