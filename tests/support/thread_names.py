"""The threads of this process, and those that docs/ARCHITECTURE.md lists."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

INVENTORY = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURE.md"


def inventory() -> set[str]:
    """The names in the first column of the table of threads."""
    section = INVENTORY.read_text().partition("## Threads")[2]
    return set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE))


def live() -> dict[int, str]:
    """For each thread of this process, by its system id: its name in Python, or else in the system."""
    names = {}
    for number in map(int, os.listdir("/proc/self/task")):
        try:
            names[number] = Path(f"/proc/self/task/{number}/comm").read_text().strip()
        except OSError:
            continue  # it has just ended
    names |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
    return {number: re.sub(r"[_-]\d+$", "", name) for number, name in names.items()}
