"""A simulated slower device: this process' requests to the device are limited to a rate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUP = Path("/sys/fs/cgroup/blkio/flowstone-bench")


@contextmanager
def held_to(bytes_per_s: float, directory: Path) -> Iterator[None]:
    """Limit this process' requests to the directory's device to that rate; 0: no limit.

    By a control group (version 1, blkio), which needs root. Write-back by the kernel's own threads is not limited.
    """
    if not bytes_per_s:
        yield
        return
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    GROUP.mkdir(exist_ok=True)
    for direction in ("read", "write"):
        (GROUP / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {int(bytes_per_s)}")
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
        GROUP.rmdir()
