"""Read ranges of files from several paths, each path through its own queue of requests."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from flowstone._native import Arena, File, ReadExtents, ReadOptions
from flowstone.config import POLL_S
from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.base import ReadReceipt
from flowstone.store.jobs import read_error
from flowstone.store.os_errors import MORE_THREADS, translated
from flowstone.store.striped.path import PathProvider
from flowstone.store.striped.stripe_member import OpenExtents, StripeMember

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EIO, errno.ESTALE, errno.ENOTCONN)

OpenFunction = Callable[[StripeMember, Sequence[str], int], OpenExtents]
"""Opens files of a path, given the member, the files' names, and the path's number."""


class StripedReadHandle:
    """The read of one load from all paths. Owns the open files. Starts when it is created; raises an error if a path
    cannot open its files.
    """

    def __init__(
        self, store: PathProvider, paths: Sequence[str], rows: ReadExtents, arena: Arena,
        opening: OpenFunction, *, stop_at_bad: bool, ahead: bool,
    ) -> None:
        self._root = Path(store.location)
        by_path: dict[int, list[tuple[int, str]]] = {}
        for number in sorted(set(chain.from_iterable(rows.file_groups))):
            of_path, name = store.locate(paths[number])
            by_path.setdefault(of_path, []).append((number, name))
        by_path.setdefault(0, [])
        self._opened: list[OpenExtents] = []
        natives: list[File | None] = [None] * len(paths)
        try:
            for queue, (of_path, files) in enumerate(sorted(by_path.items())):
                try:
                    opened = opening(store.paths()[of_path].store, [name for _, name in files], queue)
                except StorageError as error:
                    raise (_missing(store, of_path, files, error) if of_path else error) from error
                self._opened.append(opened)
                for (number, _), native in zip(files, opened.natives, strict=True):
                    natives[number] = native
            engine = store.engine([extents.engine for extents in self._opened], "read", arena)
            tuning = store.settings("read").tuning
            with translated(self._root, "begin to read from", "", remedy=MORE_THREADS):
                self._job = engine.read(
                    arena, natives, rows, ReadOptions(
                        stop_at_bad=stop_at_bad, in_place=tuning.in_place and not ahead,
                        request_bytes=min(tuning.request_bytes, arena.block_bytes), ahead=ahead,
                    ),
                )
            self._begin()
        except BaseException:
            self._close()
            raise

    def _begin(self) -> None:
        try:
            for extents in self._opened:
                extents.begin(self._job)
        except BaseException:
            self._job.cancel()
            while not self._job.wait(POLL_S):
                pass
            raise

    @property
    def done_bytes(self) -> int:
        return self._job.done_bytes

    def aim(self, rows: ReadExtents) -> None:
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
        failure = next((error for error in (extents.error() for extents in self._opened) if error is not None), None)
        return failure or read_error(self._root, self._job.fault, cancelled=self._job.cancelled)

    def _close(self) -> None:
        for extents in self._opened:
            extents.close()


def _missing(
    store: PathProvider, of_path: int, files: Sequence[tuple[int, str]], error: StorageError
) -> StorageError:
    """The error of a path that cannot open its segments. It names the missing segments."""
    if error.errno not in _GONE:
        return error
    store.check_path(of_path, ", ".join(name for _, name in files[:5]))
    path = store.paths().get(of_path)
    place = "an unknown path" if path is None else f"path {of_path}, {path.store.location}"
    existing = []
    for _, name in files:
        try:
            if path is not None and path.store.exists(name):
                existing.append(name)
        except FlowstoneError:
            continue  # then the segment counts as missing
    lacking = [name for _, name in files if name not in existing]
    shown = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
    return StorageError(
        f"{len(lacking)} of {len(files)} files of this checkpoint on {place} are missing",
        errno=error.errno or 0, missing=shown, reason=error.message,
        next="mount that path, or give its new location to fs.Striped; or load an older step",
    )
