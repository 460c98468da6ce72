"""Chooses the engine that moves a store's bytes (io_uring or POSIX threads), and whether reads and writes bypass the
page cache.

The settings determine both. The choice is tried at its first use. If the system refuses it later, a slower engine or
the page cache is used from then on, and one warning is logged; the bytes on disk are the same. If the caller's options
demand the choice, the call fails instead.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

import msgspec

from flowstone import _native
from flowstone.config import BLOCK_BYTES, Direct, Direction, EngineOptions, Tuning
from flowstone.errors import StorageError
from flowstone.log import log
from flowstone.store.descriptors import Descriptors
from flowstone.store.os_errors import MORE_THREADS, explain
from flowstone.store.settings import Settings, find_settings

# Errors if the ring or the number of threads is too large for this kernel or container. A smaller one may work.
_TOO_MUCH = (errno.ENOMEM, errno.EINVAL, errno.EAGAIN)
_ALLOW = 'allow it (kernel.io_uring_disabled, the container\'s seccomp profile), or use backend="auto"'
# Errors of a request if the system refuses io_uring: by a seccomp filter, a security module, a restriction, or a limit
# on threads (the kernel starts its own for the ring). A file may cause the same errors; in that case the other engine
# reports them again.
_RING_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ECANCELED)


class RunningEngine(msgspec.Struct, frozen=True, eq=False):
    """An engine running for one direction.

    queue_depth    how many requests run at once; smaller than the setting if the system refused that many
    request_bytes  length of the longest request, in bytes
    settings       the settings that chose it
    """

    engine: _native.Engine
    queue_depth: int
    request_bytes: int
    settings: Settings

    @property
    def is_required(self) -> bool:
        """Whether the caller's options demand this backend."""
        return "backend" in self.settings.explicit


class EngineChoice:
    """Chooses and starts the engines of one store. Can be used on any thread. Tries nothing before the first call."""

    def __init__(self, root: Path, options: EngineOptions) -> None:
        self.options = options
        self.root = root
        self._guard = Lock()
        self._settings: Mapping[Direction, Settings] | None = None
        # requested settings -> engine, and its queue depth
        self._engines: dict[tuple[str, int, int, int], tuple[_native.Engine, int]] = {}
        self._retired: list[_native.Engine] = []
        self._ring_refused = False
        self._write_alignment: int | None = None
        self._read_alignment: int | None = None

    def settings(self, direction: Direction) -> Settings:
        if self._settings is None:
            self._settings = find_settings(self.root, self.options)
        return self._settings[direction]

    # The engines

    def running(self, direction: Direction, request_bytes: int | None = None) -> RunningEngine:
        """The engine for a direction, which is started if necessary. If both directions have equal tuning, they share
        one engine.

        request_bytes  length of the longest request, if a small memory budget needs smaller blocks
        raises         StorageError  none of the allowed engines can start
        """
        settings = self.settings(direction)
        # Reads pass their request length with each job, so the length for writes does not matter if both directions
        # share an engine.
        longest = self.settings("write").tuning.request_bytes
        if request_bytes is not None:
            longest = min(longest, request_bytes)
        own = longest if direction == "write" else settings.tuning.request_bytes
        with self._guard:
            engine, depth = self._start(settings, longest)
        return RunningEngine(engine, depth, own, settings)

    def _start(self, settings: Settings, request_bytes: int) -> tuple[_native.Engine, int]:
        backend, tuning = settings.tuning.backend, settings.tuning
        if backend == "io_uring" and "backend" in settings.explicit:
            return self._start_within("io_uring", tuning, request_bytes)
        if backend == "posix" or self._ring_refused:
            return self._start_within("posix", tuning, request_bytes)
        asked_for = ("io_uring", tuning.queue_depth, request_bytes, tuning.workers)
        if asked_for not in self._engines and not _native.has_io_uring():
            if backend == "io_uring":
                log.warning(
                    "the tuning of %s says io_uring, but the system refuses io_uring; using POSIX threads instead",
                    self.root,
                )
            self._ring_refused = True
            return self._start_within("posix", tuning, request_bytes)
        try:
            return self._start_within("io_uring", tuning, request_bytes)
        except StorageError as error:
            self._ring_refused = True
            log.warning("the system refuses io_uring (%s); using POSIX threads instead", error.facts["reason"])
            return self._start_within("posix", tuning, request_bytes)

    def _start_within(self, backend: str, tuning: Tuning, request_bytes: int) -> tuple[_native.Engine, int]:
        """Start an engine with the requested queue depth; if the system refuses that, with half of it, and so on down
        to one.
        """
        asked_for = (backend, tuning.queue_depth, request_bytes, tuning.workers)
        if asked_for in self._engines:
            return self._engines[asked_for]
        depth = tuning.queue_depth
        while True:
            try:
                engine = _native.Engine(
                    backend="io_uring" if backend == "io_uring" else "posix", queue_depth=depth,
                    request_bytes=request_bytes, workers=tuning.workers, background=True,
                )
            except OSError as error:
                code = error.errno or 0
                if code in _TOO_MUCH and depth > 1:
                    depth //= 2
                    continue
                raise explain(
                    self.root, f"start the {backend} engine for", code, str(self.root),
                    remedy=MORE_THREADS if code == errno.EAGAIN else _ALLOW if code in _RING_REFUSED else None,
                ) from error
            if depth < tuning.queue_depth:
                asked = tuning.queue_depth
                log.warning("cannot start the %s engine with queue depth %d; using %d instead", backend, asked, depth)
            self._engines[asked_for] = engine, depth
            return engine, depth

    # Past the page cache or through it

    def alignment_to_write(self, direct: Direct) -> int:
        """BLOCK_BYTES if O_DIRECT is wanted and works here with real aligned buffers, otherwise 1.

        raises  OSError, StorageError
        """
        if direct == "off":
            return 1
        with self._guard:
            if self._write_alignment is None:
                needed = _native.probe_direct(str(self.root))
                if direct == "on" and not 0 < needed <= BLOCK_BYTES:
                    raise self._direct_refused(actual=needed or "refused")
                self._write_alignment = BLOCK_BYTES if 0 < needed <= BLOCK_BYTES else 1
            return self._write_alignment

    def takes_direct(self, fd: int) -> bool:
        """Whether this file accepts an aligned block of zeros at its beginning with O_DIRECT.

        Some systems accept O_DIRECT when a file is opened, and refuse the first write. The file may also be on another
        file system than the directory that was tried before. If this file does not accept the write, later files are
        also written through the page cache.
        """
        if _moves_block(os.pwritev, fd):
            return True
        if self.options.direct == "on":
            raise self._direct_refused(actual="refused at the first write")
        self._stop_writing_direct()
        return False

    def open_to_read(self, path: Path, direct: Direct, owner: Descriptors) -> tuple[int, int]:
        """Open a file to read. Returns its descriptor, which `owner` closes, and its alignment: BLOCK_BYTES with
        O_DIRECT, if an aligned read succeeds; otherwise 1.

        raises  OSError; `owner` closes any descriptor that was opened until then
        """
        if direct != "off" and self._read_alignment != 1:
            try:
                fd = open_file(path, owner, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._read_alignment = 1
            else:
                if self._read_alignment or _moves_block(os.preadv, fd):
                    self._read_alignment = BLOCK_BYTES
                    return fd, BLOCK_BYTES
                owner.close(leave=len(owner) - 1)
                self._read_alignment = 1
        return open_file(path, owner), 1

    def _direct_refused(self, *, actual: object) -> StorageError:
        return StorageError(
            f"{self.root} refuses direct I/O (O_DIRECT)", errno=errno.EINVAL, expected="alignment up to 4096",
            found=actual, next='use direct="auto", or another file system',
        )

    def _stop_writing_direct(self) -> None:
        with self._guard:
            already, self._write_alignment = self._write_alignment == 1, 1
        if not already:
            log.warning("%s refuses O_DIRECT writes; using the page cache from now on", self.root)

    # When the system refuses the choice later

    def adapt_to_failure(self, running: RunningEngine, fault: _native.Fault, *, direct: bool) -> str | None:
        """Change the choice after a job has failed. Returns what the next attempt does instead, as text; None if
        nothing changes.

        running  the engine that ran the job
        direct   whether its files were open with O_DIRECT
        """
        if direct and fault.errno == errno.EINVAL and self.options.direct == "auto":
            if fault.operation == "write":
                self._stop_writing_direct()
            else:
                self._read_alignment = 1
                log.warning("%s refuses O_DIRECT reads; using the page cache from now on", self.root)
            return "the next attempt goes through the page cache"
        refused = fault.errno in _RING_REFUSED and running.engine.backend == "io_uring"
        if refused and not running.is_required:
            self._retire(running, os.strerror(fault.errno))
            return "the next attempt uses POSIX threads instead of io_uring"
        return None

    def _retire(self, running: RunningEngine, reason: str) -> None:
        """Stop using io_uring for later jobs. Jobs that run on its engines continue."""
        with self._guard:
            remaining = {asked: made for asked, made in self._engines.items() if asked[0] != "io_uring"}
            if running.engine not in [engine for engine, _ in self._engines.values()]:
                return  # another job on the same engine has done this before
            self._retired += [engine for asked, (engine, _) in self._engines.items() if asked not in remaining]
            self._engines, self._ring_refused = remaining, True
        log.warning("the system refuses io_uring (%s); using POSIX threads from now on", reason)

    def close(self) -> None:
        """Wait for running jobs and stop the threads."""
        with self._guard:
            engines = [*self._retired, *(engine for engine, _ in self._engines.values())]
            self._retired, self._engines = [], {}
        for engine in engines:
            engine.close()

    def forget(self) -> None:
        """Called in a forked child, which has none of the engines' threads. A lock that one of them held would stay
        locked, so it is replaced.
        """
        self._guard, self._engines, self._retired = Lock(), {}, []


def open_file(path: Path, owner: Descriptors, flags: int = 0) -> int:
    """Open a regular file to read. Returns its descriptor. Does not follow a symbolic link, and opens no file that
    could block or never end.

    owner   closes the descriptor, even if this call raises an error (descriptors.py)
    raises  OSError  ELOOP for a link, EISDIR for a directory, ENXIO for a pipe, a socket, a device
    """
    # A link could lead out of the checkpoint, and opening a pipe without a writer blocks; Flowstone creates neither.
    fd = owner.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "the path is not a regular file")
    os.set_blocking(fd, True)  # with O_NONBLOCK set, io_uring fails requests instead of waiting
    return fd


def _moves_block(call: Callable[[int, list[mmap.mmap], int], int], fd: int) -> bool:
    """Whether `call` can read or write one aligned block at the start of a file that is open with O_DIRECT.

    Only EINVAL means that the file does not accept such requests. Any other error is raised again when bytes are read.
    """
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            call(fd, [block], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True
