"""Starts the ranks of a job, each a process, and waits for all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_ranks(
    command: Sequence[str], log: Path, ranks: int = 1, environment: Mapping[str, str] | None = None
) -> list[int]:
    """Exit codes of the ranks that ended by themselves; once one has failed, the others are killed.

    log  what rank r says goes to this path with "-r.txt" behind it
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        } if ranks > 1 else {}
        with Path(f"{log}-{rank}.txt").open("w") as said:
            processes.append(subprocess.Popen(
                [sys.executable, *command], stdout=said, stderr=said,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **own, **(environment or {})},
            ))
    deadline = time.monotonic() + 600
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
