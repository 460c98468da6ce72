"""The options of a session, and the output of its stages."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, object]
"""One result: "what", "value", "unit", and further fields."""

STATE_BYTES = 20_000_000_000
"""Of the state whose saves are measured, if space and time are enough for it."""
CHECKPOINTS_MAX = 4  # of that size at one time: the newest, one in the making, one being removed; and some space
SAVE_S = 8.0  # the longest time to write it: a stage writes a few of them
MEMORY = Path("/dev/shm")


def state_bytes_max(scratch: Path, disk_gb_per_s: float | None) -> int:
    """The largest state that the disk and the machine's memory have space for, and that the disk writes in time.

    disk_gb_per_s  None: not measured
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free_bytes = min(STATE_BYTES, shutil.disk_usage(scratch).free // CHECKPOINTS_MAX, memory // CHECKPOINTS_MAX)
    return free_bytes if disk_gb_per_s is None else min(free_bytes, int(disk_gb_per_s * 1e9 * SAVE_S))


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes are in bytes.

    simulate  on the simulated device, and small
    scratch   a directory on the disk that is measured; each stage has a new folder there
    state_bytes_max  for the state whose saves are measured
    """

    simulate: bool
    scratch: Path
    state_bytes_max: int = STATE_BYTES

    def words(self) -> list[str]:
        """Arguments for the command of a process with the same options."""
        words = ["--scratch", str(self.scratch), "--state-bytes-max", str(self.state_bytes_max)]
        return [*words, "--simulate"] if self.simulate else words

    @property
    def state_bytes(self) -> int:
        """Of the state whose saves are measured."""
        return 24_000_000 if self.simulate else self.state_bytes_max

    def in_memory(self, size: int) -> Path:
        """A folder for a store of `size` bytes: in memory, or on the disk if memory is too small (most containers)."""
        has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= size
        return MEMORY if has_room else self.scratch

    @property
    def tensors(self) -> int:
        return 30 if self.simulate else 900

    @property
    def kind_bytes(self) -> int:
        """Of one kind of state: strided, working copies with their masters, replicas."""
        return 12_000_000 if self.simulate else 1_000_000_000

    @property
    def device_bytes(self) -> int:
        """Of the simulated device."""
        return 192 << 20

    @property
    def step_s(self) -> float:
        """Of a step of the measured loop."""
        return 0.005 if self.simulate else 0.5


def parse(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--state-bytes-max", type=int, default=STATE_BYTES)
    args = parser.parse_args(argv)
    return Options(args.simulate, args.scratch, args.state_bytes_max)


def emit(metric: str, value: float | str | bool | None, unit: str = "", **more: object) -> None:
    """Print one result as a line of JSON on standard output. Printed results count, also if the stage ends early."""
    print(json.dumps({"what": metric, "value": value, "unit": unit, **more}), flush=True)


def note(text: str) -> None:
    """A line for readers of the log."""
    print(text, file=sys.stderr, flush=True)
