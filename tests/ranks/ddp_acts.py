"""What ranks do in tests of DistributedDataParallel: each trains on batches of its own."""

from __future__ import annotations

import torch
from acts import opened
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flowstone.events import BuffersFromOneRank, Event


def training(*, wrapped: bool = True, broadcast: bool = True) -> dict[str, object]:
    torch.manual_seed(5)
    net: nn.Module = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 64))
    if wrapped:
        net = DistributedDataParallel(net, broadcast_buffers=broadcast)
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-2)}


def step(state: dict[str, object], seed: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    model(batch).square().mean().backward()  # type: ignore[operator]
    optimizer.step()  # type: ignore[attr-defined]
    optimizer.zero_grad()  # type: ignore[attr-defined]


def statistics(state: dict[str, object]) -> list[float]:
    """A few of the running means that this rank has."""
    found: list[float] = state["model"].module[1].running_mean[:4].tolist()  # type: ignore[attr-defined]
    return found


def save_statistics(rank: int, path: str, steps: int) -> dict[str, object]:
    """Train and save, each step; of each, what this rank's statistics were. And what was told of buffers."""
    state = training()
    told: list[Event] = []
    held = []
    with opened(path, on_event=told.append) as saver:
        for number in range(1, steps + 1):
            step(state, 10 * number + rank)
            held.append(statistics(state))
            saver.save(number, state).committed.result(60)
    buffers = [(event.step, event.tensors) for event in told if isinstance(event, BuffersFromOneRank)]
    return {"held": held, "buffers": buffers}
