"""Copy a source into a target's files, window by window, through bounded memory.

A window is a range of a target file. Threads read ahead (`fetch.py`). One thread verifies, cuts and converts the bytes
of the next window, and two threads write the windows before it. Windows are written in order, so the journal
(`journal.py`) records only the number of durable windows, and the checksums of their bytes. In a cluster, tasks write
parts of the target in parallel, and the parts are recorded in order.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, cycle, pairwise
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.cluster import PARTS_OF_CPU, Cluster, not_shared
from flowstone.config import CHUNK_BYTES, GIB, MIB, whole_number
from flowstone.convert.fetch import Fetcher, FetchRequest
from flowstone.convert.file_io import AlignedMemory, FileWriter
from flowstone.convert.journal import ConversionJournal, DurableWindows
from flowstone.convert.layout import Extent, TargetLayout
from flowstone.convert.source import SourceCheckpoint
from flowstone.convert.window_store_writer import NoJournal, StoreDraft, WindowStoreWriter, check_shared
from flowstone.errors import BudgetError
from flowstone.store.os_errors import translated

BUDGET_BYTES_DEFAULT = 512 * MIB  # 256 MiB is slower, 768 MiB is not faster: `python -m bench.conversion --budget`
BUDGET_BYTES_MIN = 32 * MIB
_BUFFERS = 4  # up to three buffers are written while the fourth is filled
_WRITERS = 2  # number of threads: one writes while the other waits for the last requests of its window
# parts of the budget: four for buffers, two for reads in flight, two for temporary memory of type conversions
_SHARES = 8
_READ_SHARES = 2
_WINDOWS_BETWEEN_SYNCS = 16
_PART_BYTES_MAX = GIB  # size of a cluster's task, in bytes; a task is repeated if its worker dies


class FileWindow(msgspec.Struct, frozen=True):
    """A range of a target's file, which is filled and then written by one call. `offset` is a multiple of BLOCK_BYTES.
    """

    file: int
    offset: int
    length: int


class ConversionJob(msgspec.Struct, frozen=True, eq=False):
    """A conversion, as sent to every process that takes part.

    source  the checkpoint to convert, of which only the tensors are needed
    draft   the directory with the target's files, which already have their full size; or the directory for these files
            in a store
    """

    source: SourceCheckpoint
    layout: TargetLayout
    draft: Path | StoreDraft
    budget_bytes: int


class WindowRange(msgspec.Struct, frozen=True):
    """The windows of a conversion with the numbers `begin` to `end` - 1. `checks`, `running`: the checksums of earlier
    windows, if the files contain checksums.
    """

    begin: int
    end: int
    checks: tuple[int, ...] = ()
    running: int = 0


class CopyResult(msgspec.Struct, frozen=True):
    """The result of a copy. `checks`: the checksums of all extents. `resumed_bytes`: how many of the `bytes` were
    durable before this copy.
    """

    checks: tuple[int, ...]
    bytes: int
    resumed_bytes: int


def window_bytes(budget_bytes: int) -> int:
    """The length of a window in bytes, for a memory budget. Raises BudgetError if the budget is too small."""
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    if budget_bytes < BUDGET_BYTES_MIN:
        raise BudgetError(
            f"budget_bytes={budget_bytes} is too small for a conversion", expected=f"at least {BUDGET_BYTES_MIN} bytes",
            next="raise budget_bytes",
        )
    return budget_bytes // _SHARES // MIB * MIB


def windows(layout: TargetLayout, length: int) -> list[FileWindow]:
    """The windows of all files, in the order in which they are written."""
    return [
        FileWindow(number, offset, min(length, file.bytes - offset))
        for number, file in enumerate(layout.files)
        for offset in range(0, file.bytes, length)
    ]


def drop_unfit_lines(layout: TargetLayout, journal: ConversionJournal, draft: Path, length: int) -> None:
    """Forget the windows that an earlier conversion has recorded in the journal, if its draft does not match them. The
    conversion then starts from the beginning.
    """
    if journal.durable and not _has_draft(layout, journal.durable[-1].windows, draft, length):
        journal.drop_durable()


def _has_draft(layout: TargetLayout, durable: int, draft: Path, length: int) -> bool:
    if durable > len(windows(layout, length)):
        return False
    for file in layout.files:
        path = draft / file.name
        with translated(draft, "look at", file.name):
            if not path.is_file() or path.is_symlink() or path.stat().st_size != file.bytes:
                return False
    return True


def copy(
    job: ConversionJob, journal: ConversionJournal | NoJournal, *, on_progress: Callable[[int, int], None]
    | None = None,
    cluster: Cluster | None = None,
) -> CopyResult:
    """Write all files of the layout into the draft, except for windows that the journal lists as durable. Durable on
    return.

    cluster  runs the copy in parts, on several machines; None: this process copies all

    raises  the errors of reads and writes; the journal then lists the durable windows
    """
    planned = windows(job.layout, window_bytes(job.budget_bytes))
    if cluster is not None:
        check_shared(job.source.files, job.draft)
    if isinstance(journal, ConversionJournal):
        if journal.durable:
            journal.cut_torn_line()
        else:
            _create_files(job, journal)
    durable = list(journal.durable)
    done = durable[-1].windows if durable else 0
    resumed = sum(window.length for window in planned[:done])
    tell = _progress_counter(resumed, job.layout.bytes, on_progress)
    whole = WindowRange(done, len(planned), _checks(durable), durable[-1].running if durable else 0)
    copying = copy_part(job, whole, tell) if cluster is None else _copy_in_cluster(job, whole, tell, cluster)
    with closing(copying):
        for written in copying:
            journal.record(written)
            durable.append(written)
    return CopyResult(_checks(durable), job.layout.bytes, resumed)


def _checks(durable: Sequence[DurableWindows]) -> tuple[int, ...]:
    return tuple(int(check, 16) for line in durable for check in line.checks)


def _create_files(job: ConversionJob, journal: ConversionJournal) -> None:
    assert journal.start is not None, "the journal is started before its draft is written"
    assert isinstance(job.draft, Path), "a draft with a journal is a directory"
    journal.begin(journal.start.plan, journal.start.draft)
    writes = FileWriter(job.draft, job.layout.bytes)
    writes.make_directories(job.layout.directories)
    for file in job.layout.files:
        (job.draft / file.name).unlink(missing_ok=True)
        writes.create(file.name, file.bytes)


def _progress_counter(ready: int, total: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = ready

    def tell(length: int) -> None:
        nonlocal done
        done += length
        if on_progress is not None:
            on_progress(done, total)

    return tell


def _copy_in_cluster(
    job: ConversionJob, whole: WindowRange, tell: Callable[[int], None], cluster: Cluster
) -> Generator[DurableWindows, None, None]:
    """Run `copy_part` for all parts, in tasks of a cluster. Yields the durable windows, in order. `tell` is called with
    the number of bytes of each part that was written.
    """
    planned = windows(job.layout, window_bytes(job.budget_bytes))
    parts = split_windows(job.layout, planned, whole, cluster.cpus * PARTS_OF_CPU)
    needed = replace(job, source=replace(job.source, objects={}, per_rank={}, documents={}))
    with closing(cluster.each(copy_part_in_task, needed, parts)) as results:
        for part, written in zip(parts, results, strict=True):
            yield from written
            tell(sum(window.length for window in planned[part.begin : part.end]))


def split_windows(
    layout: TargetLayout, planned: Sequence[FileWindow], whole: WindowRange, count: int
) -> list[WindowRange]:
    """Split the windows `whole` into about `count` parts of equal size; into more parts if these would be longer than
    _PART_BYTES_MAX.

    A CRC-32 continues from one window to the next. So if the files contain CRCs, each part begins at the start of a
    file.
    """
    if whole.begin == whole.end:
        return []
    at_most = max(1, _PART_BYTES_MAX // max((window.length for window in planned), default=1))
    length = min(at_most, -(-(whole.end - whole.begin) // count))
    cuts = [whole.begin]
    for number in range(whole.begin + 1, whole.end):
        begins_file = planned[number].file != planned[number - 1].file
        if number - cuts[-1] >= length and (begins_file or layout.check != "crc32"):
            cuts.append(number)
    parts = [WindowRange(begin, end) for begin, end in pairwise([*cuts, whole.end])]
    if layout.check == "crc32":  # a file's bytes depend on checksums by their positions in this tuple
        numbers = (sum(bool(part.length) for part in file.extents if part.output is not None) for file in layout.files)
        before = [0, *accumulate(numbers)]
        parts = [replace(part, checks=(0,) * before[planned[part.begin].file]) for part in parts]
    return [replace(parts[0], checks=whole.checks, running=whole.running), *parts[1:]]


def copy_part_in_task(job: ConversionJob, part: WindowRange) -> tuple[DurableWindows, ...]:
    """Copy a part in one of several processes, perhaps on another machine. The call can be repeated.

    raises  StorageError  this machine cannot see the files
    """
    planned = windows(job.layout, window_bytes(job.budget_bytes))[part.begin : part.end]
    used = {
        stored.file for window in planned for extent in extents_of(job.layout, window) if extent.output is not None
        for stored in job.layout.outputs[extent.output].tensor.boxes if stored.file is not None
    }
    for number in sorted(used):
        source = job.source.files[number]
        _check_visible(Path(source.path), source.bytes, source.changed_ns)
    assert isinstance(job.draft, Path), "several processes write into one directory only"
    for number in sorted({window.file for window in planned}):
        _check_visible(job.draft / job.layout.files[number].name, job.layout.files[number].bytes)
    return tuple(copy_part(job, part))


def _check_visible(path: Path, length: int, changed_ns: int | None = None) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise not_shared(path, error.strerror) from None
    if status.st_size != length:
        raise not_shared(path, f"{status.st_size} bytes instead of {length}")
    if changed_ns not in (None, status.st_mtime_ns):
        raise not_shared(path, "the file's modification time differs")


def copy_part(
    job: ConversionJob, part: WindowRange, on_written: Callable[[int], None] = lambda _: None
) -> Generator[DurableWindows, None, None]:
    """Write the windows of a part. Yields the durable windows after each sync; meanwhile other threads fill and write
    the next windows.

    on_written  called with the length of each window that was written
    """
    length = window_bytes(job.budget_bytes)
    planned = windows(job.layout, length)
    filler, buffers = _Filler(job.source, job.layout, length, part), [AlignedMemory(length) for _ in range(_BUFFERS)]
    try:
        writes = _writes(job, planned, buffers)
        try:
            yield from _write_all(planned, part, filler, buffers, writes, on_written)
        finally:
            writes.close()
    finally:
        filler.close()


def _writes(
    job: ConversionJob, planned: Sequence[FileWindow], buffers: Sequence[AlignedMemory]
) -> FileWriter | WindowStoreWriter:
    if isinstance(job.draft, Path):
        return FileWriter(job.draft, job.layout.bytes)
    return WindowStoreWriter(job.draft, job.layout, [(w.file, w.offset, w.length) for w in planned], buffers)


def _write_all(
    planned: Sequence[FileWindow], part: WindowRange, filler: _Filler, buffers: Sequence[AlignedMemory],
    writes: FileWriter | WindowStoreWriter, tell: Callable[[int], None],
) -> Iterator[DurableWindows]:
    progress = _Progress(planned, part, filler, writes, tell)
    fills = filler.fill_all(planned[part.begin : part.end], buffers)
    with (
        ThreadPoolExecutor(1, "flowstone-convert") as pool,
        ThreadPoolExecutor(_WRITERS, "flowstone-convert-write") as writers,
    ):
        filling = pool.submit(next, fills) if part.begin < part.end else None
        for number, memory in zip(range(part.begin, part.end), cycle(buffers), strict=False):
            assert filling is not None, "every window is filled before it is written"
            mark, window = filling.result(), planned[number]
            name = progress.open_file(window)
            writing = writers.submit(writes.write, name, window.offset, memory, window.length)
            progress.under_way.append((mark, writing))
            if number + 1 < part.end:
                filling = pool.submit(next, fills)
            # the next buffer is being filled, and the one after that must be free
            while len(progress.under_way) >= _BUFFERS - 1:
                yield from progress.finish_oldest()
        while progress.under_way:
            yield from progress.finish_oldest()


class _Progress:
    """Waits for writes in the order of the windows, and reports durable windows. For the caller's thread."""

    def __init__(
        self, planned: Sequence[FileWindow], part: WindowRange, filler: _Filler, writes: FileWriter | WindowStoreWriter,
        tell: Callable[[int], None],
    ) -> None:
        self.under_way: deque[tuple[_CheckState, Future[None]]] = deque()
        self._planned, self._filler, self._writes, self._tell = planned, filler, writes, tell
        self._names = [file.name for file in filler.layout.files]
        self._written = self._reported = part.begin  # numbers of windows
        self._end = part.end
        self._reported_checks = len(filler.checks)

    def open_file(self, window: FileWindow) -> str:
        """Open the file of a window. Returns its name."""
        name = self._names[window.file]
        self._writes.open(name)
        return name

    def finish_oldest(self) -> Iterator[DurableWindows]:
        """Wait for the oldest write. If it is time for a sync, syncs, and yields the durable windows.

        raises  the error of that write
        """
        mark, writing = self.under_way.popleft()
        writing.result()
        window = self._planned[self._written]
        self._written += 1
        is_last = self._written == self._end
        if is_last or self._planned[self._written].file != window.file:
            self._writes.finish(self._names[window.file])
        self._tell(window.length)
        if is_last or self._written - self._reported == _WINDOWS_BETWEEN_SYNCS:
            self._writes.sync()
            checks = tuple(f"{check:x}" for check in self._filler.checks[self._reported_checks : mark.checks])
            self._reported_checks, self._reported = mark.checks, self._written
            yield DurableWindows(self._written, checks, mark.running)


class _CheckState(msgspec.Struct, frozen=True):
    """The checksums after a window was filled. `checks`: how many are complete. `running`: the CRC-32, so far, of an
    extent that continues in the next window.
    """

    checks: int
    running: int


class _Fill(msgspec.Struct, frozen=True, eq=False):
    """How to fill a window.

    requests  the reads
    patches  (target, source): where the window contains only a part of a chunk, that part is copied from `source` to
             `target` once the full chunk was read
    chunks   the memory of the chunks that end in the window; their checksums are computed
    """

    window: FileWindow
    target: NDArray[np.uint8]
    extents: Sequence[Extent]
    requests: list[FetchRequest]
    patches: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    chunks: list[NDArray[np.uint8]]


class _Filler:
    """Fills windows in order, and collects the checksums of their bytes."""

    def __init__(self, source: SourceCheckpoint, layout: TargetLayout, length: int, part: WindowRange) -> None:
        self.layout, self.window_bytes = layout, length
        self._fetcher = Fetcher(source, _READ_SHARES * length)
        self.checks = list(part.checks)
        self._running = part.running

    def fill_all(self, planned: Sequence[FileWindow], buffers: Sequence[AlignedMemory]) -> Iterator[_CheckState]:
        """Fill the buffers in turn with the bytes of the windows.

        Yields after each window. Bytes for the next windows are read in advance, but a buffer is filled only when its
        window is the next.
        """
        begun: deque[_Fill] = deque()

        def groups() -> Iterator[Sequence[FetchRequest]]:
            for window, memory in zip(planned, cycle(buffers), strict=False):
                begun.append(self._plan(window, memory.array[: window.length]))
                yield begun[-1].requests

        for _ in self._fetcher.fetch_each(groups()):
            self._finish(begun.popleft())
            yield _CheckState(len(self.checks), self._running)

    def _plan(self, window: FileWindow, target: NDArray[np.uint8]) -> _Fill:
        extents = extents_of(self.layout, window)
        fill = _Fill(window, target, extents, [], [], [])
        for extent in extents:
            if extent.output is not None:
                begin, end = _cut(extent, window)
                self._request(extent, begin, end, _memory_of(extent, window, target), fill)
        return fill

    def _finish(self, fill: _Fill) -> None:
        """Write into the window all bytes that are not elements of tensors, and compute the checksums."""
        window, target = fill.window, fill.target
        for into, source in fill.patches:
            into[...] = source
        self._zero_gaps(window, fill.extents, target)
        if self.layout.check == "chunks":
            self.checks += [xxh3_64(chunk) for chunk in fill.chunks]
        elif self.layout.check == "crc32":
            self._add_crcs(window, fill.extents, target)
        for extent in fill.extents:
            if extent.output is None:  # comes last, as such bytes may contain the checksums of earlier extents
                begin, end = _cut(extent, window)
                _memory_of(extent, window, target)[:] = np.frombuffer(self._literal_bytes(extent), np.uint8)[begin:end]

    def close(self) -> None:
        """Close the source's files."""
        self._fetcher.close()

    def _zero_gaps(self, window: FileWindow, extents: Sequence[Extent], target: NDArray[np.uint8]) -> None:
        ends = [window.offset, *(extent.offset + extent.length for extent in extents)]
        begins = [*(extent.offset for extent in extents), window.offset + window.length]
        for end, begin in zip(ends, begins, strict=True):
            if end < begin:
                target[end - window.offset : begin - window.offset] = 0

    def _literal_bytes(self, extent: Extent) -> bytes:
        content = extent.from_checks(self.checks) if extent.from_checks is not None else extent.literal
        assert content is not None, "an extent has content"
        assert len(content) == extent.length, "an extent is as long as its bytes"
        return content

    def _request(self, extent: Extent, begin: int, end: int, place: NDArray[np.uint8], fill: _Fill) -> None:
        """Plan the reads that fill bytes `begin` to `end` - 1 of an extent. Chunks with digests are always read
        completely.
        """
        assert extent.output is not None, "literal bytes are not read"
        output = self.layout.outputs[extent.output]
        if self.layout.check != "chunks":
            fill.requests.append(FetchRequest(output, begin, end, place))
            return
        first = begin // CHUNK_BYTES * CHUNK_BYTES
        cuts = [*range(first, end, CHUNK_BYTES), min(extent.length, -(-end // CHUNK_BYTES) * CHUNK_BYTES)]
        inner = [(low, high) for low, high in pairwise(cuts) if begin <= low and high <= end]
        if inner:
            low, high = inner[0][0], inner[-1][1]
            fill.requests.append(FetchRequest(output, low, high, place[low - begin : high - begin]))
        for low, high in pairwise(cuts):
            if begin <= low and high <= end:
                fill.chunks.append(place[low - begin : high - begin])
                continue
            whole = np.empty(high - low, np.uint8)
            fill.requests.append(FetchRequest(output, low, high, whole))
            fill.patches.append((place[max(0, low - begin) : high - begin], whole[max(0, begin - low) : end - low]))
            if high <= end:
                fill.chunks.append(whole)

    def _add_crcs(self, window: FileWindow, extents: Sequence[Extent], target: NDArray[np.uint8]) -> None:
        for extent in extents:
            if extent.output is None:
                continue
            self._running = zlib.crc32(_memory_of(extent, window, target).data, self._running)
            if _cut(extent, window)[1] == extent.length:
                self.checks.append(self._running)
                self._running = 0


def extents_of(layout: TargetLayout, window: FileWindow) -> Sequence[Extent]:
    """The extents that have bytes in a window. (An extent is a range of the file that is filled from one source: a
    tensor, given bytes, or checksums.)
    """
    extents = layout.files[window.file].extents
    first = max(0, bisect_right(extents, window.offset, key=_begin) - 1)
    # extents without bytes may be at the beginning of the window
    while first > 0 and extents[first].offset == window.offset:
        first -= 1
    last = bisect_right(extents, window.offset + window.length - 1, key=_begin)
    return [
        extent for extent in extents[first:last] if extent.length and extent.offset + extent.length > window.offset
    ]


def _begin(extent: Extent) -> int:
    return extent.offset


def _cut(extent: Extent, window: FileWindow) -> tuple[int, int]:
    """The part of an extent's bytes that is in a window, as (begin, end) within the extent."""
    begin = max(0, window.offset - extent.offset)
    return begin, min(extent.length, window.offset + window.length - extent.offset)


def _memory_of(extent: Extent, window: FileWindow, target: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The part of the window's memory `target` for the bytes of the extent."""
    begin, end = _cut(extent, window)
    skipped = extent.offset - window.offset
    return target[skipped + begin : skipped + end]
