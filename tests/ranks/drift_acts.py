"""Functions that ranks run in tests of replicas that drift apart."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from acts import opened, outcome, tensors
from replica_acts import step, training
from torch import nn

import flowstone as fs


def drifts(rank: int, path: str) -> list[str]:
    """Ranks train alike; then those from 1 on take a step of their own, and have been brought back for the last save.

    What is told of each save; they overlap, but for the one that fails.
    """
    state = training()
    reported = []
    with opened(path, on_error="continue") as saver:
        for number in range(1, 6):
            if number == 3:
                kept = [tensor.clone() for tensor in tensors(state)]
                if rank:
                    step(state)
            elif number == 4:
                for tensor, before in zip(tensors(state), kept, strict=True):
                    tensor.copy_(before)
            reported.append(str(outcome(saver, number, state)) if number == 3 else str(saver.save(number, state).step))
            if number != 3:
                step(state)
    return reported


def one_drifts_by_one_tensor(rank: int, path: str) -> list[str]:
    """Each save another one tensor is not what it is elsewhere."""
    torch.manual_seed(1)
    state = {"model": {f"w{n}": torch.randn(100, 200) for n in range(4)}}
    reported = []
    with opened(path, on_error="continue") as saver:
        saver.save(0, state).committed.result(60)
        for number, (name, tensor) in enumerate(state["model"].items(), 1):
            if rank == 1:
                tensor.mul_(2)
            error = outcome(saver, number, state)
            assert isinstance(error, fs.FlowstoneError)
            reported.append(f"{name}: {error}")
            if rank == 1:
                tensor.div_(2)
        saver.save(9, state).committed.result(60)
    return reported


def inner_and_outer(rank: int, path: str, save: bool) -> list[float]:
    """As DiLoCo: each rank's model and optimizer are its own, what they are averaged into is the same everywhere."""
    torch.manual_seed(2)
    outer = nn.Linear(200, 120)
    torch.manual_seed(100 + rank if save else 0)
    inner = nn.Sequential(nn.Linear(200, 120), nn.BatchNorm1d(120))
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1)
    state = {"outer": outer, "inner": fs.PerRank({"model": inner, "optimizer": optimizer})}
    with opened(path) as saver:
        if save:
            for number in (1, 2):
                inner(torch.randn(8, 200)).square().sum().backward()
                optimizer.step()
                saver.save(number, state).committed.result(60)
        else:
            saver.load(state)
    result = [*inner.parameters(), *inner.buffers(), *(m for of in optimizer.state.values() for m in of.values())]
    return [float(np.float64(tensor.detach().double().sum())) for tensor in result]


def one_has_more_under_way(rank: int, path: str) -> list[str]:
    """Rank 0 has begun two saves by the plan that it knows, when rank 1 comes to the first with a module more."""
    torch.manual_seed(3)
    state: dict[str, object] = {"stages": {"0": nn.Linear(300, 300)}}
    with opened(path, on_error="continue") as saver:
        saver.save(1, state).committed.result(60)
        if rank == 1:
            state = {"stages": {**state["stages"], "1": nn.Linear(30, 30)}}  # type: ignore[dict-item]
        flag = Path(f"{path}.both")
        while rank == 1 and not flag.exists():
            time.sleep(0.001)
        saves = [saver.save(number, state) for number in (2, 3)]
        flag.touch()
        reported = [str(save.committed.exception(60)) for save in saves]
        reported.append(str(saver.save(4, state).committed.exception(60)))
    return reported
