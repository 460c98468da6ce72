"""Windows of a target's files into a store that is no directory: by the store's own write, as a save's bytes go there.

A file is one write of the store. Its rows are windows, whose bytes come when they are filled (`_native.Feed`); the
memory of a window is free once the engine has captured it. Nothing is durable before a file is whole, and a store tells
nothing of what it has of an unfinished one: so a conversion that ends early begins anew, and what it has left is swept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from flowstone import _native
from flowstone.config import POLL_S
from flowstone.convert.file_io import AlignedMemory
from flowstone.convert.journal import Begun, Durable
from flowstone.convert.layout import Layout
from flowstone.convert.source import SourceFile
from flowstone.errors import ArgumentError, BudgetError, FlowstoneError
from flowstone.store.base import FilePlan, Store, Writing

_BLOCKS = 8  # of the arena: requests that are under way at once


class StoreDraft(msgspec.Struct, frozen=True, eq=False):
    """Where a target's files go: below a directory of a store; "" is its root."""

    store: Store
    directory: str

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}" if self.directory else name


def check_shared(files: Sequence[SourceFile], draft: Path | StoreDraft) -> None:
    """Raise ArgumentError if processes on other machines cannot read the files, or write into the draft."""
    remote = [file.path for file in files if not file.is_shared]
    if isinstance(draft, StoreDraft):
        remote.append(draft.store.location)
    if remote:
        raise ArgumentError(
            f"a cluster cannot convert {remote[0]}, which is in no directory",
            next="convert it in this process: a file of a bucket is one upload, which one process makes",
        )


class Unresumed:
    """The journal of a conversion that cannot go on where it ended: see `Journal`."""

    begun: Begun | None = None
    durable: tuple[Durable, ...] = ()

    def note(self, durable: Durable) -> None:
        """Nothing to do: no later conversion asks."""


class _Open(msgspec.Struct, frozen=True, eq=False):
    """A file that is being written: `rows` by the offsets of its windows."""

    writing: Writing
    feed: _native.Feed
    rows: dict[int, int]


class StoreWrites:
    """Writes windows of files. Threads may write at once; windows of a file are filled in the order of their offsets.

    rows  (file, offset, length) of all windows, in that order
    buffers  that the windows lie in, by turns
    """

    def __init__(
        self, draft: StoreDraft, layout: Layout, rows: Sequence[tuple[int, int, int]], buffers: Sequence[AlignedMemory]
    ) -> None:
        self._draft, self._layout = draft, layout
        self._addresses = [buffers[number % len(buffers)].address for number in range(len(rows))]
        self._rows = rows
        block = draft.store.settings("write").tuning.request_bytes
        try:
            budget = max(_BLOCKS * block, len(buffers[0].array))  # parts of a large upload are longer than a request
            self._arena = _native.Arena(budget_bytes=budget, block_bytes=block, background=True)
        except OSError as error:
            raise BudgetError(
                "the operating system refused the memory of a conversion", reason=error.strerror,
                next="raise the limits on address space (ulimit -v)",
            ) from error
        self._open: dict[str, _Open] = {}
        self._offered: dict[str, int] = {}
        self._errors: dict[str, FlowstoneError | None] = {}  # of files whose receipt was taken
        self._guard = threading.Lock()

    def open(self, name: str) -> None:
        """Begin to write a file; nothing where that is under way."""
        if name in self._open:
            return
        number = next(at for at, file in enumerate(self._layout.files) if file.name == name)
        mine = [(at, row) for at, row in enumerate(self._rows) if row[0] == number]
        count, length = len(mine), np.array([row[2] for _, row in mine], np.uint64)
        feed = _native.Feed(length)
        rows = _native.WriteExtents(
            file=np.zeros(count, np.uint32), offset=np.array([row[1] for _, row in mine], np.uint64), length=length,
            address=np.array([self._addresses[at] for at, _ in mine], np.uint64),
            chunk=np.full(count, _native.NO_DIGEST, np.uint64), layout=np.full(count, -1, np.int64), layouts=[],
            chunks=0, feed=feed,
        )
        plan = FilePlan(self._draft.path(name), self._layout.files[number].bytes)
        writing = self._draft.store.write([plan], rows, self._arena)
        self._offered[name] = 0
        self._open[name] = _Open(writing, feed, {row[1]: turn for turn, (_, row) in enumerate(mine)})

    def write(self, name: str, offset: int, memory: AlignedMemory, length: int) -> None:
        """Hand over a window, which lies in its buffer; returns once that is free again. `memory`, `length`: its own.

        raises  what ended the write
        """
        del memory, length
        opened = self._open[name]
        row = opened.rows[offset]
        with self._guard:  # another thread may have the next window
            self._offered[name] = max(self._offered[name], row + 1)
            opened.feed.offer(self._offered[name])
        while opened.feed.await_captured(row, POLL_S) <= row:
            if opened.feed.ended:
                self._fail(name)

    def _fail(self, name: str) -> NoReturn:
        """Raise why the write of a file has ended early."""
        with self._guard:
            if name not in self._errors:
                self._errors[name] = self._open[name].writing.receipt().error
        error = self._errors[name]
        assert error is not None, "a write that ends early has failed"
        raise error

    def sync(self) -> None:
        """Nothing to do: a file is durable once it is whole."""

    def finished(self, name: str) -> None:
        """Wait until a file is whole and durable. Raises what ended its write."""
        opened = self._open.pop(name, None)
        if opened is not None:
            receipt = opened.writing.receipt()
            if receipt.error is not None:
                raise receipt.error

    def close(self) -> None:
        """Give up what is not finished, and free the memory."""
        while self._open:
            name, opened = self._open.popitem()
            if name not in self._errors:
                opened.writing.cancel()
                opened.writing.receipt()
        self._arena.close()
