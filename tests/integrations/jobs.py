"""Scripts that train, run as jobs of one or several processes, which may be killed during the run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warm_start import warm_start

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
STEPS = 30
KILL_AFTER_BATCHES = 18  # of one each step: between two saves
_OF_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def is_installed(package: str) -> bool:
    """Whether there is such a distribution: a directory of that name, which could be imported too, is none."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def samples(page: str) -> dict[str, str]:
    """The samples of a page of docs/ that have a name, by it, in the order in which they stand."""
    text = (DOCS / page).read_text()
    samples = re.findall(r"^```python ([\w-]+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert samples, f"{page} has no samples"
    assert len(dict(samples)) == len(samples), f"two samples of {page} have one name"
    return dict(samples)


def run_ranks(
    command: Sequence[str], log: Path, ranks: int = 1, environment: Mapping[str, str] | None = None,
    folder: Path | None = None, *, is_launched: bool = False,
) -> list[int]:
    """Exit codes of the ranks that ended by themselves; once one has failed, the others are killed.

    command      of Python
    log          what rank r says goes to this path with "-r.txt" behind it
    folder       where they run
    is_launched  a rank that is alone is told its number too, as launchers do it; otherwise none is told a number,
                 though the tests themselves may have been launched
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        reported = ("127.0.0.1", str(port), str(rank), str(rank), str(ranks), str(ranks))
        own = dict(zip(_OF_LAUNCHERS, reported, strict=True)) if ranks > 1 or is_launched else {}
        with Path(f"{log}-{rank}.txt").open("w") as output:
            processes.append(subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=output, cwd=folder,
                env={**inherited, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **own, **(environment or {})},
            ))
    deadline = time.monotonic() + 900
    try:
        codes = [process.poll() for process in processes]
        while None in codes and set(codes) <= {None, 0} and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        return [code for code in codes if code is not None]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def play(script: str, folder: Path, run: str, *, store: str, ranks: int = 1, kill_after_batches: int = 0) -> list[int]:
    """Run a script on all ranks, as `run_ranks`.

    store  the directory in `runs/` where checkpoints lie: nothing is killed before there is one (see prelude.py)
    """
    environment = {
        "RECIPE": store, "RECIPE_RUN": str(folder / run), "RECIPE_KILL_AFTER_BATCHES": str(kill_after_batches),
        "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1",  # a forked process has one thread: so have those started
    }
    with warm_start("-c"):
        return run_ranks(["-c", script], folder / run, ranks, environment, folder)


def told(folder: Path, run: str, rank: int = 0) -> Any:
    """What `prelude.tell` has written at the end of a run."""
    path = folder / run / f"{rank}.json"
    assert path.exists(), (folder / f"{run}-{rank}.txt").read_text()
    return json.loads(path.read_text())


def check_resumes(script: str, folder: Path, *, store: str, ranks: int = 1) -> None:
    """Run a script of 30 steps that saves every five: killed on the way and resumed, it ends as if it had not been."""
    calm, killed = folder / "calm", folder / "killed"
    for path in (calm, killed):
        path.mkdir()
    assert set(play(script, calm, "undisturbed", store=store, ranks=ranks)) == {0}, (
        calm / "undisturbed-0.txt").read_text()
    codes = play(script, killed, "cut-short", store=store, ranks=ranks, kill_after_batches=KILL_AFTER_BATCHES)
    assert -signal.SIGKILL in codes, (killed / "cut-short-0.txt").read_text()
    assert set(play(script, killed, "resumed", store=store, ranks=ranks)) == {0}, (killed / "resumed-0.txt").read_text()
    for rank in range(ranks):
        expected, actual = told(calm, "undisturbed", rank), told(killed, "resumed", rank)
        assert len(expected["batches"]) == STEPS
        assert STEPS - KILL_AFTER_BATCHES < len(actual["batches"]) <= STEPS - 5, "it resumed, behind what was saved"
        assert actual["batches"] == expected["batches"][-len(actual["batches"]):]
        assert actual["parts"] == expected["parts"]
