"""The copy: a target's files, window by window, from the source through bounded memory to durable bytes.

One thread reads, verifies, cuts and casts the next window while the other writes the one before. Windows are written in
order, so that one number says which are durable (`journal.py`); what is computed of their bytes is noted with it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
_BUFFERS = 2  # one is written while the other is filled
_SHARES = 4  # of the budget: those two, what is read at once, and what casts and checks take
_WINDOWS_BETWEEN_SYNCS = 8


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
    """Write the windows from number `done` on: one is filled by the other thread meanwhile."""
    names = [file.name for file in filler.layout.files]
    buffers = [AlignedMemory(filler.window_bytes) for _ in range(_BUFFERS)]
    noted, said = len(filler.checks), done
    with ThreadPoolExecutor(1, "flowstone-convert") as pool:
        filling = pool.submit(filler.fill, planned[done], buffers[done % _BUFFERS]) if done < len(planned) else None
        for number in range(done, len(planned)):
            assert filling is not None, "every window is filled before it is written"
            checks, running = filling.result()
            following = number + 1
            if following < len(planned):
                filling = pool.submit(filler.fill, planned[following], buffers[following % _BUFFERS])
            window = planned[number]
            writes.write(names[window.file], window.offset, buffers[number % _BUFFERS], window.length)
            is_last = following == len(planned)
            if is_last or planned[following].file != window.file:
                writes.finished(names[window.file])
            if is_last or following - said == _WINDOWS_BETWEEN_SYNCS:
                writes.sync()
                journal.note(following, filler.checks[noted:checks], running)
                noted, said = checks, following
            tell(window.length)


class _Filler:
    """Fills windows in order, and keeps what was computed of their bytes."""

    def __init__(self, source: Source, layout: Layout, length: int) -> None:
        self.layout, self.window_bytes = layout, length
        self._fetcher = Fetcher(source, length)
        self._begins = [[extent.offset for extent in file.extents] for file in layout.files]
        self.checks: list[int] = []
        self._running = 0

    def go_on(self, durable: Sequence[Durable]) -> None:
        """From what an earlier conversion has noted."""
        self.checks = [int(check, 16) for line in durable for check in line.checks]
        self._running = durable[-1].running

    def fill(self, window: Window, memory: AlignedMemory) -> tuple[int, int]:
        """Fill memory with a window's bytes; how many checks there are then, and the running one."""
        target = memory.array[: window.length]
        extents = self._extents(window)
        self._zero_gaps(window, extents, target)
        wanted: list[Wanted] = []
        checked: list[NDArray[np.uint8]] = []
        for extent in extents:
            if extent.output is not None:
                begin, end = _cut(extent, window)
                wanted += self._wanted(extent, begin, end, _place(extent, window, target), checked)
        self._fetcher.fetch(wanted)
        if self.layout.check == "chunks":
            self.checks += [_native.xxh3_64(chunk) for chunk in checked]
        elif self.layout.check == "crc32":
            self._add_crcs(window, extents, target)
        for extent in extents:
            if extent.output is None:  # last, as it may tell the checks of what lies before it
                begin, end = _cut(extent, window)
                _place(extent, window, target)[:] = np.frombuffer(self._known(extent), np.uint8)[begin:end]
        return len(self.checks), self._running

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

    def _wanted(
        self, extent: Extent, begin: int, end: int, place: NDArray[np.uint8], checked: list[NDArray[np.uint8]]
    ) -> list[Wanted]:
        """What fills bytes [begin, end) of an extent: where chunks have digests, those that a window cuts whole."""
        assert extent.output is not None, "what is known is not read"
        output = self.layout.outputs[extent.output]
        if self.layout.check != "chunks":
            return [Wanted(output, begin, end, place)]
        wanted = []
        first = begin // CHUNK_BYTES * CHUNK_BYTES
        cuts = [*range(first, end, CHUNK_BYTES), min(extent.length, -(-end // CHUNK_BYTES) * CHUNK_BYTES)]
        inner = [(low, high) for low, high in pairwise(cuts) if begin <= low and high <= end]
        if inner:
            low, high = inner[0][0], inner[-1][1]
            wanted.append(Wanted(output, low, high, place[low - begin : high - begin]))
        for low, high in pairwise(cuts):
            if begin <= low and high <= end:
                checked.append(place[low - begin : high - begin])
                continue
            whole = np.empty(high - low, np.uint8)
            self._fetcher.fetch([Wanted(output, low, high, whole)])
            place[max(0, low - begin) : high - begin] = whole[max(0, begin - low) : end - low]
            if high <= end:
                checked.append(whole)
        return wanted

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
