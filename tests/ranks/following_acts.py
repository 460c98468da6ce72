"""Functions that ranks run in tests of the replicas of their state; the builders are those of the replicas."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch.distributed as dist
from journal_acts import Training

import flowstone as fs
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE


def build_ddp() -> dict[str, object]:
    return Training("ddp", dist.get_rank()).state()


def build_fsdp() -> dict[str, object]:
    return Training("fsdp", dist.get_rank()).state()


def build_on_rank_0() -> dict[str, object]:
    if dist.get_rank():
        raise RuntimeError("no memory for a second model")
    return build_ddp()


def build_otherwise_on_rank_1() -> dict[str, object]:
    """Its rank 1 has another arithmetic, after which its weights are a little otherwise."""
    from replica_job import AdamW

    training = Training("fsdp", dist.get_rank())
    if dist.get_rank():
        training.optimizer = AdamW(training.model.parameters(), lr=1e-2)
    return training.state()


def train(
    rank: int, path: str, agents: str, build: str, steps: int, how: str = "", hold: int = 0, on_ranks: int = 2,
    tolerance: bool = False, recovery_s: float = 60.0,
) -> str:
    """Save each step, and write down how far it is, and what it is told of its replica. Returns what it is in the end.

    hold      after this step, wait until there is PATH.go
    on_ranks  so many have a replica
    """
    os.environ[DIRECTORY_VARIABLE] = agents

    def note(event: fs.Event) -> None:
        if isinstance(event, fs.ReplicaFollows | fs.ReplicaBehind | fs.ReplicaLost):
            with Path(f"{path}.events.{rank}").open("a") as reported:
                reported.write(json.dumps([type(event).__name__, str(event)]) + "\n")

    training = Training(how or build.removeprefix("build_"), rank)
    replica = fs.Replica(f"following_acts:{build}", tolerance=tolerance) if rank < on_ranks else True
    with fs.Checkpointer(
        path, every_step=replica, deadline_s=10.0, recovery_s=recovery_s, keep=2, on_event=note
    ) as checkpointer:
        first = 1
        if checkpointer.latest() is not None:
            first = checkpointer.load(training.state()).step + 1
        for step in range(first, steps + 1):
            training.train_step()
            save = checkpointer.save(step, training.state(step))
            if step == 1:
                save.committed.result()
            if step == steps:
                checkpointer.wait()
            Path(f"{path}.done.{rank}").write_text(str(step))
            while step == hold and not Path(f"{path}.go").exists():
                time.sleep(0.01)
    return training.bits()


def resume(rank: int, path: str, agents: str, how: str) -> dict[str, object]:
    """What the next job loads, once replicas of the one before have ended; and whether without a replay."""
    os.environ[DIRECTORY_VARIABLE] = agents
    training = Training(how, rank)
    with fs.Checkpointer(path, every_step=True, deadline_s=10.0) as checkpointer:
        report = checkpointer.load(training.state())
    return {"step": report.step, "replayed": 0 if report.replay is None else report.replay.steps,
            "exactness": "" if report.replay is None else report.replay.exactness, "bits": training.bits()}
