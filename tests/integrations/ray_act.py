"""Functions of Ray tasks in tests; workers import this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from flowstone.convert.copy import ConversionJob, WindowRange, copy_part
from flowstone.convert.journal import DurableWindows
from flowstone.errors import DamagedError


def die_in_the_middle(job: ConversionJob, part: WindowRange) -> tuple[DurableWindows, ...]:
    """Copy a part; the first two that come to the end of a window end there with their worker."""
    deaths = sorted(job.draft.parent.glob("death-*"))

    def window_is_written(_: int) -> None:
        if len(deaths) < 2:
            (job.draft.parent / f"death-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return tuple(copy_part(job, part, window_is_written))


def die(shared: None, part: int) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def order(folder: Path, part: int) -> int:
    """Earlier parts end after later ones: part 0 waits for part 1."""
    (folder / f"part-{part}").touch()
    while part == 0 and not (folder / "part-1").exists():
        time.sleep(0.01)
    return part


def wait_for_ever(folder: Path, part: int) -> NoReturn:
    """Tell the process that does it, and that it has ended."""
    (folder / f"pid-{os.getpid()}").touch()
    try:
        while True:
            time.sleep(0.1)
    finally:
        (folder / f"pid-{os.getpid()}").rename(folder / f"ended-{os.getpid()}")


def only_the_first_ends(folder: Path, part: int) -> int:
    return part if part == 0 else wait_for_ever(folder, part)


def fail(folder: Path, part: int) -> NoReturn:
    raise DamagedError(f"part {part} is damaged", written=("a.b",), next="restore it") from OSError("why")


def refuse(folder: Path, part: int) -> int:
    return len((folder / "missing").read_bytes())
