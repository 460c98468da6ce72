"""The three kinds of stores as tiers of one run: the next tier has the checkpoint that a failure loses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import flowstone as fs
from memory_agent import own_agent

STEPS = 5
_TRAINER = """
import os, signal, sys
import numpy as np
import flowstone as fs

directory, bucket = sys.argv[1:]
checkpointer = fs.Checkpointer(["memory://run", fs.Tier(directory, every=2), fs.Tier(bucket, every=4)])
for step in range(1, 6):
    save = checkpointer.save(step, {"weights": np.full(300_000, step, np.int32), "step": step})
    save.committed.result()
    assert checkpointer.drain(60) == {}
save.durable.result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def _loaded(stores: list[str]) -> tuple[int, str]:
    state = {"weights": np.zeros(300_000, np.int32), "step": 0}
    with fs.Checkpointer(stores) as checkpointer:
        report = checkpointer.load(state)
    assert (state["weights"] == report.step).all()
    assert state["step"] == report.step
    return report.step, str(report.tier)


def test_a_killed_trainer_goes_on_from_memory_a_lost_node_from_the_disk_a_lost_disk_from_the_bucket(
    tmp_path: Path, url: str
) -> None:
    disk = str(tmp_path / "run")
    stores = ["memory://run", disk, url]
    command = [sys.executable, "-c", _TRAINER, disk, url]
    with own_agent():
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert _loaded(stores) == (STEPS, "memory://run")
    with own_agent():  # another node's: its memory is empty
        assert _loaded(stores) == (STEPS, disk)
    shutil.rmtree(disk)
    with own_agent():
        step, tier = _loaded(stores)
        assert (step, tier) == (STEPS, url)
        assert fs.open(url).verify().sound
