"""Functions for ranks of one node with checkpoints in its memory, run on every rank of a job of real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from acts import as_it_lies, fill, local, opened, outcome, pattern, put, state_of, tensors

from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE
from memory_agent import agent_process, kill

RUN = "memory://job"
BUDGET_BYTES = 256 << 20  # with that of flushes


def _wholes(state: dict[str, object], step: int) -> list[torch.Tensor]:
    return [whole + step for whole in pattern(state)]


def save_until_killed(rank: int, agent: str, stores: str | list[str], noted: str, last: int) -> None:
    """Save step after step, and note on rank 0 what is committed; with `last`, all are killed after that one."""
    os.environ[DIRECTORY_VARIABLE] = agent
    state = state_of("rows")
    checkpointer = opened(stores, budget_bytes=BUDGET_BYTES)
    step = 0
    if checkpointer.latest() is not None:
        step = checkpointer.load(state).step
        _check(state, step)
    while True:
        step += 1
        put(state, _wholes(state, step))
        state["step"] = step
        checkpointer.save(step, state).committed.result(60)
        if rank == 0:
            Path(f"{noted}.new").write_text(str(step))
            Path(f"{noted}.new").replace(noted)  # a kill leaves it whole
        if step == last:
            checkpointer.drain(60)
            os.kill(os.getpid(), signal.SIGKILL)


def load(rank: int, agent: str, stores: str | list[str]) -> tuple[int, str]:
    """Load onto however many ranks these are; the step, and the tier, and every element is where it belongs."""
    os.environ[DIRECTORY_VARIABLE] = agent
    state = state_of("rows")
    fill(state, -1)
    with opened(stores, budget_bytes=BUDGET_BYTES) as checkpointer:
        report = checkpointer.load(state)
    _check(state, report.step)
    return report.step, report.tier


def _check(state: dict[str, object], step: int) -> None:
    assert state["step"] == step
    for tensor, whole in zip(tensors(state), _wholes(state, step), strict=True):
        assert torch.equal(local(tensor), local(as_it_lies(tensor, whole))), f"not step {step}"


def outlive_the_agent(rank: int, agent: str) -> list[str]:
    """The agent is killed between two saves. What the saves after that come to; the last one is committed."""
    os.environ[DIRECTORY_VARIABLE] = agent
    state = state_of("rows")
    reported = []
    with opened(RUN, on_error="continue") as checkpointer:
        for step in range(1, 5):
            put(state, _wholes(state, step))
            state["step"] = step
            error = outcome(checkpointer, step, state)
            reported.append("" if error is None else str(error))
            dist.barrier()
            if step == 1 and rank == 0:
                kill(agent_process(Path(agent)), signal.SIGKILL)
            dist.barrier()
    return reported
