"""Saves beside training: which threads yield, and what resources a save may take."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

import flowstone as fs

MIB = 1 << 20


def niceness() -> dict[int, int]:
    """Of every thread of this process (proc_pid_stat(5), field 19)."""
    result = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended since
            result[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return result


def test_threads_that_move_bytes_give_way_and_nobody_else_does(tmp_path: Path) -> None:
    gc.collect()  # what other tests have left ends its threads now
    before = niceness()
    own = before[threading.get_native_id()]
    with fs.Checkpointer(tmp_path / "s", engine=fs.EngineOptions(workers=2)) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(1 << 20)}).committed.result()
        after = niceness()
    assert {thread: after[thread] for thread in before if thread in after} == before
    new = [nice for thread, nice in after.items() if thread not in before]
    assert new.count(min(own + 5, 19)) >= 4, "two workers, the arena's, the backend's"
    assert set(new) <= {own, min(own + 5, 19)}


@pytest.mark.parametrize("fence", ["auto", "manual"])
def test_a_cap_on_what_saves_write_holds_whoever_waits(tmp_path: Path, fence: Literal["auto", "manual"]) -> None:
    options = fs.EngineOptions(request_bytes=2 * MIB, write_bytes_per_s=20 * MIB)
    with fs.Checkpointer(tmp_path / "s", engine=options) as checkpointer:
        started = time.monotonic()
        checkpointer.save(1, {"x": torch.ones(5 * MIB // 2)}, fence=fence).committed.result()
        # Five requests, the first of them at once. No machine is fast enough to end sooner.
        assert time.monotonic() - started >= 4 * 2 * MIB / (20 * MIB)


def test_a_cap_below_one_request_a_second_is_refused() -> None:
    with pytest.raises(ValueError, match="write_bytes_per_s 1000 is less"):
        fs.EngineOptions(write_bytes_per_s=1000)
