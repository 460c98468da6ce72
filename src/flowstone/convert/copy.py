"""The copy: a target's files, window by window, from the source through bounded memory to durable bytes.

Threads read ahead (`fetch.py`); one verifies, cuts and casts the next window, and two write those before.
Windows are written in order, so that one number says which are durable (`journal.py`); what is computed of their bytes
is noted with it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, MIB
from flowstone.convert.fetch import Fetcher, Wanted
from flowstone.convert.file_io import AlignedMemory, Writes
from flowstone.convert.journal import Durable, Journal
from flowstone.convert.layout import Extent, Layout
from flowstone.convert.source import Source
from flowstone.errors import BudgetError
from flowstone.store.os_errors import translated

BUDGET_BYTES_DEFAULT = 256 * MIB
BUDGET_BYTES_MIN = 32 * MIB
_BUFFERS = 4  # up to three are written while another is filled
_WRITERS = 2  # threads: one writes while the last requests of the other's window are under way
_SHARES = 8  # of the budget: those four, two of what is read at once, and two of what casts and checks take
_READ_SHARES = 2
_WINDOWS_BETWEEN_SYNCS = 16


class Window(msgspec.Struct, frozen=True):
    """Bytes of a target's file that are filled and written at once; `offset` is a multiple of BLOCK_BYTES."""

    file: int
    offset: int
    length: int


class Copied(msgspec.Struct, frozen=True):
    """What a copy did. `checks` of all extents; of its `bytes`, so many were durable before it began."""

    checks: tuple[int, ...]
    bytes: int
    resumed_bytes: int


def window_bytes(budget_bytes: int) -> int:
    """How long a window is. Raises BudgetError."""
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
    source: Source, layout: Layout, draft: Path, journal: Journal, *, budget_bytes: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Write all files of the layout into the draft, from where the journal ends. Durable on return.

    raises  what reading and writing raise; then the journal says what is durable
    """
    length = window_bytes(budget_bytes)
    planned = windows(layout, length)
    filler = _Filler(source, layout, length)
    done = journal.durable[-1].windows if journal.durable else 0
    if journal.durable:
        filler.go_on(journal.durable)
        journal.cut_torn_line()
    ready = sum(window.length for window in planned[:done])
    writes = Writes(draft, layout.bytes)
    try:
        if not done:
            assert journal.begun is not None, "a journal begins before its draft is written"
            journal.begin(journal.begun.plan, journal.begun.draft)
            writes.make_directories(layout.directories)
            for file in layout.files:
                (draft / file.name).unlink(missing_ok=True)
                writes.create(file.name, file.bytes)
        _write_all(planned, done, filler, writes, journal, _teller(ready, layout.bytes, on_progress))
    finally:
        filler.close()
        writes.close()
    return Copied(tuple(filler.checks), layout.bytes, ready)


def _teller(ready: int, total: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = ready

    def tell(length: int) -> None:
        nonlocal done
        done += length
        if on_progress is not None:
            on_progress(done, total)

    return tell


def _write_all(
    planned: Sequence[Window], done: int, filler: _Filler, writes: Writes, journal: Journal, tell: Callable[[int], None]
) -> None:
    """Write the windows from number `done` on: others are written and filled by other threads meanwhile."""
    progress = _Progress(planned, done, filler, writes, journal, tell)
    buffers = [AlignedMemory(filler.window_bytes) for _ in range(_BUFFERS)]
    fills = filler.fill_all(planned[done:], buffers)
    with (
        ThreadPoolExecutor(1, "flowstone-convert") as pool,
        ThreadPoolExecutor(_WRITERS, "flowstone-convert-write") as writers,
    ):
        filling = pool.submit(next, fills) if done < len(planned) else None
        for number, memory in zip(range(done, len(planned)), cycle(buffers), strict=False):
            assert filling is not None, "every window is filled before it is written"
            mark, window = filling.result(), planned[number]
            name = progress.opened(window)
            writing = writers.submit(writes.write, name, window.offset, memory, window.length)
            progress.under_way.append((mark, writing))
            if number + 1 < len(planned):
                filling = pool.submit(next, fills)
            while len(progress.under_way) >= _BUFFERS - 1:  # the buffer after the next must be free
                progress.end_oldest()
        while progress.under_way:
            progress.end_oldest()


class _Progress:
    """Ends writes in the order of the windows, and notes which are durable. The caller's thread."""

    def __init__(
        self, planned: Sequence[Window], done: int, filler: _Filler, writes: Writes, journal: Journal,
        tell: Callable[[int], None],
    ) -> None:
        self.under_way: deque[tuple[_Mark, Future[None]]] = deque()
        self._planned, self._filler, self._writes = planned, filler, writes
        self._journal, self._tell = journal, tell
        self._names = [file.name for file in filler.layout.files]
        self._written = self._said = done  # windows
        self._noted = len(filler.checks)

    def opened(self, window: Window) -> str:
        """The name of a window's file, which is open then."""
        name = self._names[window.file]
        self._writes.open(name)
        return name

    def end_oldest(self) -> None:
        """Wait for the write that was begun first.

        raises  what it raised
        """
        mark, writing = self.under_way.popleft()
        writing.result()
        window = self._planned[self._written]
        self._written += 1
        is_last = self._written == len(self._planned)
        if is_last or self._planned[self._written].file != window.file:
            self._writes.finished(self._names[window.file])
        if is_last or self._written - self._said == _WINDOWS_BETWEEN_SYNCS:
            self._writes.sync()
            self._journal.note(self._written, self._filler.checks[self._noted : mark.checks], mark.running)
            self._noted, self._said = mark.checks, self._written
        self._tell(window.length)


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

    def __init__(self, source: Source, layout: Layout, length: int) -> None:
        self.layout, self.window_bytes = layout, length
        self._fetcher = Fetcher(source, _READ_SHARES * length)
        self._begins = [[extent.offset for extent in file.extents] for file in layout.files]
        self.checks: list[int] = []
        self._running = 0

    def go_on(self, durable: Sequence[Durable]) -> None:
        """From what an earlier conversion has noted."""
        self.checks = [int(check, 16) for line in durable for check in line.checks]
        self._running = durable[-1].running

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
        extents = self._extents(window)
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

    def _extents(self, window: Window) -> Sequence[Extent]:
        """Those that have bytes in a window."""
        begins, extents = self._begins[window.file], self.layout.files[window.file].extents
        first = max(0, bisect_right(begins, window.offset) - 1)
        while first > 0 and extents[first].offset == window.offset:  # empty ones may lie before it
            first -= 1
        last = bisect_right(begins, window.offset + window.length - 1)
        return [
            extent for extent in extents[first:last] if extent.length and extent.offset + extent.length > window.offset
        ]

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


def _cut(extent: Extent, window: Window) -> tuple[int, int]:
    """Which bytes of an extent lie in a window."""
    begin = max(0, window.offset - extent.offset)
    return begin, min(extent.length, window.offset + window.length - extent.offset)


def _place(extent: Extent, window: Window, target: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Where those lie in the window's memory."""
    begin, end = _cut(extent, window)
    skipped = extent.offset - window.offset
    return target[skipped + begin : skipped + end]
