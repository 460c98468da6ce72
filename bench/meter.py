"""Instruments: the clock, the processor, memory's high-water mark, durability and the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SYSCALL_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements between `Meter()` and `read()`, in this process and those below it."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    device_bytes: int  # read from the device; data from the page cache or shared memory does not count


class Meter:
    """Starts when it is created, and resets memory's high-water marks."""

    def __init__(self) -> None:
        for pid in (os.getpid(), *_descendants()):
            # 5 resets VmHWM to the present resident size (proc(5), since Linux 4.0).
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._cpu_s, self._device_bytes = _cpu_s(), _device_bytes()
        self._started = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def read(self) -> Reading:
        seconds = self.seconds()
        return Reading(
            seconds, _cpu_s() - self._cpu_s, _memory_bytes("VmHWM"), _device_bytes() - self._device_bytes
        )


def resident_bytes() -> int:
    return _memory_bytes("VmRSS")


def shared_bytes() -> int:
    """Resident shared memory of this process: memfds, /dev/shm and the like."""
    return _status_bytes(os.getpid(), "RssShmem")


def dirty_bytes() -> int:
    """Of the whole machine: pages of files that are not yet written, and those being written."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(value.split()[0]) * 1024 for name, _, value in lines if name in ("Dirty", "Writeback"))


def _cpu_s() -> float:
    """User and system time of this process and all below it, without kernel threads that write back.

    The time of a child that ends in between moves to the total of ended children, so differences stay correct.
    """
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_living_cpu_s, _descendants()))


def _living_cpu_s(pid: int) -> float:
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    # utime, stime, cutime, cstime are fields 14 to 17 of proc(5); the first two were cut off with the name.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _device_bytes() -> int:
    """Read from devices by this process and all below it, ended ones too; see proc_pid_io(5)."""
    return sum(_field(pid, "io", "read_bytes") for pid in (os.getpid(), *_descendants()))


def _memory_bytes(field: str) -> int:
    """Of this process, and of those below it without their shared memory, which counts where it was allocated."""
    own = _status_bytes(os.getpid(), field)
    return own + sum(
        max(0, _status_bytes(pid, field) - _status_bytes(pid, "RssShmem")) for pid in _descendants()
    )


def _status_bytes(pid: int, field: str) -> int:
    return _field(pid, "status", field) * 1024


def _field(pid: int, table: str, name: str) -> int:
    """A number of /proc/PID/TABLE; 0 where the process has just ended."""
    try:
        lines = Path(f"/proc/{pid}/{table}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _descendants() -> list[int]:
    """Living processes below this one, found by their parents' ids."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                children.setdefault(int(_stat(int(path.name))[1]), []).append(int(path.name))
            except OSError:
                continue  # it has just ended
    descendants = list(children.get(os.getpid(), ()))
    for pid in descendants:  # the list grows during the loop
        descendants += children.get(pid, ())
    return descendants


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the second may contain spaces and parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def make_durable(directory: Path) -> None:
    """Sync every file below `directory`, the directories, and the parent of `directory`."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
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
    """Drop the files from the page cache. Returns whether the kernel reports them gone; None: it cannot report.

    Only these files: dropping all caches would also make every rival read its own code again. If pages stay (a
    process maps them), it tries root's drop_caches.
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


def warm(paths: Iterable[Path]) -> bool | None:
    """Read the files into the page cache. Returns whether the kernel reports all pages there; None: it cannot."""
    buffer = bytearray(8 << 20)
    dropped: list[bool | None] = []
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        cached = _cached_pages(path)
        dropped.append(None if cached is None else cached * mmap.PAGESIZE >= path.stat().st_size)
    return None if None in dropped else all(dropped)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def _cached_pages(path: Path) -> int | None:
    """Pages of the file in the page cache, by cachestat(2); None if the kernel has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole, status = _Range(0, 0), _CacheStat()
    fd = os.open(path, os.O_RDONLY)
    try:
        failed = libc.syscall(_SYSCALL_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(status), 0)
    finally:
        os.close(fd)
    return None if failed else int(status.cached)
