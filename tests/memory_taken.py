"""What a call took of memory at most, as the system counts it: in a process of its own, in which what is allocated is
what is resident."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import flowstone as fs

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
_KEPT_BYTES_MAX = 128 << 10


def return_freed_memory() -> None:
    """From now on malloc gives to the system at once what is freed, but for small blocks.

    Otherwise it keeps blocks of up to 32 MiB, in an arena of each thread: how many depends on which thread frees what,
    so on how busy the machine is. For a process that measures and does nothing else, before it has threads.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_ARENA_MAX, 1)
    assert libc.mallopt(M_MMAP_THRESHOLD, _KEPT_BYTES_MAX)


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def tried(way: Callable[[], object]) -> tuple[str, int]:
    """What came of it, and the memory that it took at most. After `return_freed_memory`."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident_bytes("VmRSS:")
    try:
        way()
    except fs.FlowstoneError as error:
        outcome = type(error).__name__
    else:
        outcome = "done"
    return outcome, resident_bytes("VmHWM:") - before
