"""Functions for ranks on several nodes: the directory of its memory agent determines each rank's node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import flowstone as fs
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE

SECRET = "a secret of 32 characters, or so"
ROWS = 300_001


def _store(rank: int, base: str, replicas: int | list[int], node: int | None = None) -> fs.PeerMemory:
    """`replicas`: how many, or what parity."""
    os.environ[DIRECTORY_VARIABLE] = f"{base}/node-{rank if node is None else node}/agent"
    how: dict[str, Any] = {"replicas": replicas} if isinstance(replicas, int) else {"parity": tuple(replicas)}
    return fs.PeerMemory("run", secret=SECRET, interface="127.0.0.1", **how)


def _state(rank: int, size: int, step: int) -> dict[str, object]:
    """A rank's rows of one tensor, whose values follow from the step and their number; and a number of its own."""
    begin, end = ROWS * rank // size, ROWS * (rank + 1) // size
    rows = torch.arange(begin, end, dtype=torch.float64) + step * 1e6
    return {"w": fs.Shard(rows, (ROWS,), (begin,)), "step": step, "own": fs.PerRank(rank)}


def _check(state: dict[str, object], rank: int, size: int) -> int:
    """The step whose values a loaded state has: all of them."""
    step = state["step"]
    assert isinstance(step, int)
    expected = _state(rank, size, step)["w"]
    actual = state["w"]
    assert isinstance(actual, fs.Shard)
    assert isinstance(expected, fs.Shard)
    assert torch.equal(actual.tensor, expected.tensor), f"not what step {step} was"
    return step


def save(rank: int, base: str, replicas: int | list[int], *steps: int) -> list[str]:
    """What this node has then."""
    size = int(os.environ["WORLD_SIZE"])
    with fs.Checkpointer(_store(rank, base, replicas)) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(rank, size, step)).committed.result(60)
        store = checkpointer._store
        newest = f"step-{max(steps):08d}"
        return list(fs.NodeMemory("run").names(newest)) if store.exists(newest) else []


def save_at(rank: int, base: str, replicas: int | list[int], nodes: list[int], *steps: int) -> None:
    """`nodes`: of each rank."""
    size = int(os.environ["WORLD_SIZE"])
    with fs.Checkpointer(_store(rank, base, replicas, nodes[rank])) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(rank, size, step)).committed.result(60)


def load(
    rank: int, base: str, replicas: int | list[int], tiers: str = "", nodes: list[int] | None = None
) -> list[object]:
    """The step, the tier and the reason; -1: there is nothing to load. `nodes`: of each rank."""
    size = int(os.environ["WORLD_SIZE"])
    store = _store(rank, base, replicas, None if nodes is None else nodes[rank])
    with fs.Checkpointer([store, Path(tiers)] if tiers else store) as checkpointer:
        state = _state(rank, size, 0)
        try:
            report = checkpointer.load(state)
        except fs.NoCheckpointError:
            return [-1, "", ""]
        assert _check(state, rank, size) == report.step
        return [report.step, report.tier, report.why]


def save_to_both(rank: int, base: str, replicas: int | list[int], disk: str, *steps: int) -> None:
    size = int(os.environ["WORLD_SIZE"])
    with fs.Checkpointer([_store(rank, base, replicas), Path(disk)]) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(rank, size, step)).committed.result(60)
        if rank == 0:
            assert checkpointer.drain(60) == {}


def train(rank: int, base: str, replicas: int | list[int]) -> None:
    """Go on from what there is, and save every step, until killed."""
    size = int(os.environ["WORLD_SIZE"])
    checkpointer = fs.Checkpointer(_store(rank, base, replicas))
    state = _state(rank, size, 0)
    step = 0
    if checkpointer.latest() is not None:
        checkpointer.load(state)
        step = _check(state, rank, size)
    print("loaded", step, flush=True)
    while True:
        step += 1
        print("begun", step, flush=True)
        checkpointer.save(step, _state(rank, size, step)).committed.result(60)
        print("committed", step, flush=True)
