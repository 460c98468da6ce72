"""The copy: a target's files, window by window, from the source through bounded memory to durable bytes.

Threads read ahead (`fetch.py`); one verifies, cuts and casts the next window, and two write those before.
Windows are written in order, so that one number says which are durable (`journal.py`); what is computed of their bytes
is noted with it. Tasks of a cluster write a part of them each, at the same time; parts are noted in order.
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

from flowstone import _native
from flowstone.cluster import PARTS_OF_CPU, Cluster, not_shared
from flowstone.config import CHUNK_BYTES, GIB, MIB, whole_number
from flowstone.convert.fetch import Fetcher, Wanted
from flowstone.convert.file_io import AlignedMemory, Writes
from flowstone.convert.journal import Durable, Journal
from flowstone.convert.layout import Extent, Layout
from flowstone.convert.source import Source
from flowstone.convert.store_writes import StoreDraft, StoreWrites, Unresumed, check_shared
from flowstone.errors import BudgetError
from flowstone.store.os_errors import translated

BUDGET_BYTES_DEFAULT = 512 * MIB  # 256 MiB is slower, 768 no faster: `python -m bench.conversion --budget`
BUDGET_BYTES_MIN = 32 * MIB
_BUFFERS = 4  # up to three are written while another is filled
_WRITERS = 2  # threads: one writes while the last requests of the other's window are under way
_SHARES = 8  # of the budget: those four, two of what is read at once, and two of what casts and checks take
_READ_SHARES = 2
_WINDOWS_BETWEEN_SYNCS = 16
_PART_BYTES_MAX = GIB  # of a cluster's task: so much is done again at most where its worker dies


class Window(msgspec.Struct, frozen=True):
    """Bytes of a target's file that are filled and written at once; `offset` is a multiple of BLOCK_BYTES."""

    file: int
    offset: int
    length: int


class Job(msgspec.Struct, frozen=True, eq=False):
    """A conversion, as every process needs it that takes part in it.

    source  what is no tensor is not needed
    draft   the directory of the target's files, which are there already, of their full size; or their place in a store
    """

    source: Source
    layout: Layout
    draft: Path | StoreDraft
    budget_bytes: int


class Part(msgspec.Struct, frozen=True):
    """Windows [begin, end) of all. `checks`, `running`: of what lies before them, as far as they are needed."""

    begin: int
    end: int
    checks: tuple[int, ...] = ()
    running: int = 0


class Copied(msgspec.Struct, frozen=True):
    """What a copy did. `checks` of all extents; of its `bytes`, so many were durable before it began."""

    checks: tuple[int, ...]
    bytes: int
    resumed_bytes: int


def window_bytes(budget_bytes: int) -> int:
    """How long a window is. Raises BudgetError."""
    budget_bytes = whole_number("budget_bytes", budget_bytes)
    if budget_bytes < BUDGET_BYTES_MIN:
        raise BudgetError(
            f"a conversion cannot work within {budget_bytes} bytes", expected=f"at least {BUDGET_BYTES_MIN} bytes",
            next="raise budget_bytes",
        )
    return budget_bytes // _SHARES // MIB * MIB


def windows(layout: Layout, length: int) -> list[Window]:
    """The windows of all files, in the order in which they are written."""
    return [
        Window(number, offset, min(length, file.bytes - offset))
        for number, file in enumerate(layout.files)
        for offset in range(0, file.bytes, length)
    ]


def resumable(layout: Layout, journal: Journal, draft: Path, length: int) -> tuple[Durable, ...]:
    """What of an earlier conversion is there still: its lines, or none where its draft is not what they say."""
    if not journal.durable:
        return ()
    planned = windows(layout, length)
    if journal.durable[-1].windows > len(planned):
        return ()
    for file in layout.files:
        path = draft / file.name
        with translated(draft, "look at", file.name):
            if not path.is_file() or path.is_symlink() or path.stat().st_size != file.bytes:
                return ()
    return journal.durable


def copy(
    job: Job, journal: Journal | Unresumed, *, on_progress: Callable[[int, int], None] | None = None,
    cluster: Cluster | None = None,
) -> Copied:
    """Write all files of the layout into the draft, from where the journal ends. Durable on return.

    cluster  does it, in parts; None: this process does

    raises  what reading and writing raise; then the journal says what is durable
    """
    planned = windows(job.layout, window_bytes(job.budget_bytes))
    if cluster is not None:
        check_shared(job.source.files, job.draft)
    if isinstance(journal, Journal):
        if journal.durable:
            journal.cut_torn_line()
        else:
            _create_files(job, journal)
    durable = list(journal.durable)
    done = durable[-1].windows if durable else 0
    resumed = sum(window.length for window in planned[:done])
    tell = _teller(resumed, job.layout.bytes, on_progress)
    whole = Part(done, len(planned), _checks(durable), durable[-1].running if durable else 0)
    copying = copy_part(job, whole, tell) if cluster is None else _copy_elsewhere(job, whole, tell, cluster)
    with closing(copying):
        for written in copying:
            journal.note(written)
            durable.append(written)
    return Copied(_checks(durable), job.layout.bytes, resumed)


def _checks(durable: Sequence[Durable]) -> tuple[int, ...]:
    return tuple(int(check, 16) for line in durable for check in line.checks)


def _create_files(job: Job, journal: Journal) -> None:
    assert journal.begun is not None, "a journal begins before its draft is written"
    assert isinstance(job.draft, Path), "a draft with a journal is a directory"
    journal.begin(journal.begun.plan, journal.begun.draft)
    writes = Writes(job.draft, job.layout.bytes)
    writes.make_directories(job.layout.directories)
    for file in job.layout.files:
        (job.draft / file.name).unlink(missing_ok=True)
        writes.create(file.name, file.bytes)


def _teller(ready: int, total: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = ready

    def tell(length: int) -> None:
        nonlocal done
        done += length
        if on_progress is not None:
            on_progress(done, total)

    return tell


def _copy_elsewhere(
    job: Job, whole: Part, tell: Callable[[int], None], cluster: Cluster
) -> Generator[Durable, None, None]:
    """The same as `copy_part`, by tasks of a cluster."""
    planned = windows(job.layout, window_bytes(job.budget_bytes))
    parts = divided(job.layout, planned, whole, cluster.cpus * PARTS_OF_CPU)
    needed = replace(job, source=replace(job.source, objects={}, per_rank={}, documents={}))
    with closing(cluster.each(copy_part_in_task, needed, parts)) as results:
        for part, written in zip(parts, results, strict=True):
            yield from written
            tell(sum(window.length for window in planned[part.begin : part.end]))


def divided(layout: Layout, planned: Sequence[Window], whole: Part, count: int) -> list[Part]:
    """About `count` parts of one size, or more where these would be large.

    CRCs go on from window to window: then parts begin where files do.
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
    parts = [Part(begin, end) for begin, end in pairwise([*cuts, whole.end])]
    if layout.check == "crc32":  # a file asks for its own checks, by their numbers among all
        numbers = (sum(bool(one.length) for one in file.extents if one.output is not None) for file in layout.files)
        before = [0, *accumulate(numbers)]
        parts = [replace(part, checks=(0,) * before[planned[part.begin].file]) for part in parts]
    return [replace(parts[0], checks=whole.checks, running=whole.running), *parts[1:]]


def copy_part_in_task(job: Job, part: Part) -> tuple[Durable, ...]:
    """Copy a part as one process of several, perhaps on another machine. To do it twice does no harm.

    raises  StorageError where this machine does not see the files
    """
    planned = windows(job.layout, window_bytes(job.budget_bytes))[part.begin : part.end]
    used = {
        stored.file for window in planned for extent in extents_of(job.layout, window) if extent.output is not None
        for stored in job.layout.outputs[extent.output].tensor.boxes if stored.file is not None
    }
    for number in sorted(used):
        source = job.source.files[number]
        _check_seen(Path(source.path), source.bytes, source.changed_ns)
    assert isinstance(job.draft, Path), "what several processes write into is a directory"
    for number in sorted({window.file for window in planned}):
        _check_seen(job.draft / job.layout.files[number].name, job.layout.files[number].bytes)
    return tuple(copy_part(job, part))


def _check_seen(path: Path, length: int, changed_ns: int | None = None) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise not_shared(path, error.strerror) from None
    if found.st_size != length:
        raise not_shared(path, f"{found.st_size} bytes instead of {length}")
    if changed_ns not in (None, found.st_mtime_ns):
        raise not_shared(path, "it was changed at another time")


def copy_part(
    job: Job, part: Part, tell: Callable[[int], None] = lambda _: None
) -> Generator[Durable, None, None]:
    """Write the windows of a part; yields what is durable after each sync. Others are written and filled by other
    threads meanwhile.

    tell  is told the bytes of each window that is written
    """
    length = window_bytes(job.budget_bytes)
    planned = windows(job.layout, length)
    filler, buffers = _Filler(job.source, job.layout, length, part), [AlignedMemory(length) for _ in range(_BUFFERS)]
    try:
        writes = _writes(job, planned, buffers)
        try:
            yield from _write_all(planned, part, filler, buffers, writes, tell)
        finally:
            writes.close()
    finally:
        filler.close()


def _writes(job: Job, planned: Sequence[Window], buffers: Sequence[AlignedMemory]) -> Writes | StoreWrites:
    if isinstance(job.draft, Path):
        return Writes(job.draft, job.layout.bytes)
    return StoreWrites(job.draft, job.layout, [(one.file, one.offset, one.length) for one in planned], buffers)


def _write_all(
    planned: Sequence[Window], part: Part, filler: _Filler, buffers: Sequence[AlignedMemory],
    writes: Writes | StoreWrites, tell: Callable[[int], None],
) -> Iterator[Durable]:
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
            name = progress.opened(window)
            writing = writers.submit(writes.write, name, window.offset, memory, window.length)
            progress.under_way.append((mark, writing))
            if number + 1 < part.end:
                filling = pool.submit(next, fills)
            while len(progress.under_way) >= _BUFFERS - 1:  # the buffer after the next must be free
                yield from progress.end_oldest()
        while progress.under_way:
            yield from progress.end_oldest()


class _Progress:
    """Ends writes in the order of the windows, and says which are durable. The caller's thread."""

    def __init__(
        self, planned: Sequence[Window], part: Part, filler: _Filler, writes: Writes | StoreWrites,
        tell: Callable[[int], None],
    ) -> None:
        self.under_way: deque[tuple[_Mark, Future[None]]] = deque()
        self._planned, self._filler, self._writes, self._tell = planned, filler, writes, tell
        self._names = [file.name for file in filler.layout.files]
        self._written = self._said = part.begin  # windows
        self._end = part.end
        self._noted = len(filler.checks)

    def opened(self, window: Window) -> str:
        """The name of a window's file, which is open then."""
        name = self._names[window.file]
        self._writes.open(name)
        return name

    def end_oldest(self) -> Iterator[Durable]:
        """Wait for the write that was begun first. Yields what is durable, if it is said now.

        raises  what it raised
        """
        mark, writing = self.under_way.popleft()
        writing.result()
        window = self._planned[self._written]
        self._written += 1
        is_last = self._written == self._end
        if is_last or self._planned[self._written].file != window.file:
            self._writes.finished(self._names[window.file])
        self._tell(window.length)
        if is_last or self._written - self._said == _WINDOWS_BETWEEN_SYNCS:
            self._writes.sync()
            checks = tuple(f"{check:x}" for check in self._filler.checks[self._noted : mark.checks])
            self._noted, self._said = mark.checks, self._written
            yield Durable(self._written, checks, mark.running)


class _Mark(msgspec.Struct, frozen=True):
    """What is known when a window is filled: so many checks, and the running one."""

    checks: int
    running: int


class _Fill(msgspec.Struct, frozen=True, eq=False):
    """How a window is filled.

    wanted   what is read
    patches  (target, source): parts of chunks that the window cuts, copied once their whole is read
    checked  the chunks that end in the window, as they lie in memory
    """

    window: Window
    target: NDArray[np.uint8]
    extents: Sequence[Extent]
    wanted: list[Wanted]
    patches: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    checked: list[NDArray[np.uint8]]


class _Filler:
    """Fills windows in order, and keeps what was computed of their bytes."""

    def __init__(self, source: Source, layout: Layout, length: int, part: Part) -> None:
        self.layout, self.window_bytes = layout, length
        self._fetcher = Fetcher(source, _READ_SHARES * length)
        self.checks = list(part.checks)
        self._running = part.running

    def fill_all(self, planned: Sequence[Window], buffers: Sequence[AlignedMemory]) -> Iterator[_Mark]:
        """Fill the buffers by turns with the bytes of the windows.

        Yields for each window. What the next windows need is read ahead; no buffer is touched before its window's turn.
        """
        begun: deque[_Fill] = deque()

        def groups() -> Iterator[Sequence[Wanted]]:
            for window, memory in zip(planned, cycle(buffers), strict=False):
                begun.append(self._plan(window, memory.array[: window.length]))
                yield begun[-1].wanted

        for _ in self._fetcher.fetch_each(groups()):
            self._finish(begun.popleft())
            yield _Mark(len(self.checks), self._running)

    def _plan(self, window: Window, target: NDArray[np.uint8]) -> _Fill:
        extents = extents_of(self.layout, window)
        fill = _Fill(window, target, extents, [], [], [])
        for extent in extents:
            if extent.output is not None:
                begin, end = _cut(extent, window)
                self._want(extent, begin, end, _place(extent, window, target), fill)
        return fill

    def _finish(self, fill: _Fill) -> None:
        """What is no element of a tensor, and the checks."""
        window, target = fill.window, fill.target
        for into, source in fill.patches:
            into[...] = source
        self._zero_gaps(window, fill.extents, target)
        if self.layout.check == "chunks":
            self.checks += [_native.xxh3_64(chunk) for chunk in fill.checked]
        elif self.layout.check == "crc32":
            self._add_crcs(window, fill.extents, target)
        for extent in fill.extents:
            if extent.output is None:  # last, as it may tell the checks of what lies before it
                begin, end = _cut(extent, window)
                _place(extent, window, target)[:] = np.frombuffer(self._known(extent), np.uint8)[begin:end]

    def close(self) -> None:
        """Close the source's files."""
        self._fetcher.close()

    def _zero_gaps(self, window: Window, extents: Sequence[Extent], target: NDArray[np.uint8]) -> None:
        ends = [window.offset, *(extent.offset + extent.length for extent in extents)]
        begins = [*(extent.offset for extent in extents), window.offset + window.length]
        for end, begin in zip(ends, begins, strict=True):
            if end < begin:
                target[end - window.offset : begin - window.offset] = 0

    def _known(self, extent: Extent) -> bytes:
        content = extent.late(self.checks) if extent.late is not None else extent.literal
        assert content is not None, "an extent has content"
        assert len(content) == extent.length, "an extent is as long as its bytes"
        return content

    def _want(self, extent: Extent, begin: int, end: int, place: NDArray[np.uint8], fill: _Fill) -> None:
        """Note what fills bytes [begin, end) of an extent; where chunks have digests, cut ones are read whole."""
        assert extent.output is not None, "what is known is not read"
        output = self.layout.outputs[extent.output]
        if self.layout.check != "chunks":
            fill.wanted.append(Wanted(output, begin, end, place))
            return
        first = begin // CHUNK_BYTES * CHUNK_BYTES
        cuts = [*range(first, end, CHUNK_BYTES), min(extent.length, -(-end // CHUNK_BYTES) * CHUNK_BYTES)]
        inner = [(low, high) for low, high in pairwise(cuts) if begin <= low and high <= end]
        if inner:
            low, high = inner[0][0], inner[-1][1]
            fill.wanted.append(Wanted(output, low, high, place[low - begin : high - begin]))
        for low, high in pairwise(cuts):
            if begin <= low and high <= end:
                fill.checked.append(place[low - begin : high - begin])
                continue
            whole = np.empty(high - low, np.uint8)
            fill.wanted.append(Wanted(output, low, high, whole))
            fill.patches.append((place[max(0, low - begin) : high - begin], whole[max(0, begin - low) : end - low]))
            if high <= end:
                fill.checked.append(whole)

    def _add_crcs(self, window: Window, extents: Sequence[Extent], target: NDArray[np.uint8]) -> None:
        for extent in extents:
            if extent.output is None:
                continue
            self._running = zlib.crc32(_place(extent, window, target).data, self._running)
            if _cut(extent, window)[1] == extent.length:
                self.checks.append(self._running)
                self._running = 0


def extents_of(layout: Layout, window: Window) -> Sequence[Extent]:
    """Those that have bytes in a window."""
    extents = layout.files[window.file].extents
    first = max(0, bisect_right(extents, window.offset, key=_begin) - 1)
    while first > 0 and extents[first].offset == window.offset:  # empty ones may lie before it
        first -= 1
    last = bisect_right(extents, window.offset + window.length - 1, key=_begin)
    return [
        extent for extent in extents[first:last] if extent.length and extent.offset + extent.length > window.offset
    ]


def _begin(extent: Extent) -> int:
    return extent.offset


def _cut(extent: Extent, window: Window) -> tuple[int, int]:
    """Which bytes of an extent lie in a window."""
    begin = max(0, window.offset - extent.offset)
    return begin, min(extent.length, window.offset + window.length - extent.offset)


def _place(extent: Extent, window: Window, target: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Where those lie in the window's memory."""
    begin, end = _cut(extent, window)
    skipped = extent.offset - window.offset
    return target[skipped + begin : skipped + end]
