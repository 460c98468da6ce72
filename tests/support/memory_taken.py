"""The peak memory of a call, as the system counts it.

The call runs in a process of its own, in which all allocated memory is resident.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import flowstone as fs

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
_KEPT_BYTES_MAX = 128 << 10


def return_freed_memory() -> None:
    """Make malloc return freed memory to the system at once, except for small blocks.

    Otherwise it keeps blocks of up to 32 MiB in an arena of each thread. The amount depends on which thread frees a
    block, so on the load of the machine. For a process that only measures, before it has threads.
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
    """The result, and the peak memory of the call. Use after `return_freed_memory`."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS:")
    try:
        way()
    except fs.FlowstoneError as error:
        outcome = type(error).__name__
    else:
        outcome = "done"
    return outcome, resident_bytes("VmHWM:") - before
