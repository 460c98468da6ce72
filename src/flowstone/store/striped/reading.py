"""Extents on their way from several paths into memory, each through its own queue."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from flowstone import _native
from flowstone.config import POLL_S
from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.base import ReadReceipt
from flowstone.store.jobs import read_error
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.parts import OpenExtents, Parts
from flowstone.store.striped.path import Striping

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EIO, errno.ESTALE, errno.ENOTCONN)


Opening = Callable[[Parts, Sequence[str], int], OpenExtents]
"""Opens files of a path; the number is their `of_path`."""


class StripedReading:
    """Extents of one load; owns what is open. Starts at once; raises if a path refuses to open its files."""

    def __init__(
        self, store: Striping, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena,
        opening: Opening, *, stop_at_bad: bool, ahead: bool,
    ) -> None:
        self._root = Path(store.location)
        by_path: dict[int, list[tuple[int, str]]] = {}
        for number in sorted(set(chain.from_iterable(rows.file_groups))):
            of_path, there = store.place(paths[number])
            by_path.setdefault(of_path, []).append((number, there))
        by_path.setdefault(0, [])
        self._opened: list[OpenExtents] = []
        natives: list[_native.File | None] = [None] * len(paths)
        try:
            for at, (of_path, wanted) in enumerate(sorted(by_path.items())):
                try:
                    opened = opening(store.paths()[of_path].store, [there for _, there in wanted], at)
                except StorageError as error:
                    raise (_missing(store, of_path, wanted, error) if of_path else error) from error
                self._opened.append(opened)
                for (number, _), native in zip(wanted, opened.natives, strict=True):
                    natives[number] = native
            engine = store.engine([one.engine for one in self._opened], "read", arena)
            tuning = store.settings("read").tuning
            with translated(self._root, "begin to read from", "", remedy=MORE_THREADS):
                self._job = engine.read(
                    arena, natives, rows, stop_at_bad=stop_at_bad, in_place=tuning.in_place and not ahead,
                    request_bytes=min(tuning.request_bytes, arena.block_bytes), ahead=ahead,
                )
            self._begin()
        except BaseException:
            self._close()
            raise

    def _begin(self) -> None:
        try:
            for one in self._opened:
                one.begin(self._job)
        except BaseException:
            self._job.cancel()
            while not self._job.wait(POLL_S):
                pass
            raise

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def aim(self, rows: _native.ReadExtents) -> None:
        self._job.aim(rows)

    def wait(self, timeout_s: float) -> bool:
        return self._job.wait(timeout_s)

    def cancel(self) -> None:
        self._job.cancel()

    def receipt(self) -> ReadReceipt:
        while not self._job.wait(POLL_S):
            pass
        self._close()
        job = self._job
        return ReadReceipt(
            self._error(), job.bad_chunks, job.touched, job.requested_bytes, job.copied_bytes, job.direct_bytes,
            job.requests, [job.spans],
        )

    def _error(self) -> FlowstoneError | None:
        told = next((error for error in (one.error() for one in self._opened) if error is not None), None)
        return told or read_error(self._root, self._job.fault, cancelled=self._job.cancelled)

    def _close(self) -> None:
        for one in self._opened:
            one.close()


def _missing(
    store: Striping, of_path: int, wanted: Sequence[tuple[int, str]], error: StorageError
) -> StorageError:
    """The error of a path that does not open its segments: which of them are there, on which paths."""
    if error.errno not in _GONE:
        return error
    store.check_path(of_path, ", ".join(name for _, name in wanted[:5]))
    path = store.paths().get(of_path)
    where = "a path that is not known" if path is None else f"path {of_path}, {path.store.location}"
    there = []
    for _, name in wanted:
        try:
            if path is not None and path.store.exists(name):
                there.append(name)
        except FlowstoneError:
            continue  # safe: it counts as missing
    lacking = [name for _, name in wanted if name not in there]
    shown = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
    return StorageError(
        f"{len(lacking)} of {len(wanted)} segments on {where} are not there", errno=error.errno or 0, missing=shown,
        reason=error.message, next="mount that path, or give where it is now to fs.Striped; or load an older step",
    )
