"""Write the windows (ranges) of a target's files into a store that is not a directory, with the same methods as a save.

Each file is one write of the store. A window is passed to the write once it is filled (`_native.SourceSupply`), and its
memory can be reused once the engine has captured it. A file is durable only when it is complete. So a conversion that
ends early is started from the beginning, and its leftovers are removed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from flowstone._native import NO_DIGEST, Arena, SourceSupply, WriteExtents
from flowstone.config import POLL_S
from flowstone.convert.file_io import AlignedMemory
from flowstone.convert.journal import DurableWindows, JournalStart
from flowstone.convert.layout import TargetLayout
from flowstone.convert.source import SourceFile
from flowstone.errors import ArgumentError, BudgetError, FlowstoneError
from flowstone.store.base import FilePlan, Store, WriteHandle

_BLOCKS = 8  # blocks of the arena (staging memory), which limit the requests in flight


class StoreDraft(msgspec.Struct, frozen=True, eq=False):
    """A directory in a store for a target's files. `directory`: "" is the store's root."""

    store: Store
    directory: str

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name


def check_shared(files: Sequence[SourceFile], draft: Path | StoreDraft) -> None:
    """Raise ArgumentError if processes on other machines cannot read the source's files, or cannot write into the
    draft.
    """
    remote = [file.path for file in files if not file.is_shared]
    if isinstance(draft, StoreDraft):
        remote.append(draft.store.location)
    if remote:
        raise ArgumentError(
            f"several processes cannot convert {remote[0]}, which is not in a directory",
            next="convert it without a cluster: only one process can upload a file to a bucket",
        )


class NoJournal:
    """Used instead of a ConversionJournal for a conversion that cannot be resumed."""

    start: JournalStart | None = None
    durable: tuple[DurableWindows, ...] = ()

    def record(self, durable: DurableWindows) -> None:
        """Does nothing, as no later conversion resumes this one."""


class _OpenWrite(msgspec.Struct, frozen=True, eq=False):
    """A file that is being written. `rows`: offset of a window -> its row in the write."""

    writing: WriteHandle
    feed: SourceSupply
    rows: dict[int, int]


class WindowStoreWriter:
    """Writes windows of files. Threads may write in parallel. The windows of a file must be filled in the order of
    their offsets.

    rows  all windows as (file, offset, length), in order
    buffers  the memory of the windows, used in turn
    """

    def __init__(
        self, draft: StoreDraft, layout: TargetLayout, rows: Sequence[tuple[int, int, int]],
        buffers: Sequence[AlignedMemory]
    ) -> None:
        self._draft, self._layout = draft, layout
        self._addresses = [buffers[number % len(buffers)].address for number in range(len(rows))]
        self._rows = rows
        block = draft.store.settings("write").tuning.request_bytes
        try:
            budget = max(_BLOCKS * block, len(buffers[0].array))  # a part of a large upload is longer than a request
            self._arena = Arena(budget_bytes=budget, block_bytes=block, background=True)
        except OSError as error:
            raise BudgetError(
                "the operating system refused memory for a conversion", reason=error.strerror,
                next="raise the limits on address space (ulimit -v)",
            ) from error
        self._open: dict[str, _OpenWrite] = {}
        self._offered: dict[str, int] = {}
        self._errors: dict[str, FlowstoneError | None] = {}  # name of a file whose write has ended -> its error
        self._guard = threading.Lock()

    def open(self, name: str) -> None:
        """Start to write a file, unless its write has started."""
        if name in self._open:
            return
        number = next(position for position, file in enumerate(self._layout.files) if file.name == name)
        mine = [(index, row) for index, row in enumerate(self._rows) if row[0] == number]
        count, length = len(mine), np.array([row[2] for _, row in mine], np.uint64)
        feed = SourceSupply(length)
        rows = WriteExtents(
            file=np.zeros(count, np.uint32), offset=np.array([row[1] for _, row in mine], np.uint64), length=length,
            address=np.array([self._addresses[index] for index, _ in mine], np.uint64),
            chunk=np.full(count, NO_DIGEST, np.uint64), layout=np.full(count, -1, np.int64), layouts=[],
            chunks=0,
        )
        rows.attach_supply(feed)
        plan = FilePlan(self._draft.path(name), self._layout.files[number].bytes)
        writing = self._draft.store.write([plan], rows, self._arena)
        self._offered[name] = 0
        self._open[name] = _OpenWrite(writing, feed, {row[1]: turn for turn, (_, row) in enumerate(mine)})

    def write(self, name: str, offset: int, memory: AlignedMemory, length: int) -> None:
        """Write a window from its buffer `memory`. Returns once the buffer can be reused.

        raises  the error that ended the write
        """
        del memory, length
        opened = self._open[name]
        row = opened.rows[offset]
        with self._guard:  # another thread may have the next window of the file
            self._offered[name] = max(self._offered[name], row + 1)
            opened.feed.offer(self._offered[name])
        while opened.feed.await_captured(row, POLL_S) <= row:
            if opened.feed.ended:
                self._fail(name)

    def _fail(self, name: str) -> NoReturn:
        """Raise the error that has ended the write of a file early."""
        with self._guard:
            if name not in self._errors:
                self._errors[name] = self._open[name].writing.receipt().error
        error = self._errors[name]
        assert error is not None, "a write that ends early has failed"
        raise error

    def sync(self) -> None:
        """Does nothing, since a file is durable only once it is complete."""

    def finish(self, name: str) -> None:
        """Wait until a file is complete and durable. Raises the error that ended its write."""
        opened = self._open.pop(name, None)
        if opened is not None:
            receipt = opened.writing.receipt()
            if receipt.error is not None:
                raise receipt.error

    def close(self) -> None:
        """Cancel the writes of unfinished files, and free the memory."""
        while self._open:
            name, opened = self._open.popitem()
            if name not in self._errors:
                opened.writing.cancel()
                opened.writing.receipt()
        self._arena.close()
