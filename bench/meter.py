"""Instruments: the clock, the processor, memory's high-water mark, durability and the page cache."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SYSCALL_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


@dataclass(frozen=True, slots=True)
class Reading:
    """What passed between `Meter()` and `read()`."""

    seconds: float
    cpu_s: float
    peak_bytes: int


class Meter:
    """Started when made. Memory's high-water mark is reset then."""

    def __init__(self) -> None:
        # 5 resets VmHWM to the present resident size (proc(5), since Linux 4.0).
        Path("/proc/self/clear_refs").write_text("5")
        self._cpu_s = _cpu_s()
        self._started = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def read(self) -> Reading:
        seconds = self.seconds()
        return Reading(seconds, _cpu_s() - self._cpu_s, _status_bytes("VmHWM"))


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _cpu_s() -> float:
    """User and system time of this process and its ended children; kernel threads that write back are nobody's."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def make_durable(directory: Path) -> None:
    """Sync every file below `directory`, the directories, and the one that holds it."""
    for at, _, names in os.walk(directory):
        for path in (*(Path(at, name) for name in names), Path(at)):
            _sync(path)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def cool(paths: Iterable[Path]) -> bool | None:
    """Drop the files from the page cache. Whether they are out of it, by the kernel's word; None: it has none.

    Only these files: dropping all caches would also make every rival page its own code in again.
    Where pages stay (somebody maps them), root's drop_caches is tried.
    """
    paths = list(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    cached = [_cached_pages(path) for path in paths]
    if any(cached) and os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        cached = [_cached_pages(path) for path in paths]
    return None if None in cached else not any(cached)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def _cached_pages(path: Path) -> int | None:
    """Pages of the file in the page cache, by cachestat(2); None where the kernel has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole, found = _Range(0, 0), _CacheStat()
    fd = os.open(path, os.O_RDONLY)
    try:
        failed = libc.syscall(_SYSCALL_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0)
    finally:
        os.close(fd)
    return None if failed else int(found.cached)
