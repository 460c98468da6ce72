"""A training loop and a checkpointer whose capture is delayed until a thread waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import flowstone as fs
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace

MIB = 1 << 20
WIDTH = 512
CRAWL = Pace(blocks=1, bytes_per_s=1)  # the first request goes out, the others wait until something expedites it


def network(width: int = WIDTH) -> nn.Sequential:
    """Parameters of 1 MiB each, and small ones."""
    first, two, three = (nn.Linear(width, width) for _ in range(3))
    return nn.Sequential(first, nn.ReLU(), two, nn.ReLU(), three)


def backward(model: nn.Module, width: int = WIDTH) -> None:
    model(torch.randn(4, width)).square().mean().backward()


def training(seed: int = 0) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """A model and its optimizer, stepped once."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model)
    optimizer.step()
    return model, optimizer


@contextmanager
def waiting(path: Path, **options: Any) -> Iterator[fs.Checkpointer]:
    """Most of what is lazy is captured when a thread waits for it, and no sooner."""
    engine = fs.EngineOptions(request_bytes=2 * MIB)
    options = {"engine": engine, "budget_bytes": 16 * MIB, "on_error": "continue", **options}
    with mock.patch.object(Captures, "pace", return_value=CRAWL), fs.Checkpointer(path, **options) as checkpointer:
        yield checkpointer


def failure(save: fs.Save) -> BaseException | None:
    return save.committed.exception(60)
