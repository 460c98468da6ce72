"""The page cache: drop files from it, and check that they are no longer in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_SYSCALL_CACHESTAT = 451  # the number of the system call, the same on every architecture; Linux 6.5 and later
_TRIES = 3  # a page that is being written stays cached; the sync before the next attempt waits for it


def drop_cached(paths: Iterable[Path]) -> bool | None:
    """Drop these files from the page cache. Returns whether the kernel reports that they are no longer cached; None if
    it cannot tell.

    Other files stay cached, and no privilege is needed.
    """
    paths = list(paths)
    cached: list[int | None] = []
    for _ in range(_TRIES):
        for path in paths:
            _drop(path)
        cached = [cached_pages(path) for path in paths]
        if not any(cached):
            break
    return None if None in cached else not any(cached)


def cached_pages(path: Path) -> int | None:
    """How many pages of the file are cached, according to cachestat(2), or mincore(2) on older kernels. None if neither
    can tell.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = _cachestat(fd)
        return _mincore(fd) if pages is None else pages
    finally:
        os.close(fd)


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # dirty pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def _cachestat(fd: int) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    whole, statistics = _Range(0, 0), _CacheStat()
    failed = libc.syscall(_SYSCALL_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(statistics), 0)
    return None if failed else int(statistics.cached)


def _mincore(fd: int) -> int | None:
    """How many pages of a mapping of the file are in memory. As mapping a file loads no pages, these are the cached
    pages.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # The mapping is private and writable, as ctypes needs that to take its address. Nothing is written.
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        first = ctypes.c_ubyte.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), resident)
        del first
    return None if failed else sum(state & 1 for state in resident)
