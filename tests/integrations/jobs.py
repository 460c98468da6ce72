"""Scripts that train, run as jobs of one or several processes, which may be killed on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 30
KILL_AFTER_BATCHES = 18  # of one each step: between two saves


def play(script: str, folder: Path, run: str, *, store: str, ranks: int = 1, kill_after_batches: int = 0) -> list[int]:
    """Run a script on all ranks; their exit codes. Once one has failed, the others are killed.

    store  the directory in `runs/` where checkpoints lie: nothing is killed before there is one (see prelude.py)
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        where: Mapping[str, Any] = {
            "RECIPE": store, "RECIPE_RUN": str(folder / run), "RECIPE_KILL_AFTER_BATCHES": str(kill_after_batches),
            "PYTHONPATH": str(HERE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        }
        environment = {**os.environ, **where}
        if ranks == 1:
            del environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]
        with (folder / f"{run}-{rank}.txt").open("w") as said:
            processes.append(subprocess.Popen(
                [sys.executable, "-c", script], cwd=folder, env=environment, stdout=said, stderr=said,
            ))
    deadline = time.monotonic() + 900
    try:
        codes = [one.poll() for one in processes]
        while None in codes and set(codes) <= {None, 0} and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [one.poll() for one in processes]
        return [code for code in codes if code is not None]
    finally:
        for one in processes:
            one.kill()
            one.wait()


def told(folder: Path, run: str, rank: int = 0) -> Any:
    """What `prelude.tell` has written at the end of a run."""
    found = folder / run / f"{rank}.json"
    assert found.exists(), (folder / f"{run}-{rank}.txt").read_text()
    return json.loads(found.read_text())


def check_resumes(script: str, folder: Path, *, store: str, ranks: int = 1) -> None:
    """Run a script of 30 steps that saves every five: killed on the way and resumed, it ends as if it had not been."""
    calm, killed = folder / "calm", folder / "killed"
    for one in (calm, killed):
        one.mkdir()
    assert set(play(script, calm, "undisturbed", store=store, ranks=ranks)) == {0}, (
        calm / "undisturbed-0.txt").read_text()
    codes = play(script, killed, "cut-short", store=store, ranks=ranks, kill_after_batches=KILL_AFTER_BATCHES)
    assert -signal.SIGKILL in codes, (killed / "cut-short-0.txt").read_text()
    assert set(play(script, killed, "resumed", store=store, ranks=ranks)) == {0}, (killed / "resumed-0.txt").read_text()
    for rank in range(ranks):
        expected, found = told(calm, "undisturbed", rank), told(killed, "resumed", rank)
        assert len(expected["batches"]) == STEPS
        assert STEPS - KILL_AFTER_BATCHES < len(found["batches"]) <= STEPS - 5, "it resumed, behind what was saved"
        assert found["batches"] == expected["batches"][-len(found["batches"]):]
        assert found["parts"] == expected["parts"]
