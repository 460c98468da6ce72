"""Functions for ranks whose nodes have separate networks: see bench/networks.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import flowstone as fs
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE

SECRET = "a secret of 32 characters, or so"


def _store(rank: int, base: str, how: dict[str, Any]) -> fs.PeerMemory:
    os.environ[DIRECTORY_VARIABLE] = f"{base}/node-{rank}/agent"
    parity = how.get("parity")
    return fs.PeerMemory("run", secret=SECRET, replicas=how.get("replicas"), parity=parity and tuple(parity))


def _part(rank: int, elements: int, step: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (elements,), generator=torch.Generator().manual_seed(100 * step + rank))


def _state(rank: int, part: torch.Tensor) -> dict[str, object]:
    size = int(os.environ["WORLD_SIZE"])
    return {"w": fs.Shard(part, (size * len(part),), (rank * len(part),)), "own": fs.PerRank(rank)}


def save(rank: int, base: str, how: dict[str, Any], elements: int, disk: str, *steps: int) -> None:
    """Then train on, until killed."""
    stores = [_store(rank, base, how), *([Path(disk)] if disk else [])]
    with fs.Checkpointer(stores if disk else stores[0]) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(rank, _part(rank, elements, step))).committed.result(300)
        if rank == 0 and disk:
            assert checkpointer.drain(60) == {}
        Path(base, f"saved-{steps[-1]}-{rank}").touch()
        while True:
            signal.pause()


def load(rank: int, base: str, how: dict[str, Any], elements: int, disk: str) -> dict[str, object]:
    """What the report says, how long the load took, and how many bytes have come over this node's link meanwhile."""
    stores = [_store(rank, base, how), *([Path(disk)] if disk else [])]
    with fs.Checkpointer(stores if disk else stores[0]) as checkpointer:
        part = torch.zeros(elements, dtype=torch.int64)
        state = _state(rank, part)
        before, begin = _received(), time.perf_counter()
        report = checkpointer.load(state)
        seconds = time.perf_counter() - begin
        received = _received() - before
        assert torch.equal(part, _part(rank, elements, report.step)), "bit for bit"
    return {
        "step": report.step, "tier": report.tier, "why": report.why, "seconds": seconds, "received": received,
    }


def _received() -> int:
    """Bytes that have come over all interfaces of this network but the loopback."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split()[1]) for line in lines if not line.strip().startswith("lo:"))
