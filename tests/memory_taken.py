"""What a call took of memory at most, as the system counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flowstone as fs


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def tried(way: Callable[[], object]) -> tuple[str, int]:
    """What came of it, and the memory that it took at most."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident_bytes("VmRSS:")
    try:
        way()
    except fs.FlowstoneError as error:
        outcome = type(error).__name__
    else:
        outcome = "done"
    return outcome, resident_bytes("VmHWM:") - before
