"""Functions for tests of compressed gradients: each rank trains on batches of its own, and saves every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from journal_acts import each_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from flowstone.adapters.ddp import Int8Gradients, TopKGradients, exchange
from flowstone.format.digest import digest
from forge import tensor_bytes

WIDTH = 256


class Training:
    """Three layers, in several buckets. `how`: top-k or int8, with "+" for error feedback."""

    def __init__(self, how: str, rank: int) -> None:
        torch.manual_seed(3)
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        make: Any = TopKGradients if how.startswith("top-k") else Int8Gradients
        self.gradients = make(self.model, error_feedback=how.endswith("+"))
        self.model.register_comm_hook(self.gradients, exchange)
        self.inputs = torch.Generator().manual_seed(50 + rank)

    def state(self) -> dict[str, object]:
        return {
            "model": self.model, "optimizer": self.optimizer, "inputs": fs.PerRank(self.inputs),
            "gradients": fs.PerRank(self.gradients),
        }

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH, generator=self.inputs)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()

    def bits(self) -> str:
        """A digest of all that a replay must bring back exactly."""
        parts = [self.inputs.get_state()]
        for parameter in self.model.parameters():
            parts += [parameter.detach(), *self.optimizer.state[parameter].values()]
        return digest(tensor_bytes(*parts))

    def residual(self) -> torch.Tensor:
        return torch.cat(list(self.gradients.state_dict()["residual"].values()))


def undisturbed(rank: int, how: str, steps: int) -> list[str]:
    return each_step(Training(how, rank), steps)


def train(rank: int, path: str, how: str, steps: int) -> dict[str, object]:
    """Go on from what there is, and note how far it came."""
    training, events = Training(how, rank), list[fs.Event]()
    with fs.Checkpointer(path, every_step=True, deadline_s=20.0, on_event=events.append) as checkpointer:
        done = 0 if checkpointer.latest() is None else checkpointer.load(training.state()).step
        for step in range(done + 1, steps + 1):
            training.train_step()
            save = checkpointer.save(step, training.state())
            if step == 1:
                save.committed.result()  # what all others begin with
            Path(f"{path}.begun.{rank}").write_text(str(step))
    journaled = [event for event in events if isinstance(event, fs.Journaled)]
    return {
        "done": done, "bits": training.bits(), "whole": [e.step for e in events if isinstance(e, fs.Committed)],
        "journaled": [event.step for event in journaled], "bytes": max((event.bytes for event in journaled), default=0),
        "uncompressed": [event.uncompressed for event in journaled if event.uncompressed],
        "residual": float(training.residual().norm()) if training.gradients.state_dict()["residual"] else 0.0,
    }


def load(rank: int, path: str, how: str) -> dict[str, object]:
    """What a fresh training loads."""
    training = Training(how, rank)
    with fs.Checkpointer(path, deadline_s=20.0) as checkpointer:
        report = checkpointer.load(training.state())
    assert report.replay is not None
    return {
        "step": report.step, "bits": training.bits(), "exactness": report.replay.exactness,
        "approximate": report.replay.approximate, "residual": float(training.residual().norm()),
        "zeros": int((training.residual() == 0).sum()),
    }
