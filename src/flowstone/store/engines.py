"""The choice of engine: which engine moves a store's bytes, and whether they bypass the page cache.

The settings say which; what they name is probed at first use. If the system refuses it later, a slower way is used from
then on, with one warning; the bytes on disk are the same. What the caller's options demand is not replaced.
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

# A ring, or its threads, may be too much for this kernel or container where a smaller one is not.
_TOO_MUCH = (errno.ENOMEM, errno.EINVAL, errno.EAGAIN)
_ALLOW = 'allow it (kernel.io_uring_disabled, the container\'s seccomp profile), or use backend="auto"'
# Errors of a request if the ring is refused: by a seccomp filter, a security module, a restriction, a limit on threads
# (the kernel's own for the ring). A file may give the same errors; then the other engine gets them again.
_RING_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ECANCELED)


class RunningEngine(msgspec.Struct, frozen=True, eq=False):
    """An engine running for one direction.

    queue_depth    smaller than requested if the system refused that
    request_bytes  the longest request
    settings       by which it was chosen
    """

    engine: _native.Engine
    queue_depth: int
    request_bytes: int
    settings: Settings

    @property
    def insists(self) -> bool:
        """Whether the caller's options demand this backend."""
        return "backend" in self.settings.explicit


class EngineChoice:
    """Chooses and starts the engines of one store. Safe from any thread; probes nothing before the first call."""

    def __init__(self, root: Path, options: EngineOptions) -> None:
        self.options = options
        self.root = root
        self._guard = Lock()
        self._settings: Mapping[Direction, Settings] | None = None
        self._engines: dict[tuple[str, int, int, int], tuple[_native.Engine, int]] = {}  # key: what was requested
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
        """The engine for a direction, started if necessary; directions with equal tuning share one.

        request_bytes  the longest request, if a tight budget has smaller blocks
        raises         StorageError if none of the allowed engines can start
        """
        settings = self.settings(direction)
        # Reads give their request length per job, so that both directions may share an engine.
        longest = self.settings("write").tuning.request_bytes
        if request_bytes is not None:
            longest = min(longest, request_bytes)
        own = longest if direction == "write" else settings.tuning.request_bytes
        with self._guard:
            engine, depth = self._start(settings, longest)
        return RunningEngine(engine, depth, own, settings)

    def _start(self, settings: Settings, request_bytes: int) -> tuple[_native.Engine, int]:
        wanted, tuning = settings.tuning.backend, settings.tuning
        if wanted == "io_uring" and "backend" in settings.explicit:
            return self._start_within("io_uring", tuning, request_bytes)
        if wanted == "posix" or self._ring_refused:
            return self._start_within("posix", tuning, request_bytes)
        asked_for = ("io_uring", tuning.queue_depth, request_bytes, tuning.workers)
        if asked_for not in self._engines and not _native.has_io_uring():
            if wanted == "io_uring":
                log.warning("%s is tuned for io_uring, which is refused here; going on with POSIX threads", self.root)
            self._ring_refused = True
            return self._start_within("posix", tuning, request_bytes)
        try:
            return self._start_within("io_uring", tuning, request_bytes)
        except StorageError as error:
            self._ring_refused = True
            log.warning("io_uring is refused (%s); going on with POSIX threads", error.facts["reason"])
            return self._start_within("posix", tuning, request_bytes)

    def _start_within(self, backend: str, tuning: Tuning, request_bytes: int) -> tuple[_native.Engine, int]:
        """Start with the requested queue depth or, if that is too much, half of it, and so on down to one."""
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
                log.warning("cannot start the %s engine with queue depth %d; going on with %d", backend, asked, depth)
            self._engines[asked_for] = engine, depth
            return engine, depth

    # Past the page cache or through it

    def alignment_to_write(self, direct: Direct) -> int:
        """BLOCK_BYTES if O_DIRECT is wanted and works here with real aligned buffers, else 1.

        raises  OSError, StorageError
        """
        if direct == "off":
            return 1
        with self._guard:
            if self._write_alignment is None:
                needed = _native.probe_direct(str(self.root))
                if direct == "on" and not 0 < needed <= BLOCK_BYTES:
                    raise self._direct_refused(found=needed or "refused")
                self._write_alignment = BLOCK_BYTES if 0 < needed <= BLOCK_BYTES else 1
            return self._write_alignment

    def takes_direct(self, fd: int) -> bool:
        """Whether this very file accepts an aligned block of zeros at its beginning with O_DIRECT.

        Some systems accept O_DIRECT at open and refuse it here; the file may also be on another file system than the
        probed directory. If not, the next files are written through the page cache too.
        """
        if _moves_block(os.pwritev, fd):
            return True
        if self.options.direct == "on":
            raise self._direct_refused(found="refused at the first write")
        self._stop_writing_direct()
        return False

    def open_to_read(self, path: Path, direct: Direct, owner: Descriptors) -> tuple[int, int]:
        """A descriptor, the last one in `owner`, and its alignment; with O_DIRECT if a real aligned read succeeds.

        raises  OSError  `owner` closes a descriptor that it may have by then
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

    def _direct_refused(self, *, found: object) -> StorageError:
        return StorageError(
            f"{self.root} refuses direct I/O (O_DIRECT)", errno=errno.EINVAL, expected="alignment up to 4096",
            found=found, next='use direct="auto", or another file system',
        )

    def _stop_writing_direct(self) -> None:
        with self._guard:
            already, self._write_alignment = self._write_alignment == 1, 1
        if not already:
            log.warning("%s refuses O_DIRECT writes; going on through the page cache", self.root)

    # When the system refuses something later

    def give_up(self, running: RunningEngine, fault: _native.Fault, *, direct: bool) -> str | None:
        """Take note of how a job failed. Returns what will be done instead from now on; None if nothing changes.

        running  the engine that ran the job
        direct   whether its files were open with O_DIRECT
        """
        if direct and fault.errno == errno.EINVAL and self.options.direct == "auto":
            if fault.operation == "write":
                self._stop_writing_direct()
            else:
                self._read_alignment = 1
                log.warning("%s refuses O_DIRECT reads; going on through the page cache", self.root)
            return "the next attempt goes through the page cache"
        refused = fault.errno in _RING_REFUSED and running.engine.backend == "io_uring"
        if refused and not running.insists:
            self._retire(running, os.strerror(fault.errno))
            return "the next attempt uses POSIX threads instead of io_uring"
        return None

    def _retire(self, running: RunningEngine, reason: str) -> None:
        """Stop using io_uring. Other jobs may still run on its engines."""
        with self._guard:
            kept = {asked: made for asked, made in self._engines.items() if asked[0] != "io_uring"}
            if running.engine not in [engine for engine, _ in self._engines.values()]:
                return  # another job on the same engine did this first
            self._retired += [engine for asked, (engine, _) in self._engines.items() if asked not in kept]
            self._engines, self._ring_refused = kept, True
        log.warning("io_uring is refused (%s); going on with POSIX threads", reason)

    def close(self) -> None:
        """Wait for running jobs and stop the threads."""
        with self._guard:
            engines = [*self._retired, *(engine for engine, _ in self._engines.values())]
            self._retired, self._engines = [], {}
        for engine in engines:
            engine.close()

    def forget(self) -> None:
        """In a forked child: the threads are gone; if one of them held the lock, it stays locked, so replace it."""
        self._guard, self._engines, self._retired = Lock(), {}, []


def open_file(path: Path, owner: Descriptors, flags: int = 0) -> int:
    """A read-only descriptor of a regular file. Follows no link; opens nothing that could block or never end.

    owner   owns and closes it, even if this call raises (descriptors.py)
    raises  OSError  ELOOP for a link, EISDIR for a directory, ENXIO for a pipe, a socket, a device
    """
    # A link could lead out of the checkpoint, and opening a pipe without a writer blocks; we create neither.
    fd = owner.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "not a regular file")
    os.set_blocking(fd, True)  # io_uring takes the flag as a wish to fail rather than to wait
    return fd


def _moves_block(call: Callable[[int, list[mmap.mmap], int], int], fd: int) -> bool:
    """Whether `call` moves one aligned block at the start of a file open with O_DIRECT.

    Only EINVAL concerns alignment. Any other error will come again when the bytes are read.
    """
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            call(fd, [block], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True
