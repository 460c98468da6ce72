"""A job that trains an adapter beside a frozen base, and the bytes that its saves have written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import flowstone as fs
from flowstone.config import MIB
from flowstone.events.phases import Committed, Event
from flowstone.store.local import LocalStore
from flowstone.store.memory import MemoryStore

BASE_BYTES = 12 * MIB
SMALL_BYTES = MIB  # adapter, optimizer, index, objects


class Job:
    """A frozen base of 12 MiB with a trained adapter, and the bytes that its saves have written."""

    def __init__(self, store: Path | LocalStore | MemoryStore, **options: object) -> None:
        torch.manual_seed(1)
        base = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(3)]).requires_grad_(False)
        self.model = nn.ModuleDict({"base": base, "adapter": nn.Linear(128, 64)})
        self.optimizer = torch.optim.AdamW(self.model["adapter"].parameters())
        self.told: list[Event] = []
        self.checkpointer = fs.Checkpointer(store, on_event=self.told.append, **options)  # type: ignore[arg-type]

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        for parameter in self.model["adapter"].parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def save(self, step: int) -> fs.Checkpoint:
        self.train()
        return self.checkpointer.save(step, self.state).committed.result()

    @property
    def written(self) -> list[int]:
        return [event.bytes for event in self.told if isinstance(event, Committed)]


def fresh_load(path: Path, step: int) -> dict[str, object]:
    other = Job(path)
    with other.checkpointer as checkpointer:
        checkpointer.load(other.state, step=step)
    return other.state


def disk_bytes(path: Path) -> int:
    """The allocated blocks of all files; a file with several names counts once."""
    files = {file.stat().st_ino: file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()}
    return sum(files.values())
