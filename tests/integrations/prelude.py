"""Names that samples of docs/RECIPES.md and docs/LIGHTNING.md use without a definition; and the comparison of runs.

Every batch that the model gets is recorded, and after a number of them the process kills itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from digests import digest
from torch import nn

import flowstone as fs

RUN = Path(os.environ["RECIPE_RUN"])
KILL_AFTER_BATCHES = int(os.environ.get("RECIPE_KILL_AFTER_BATCHES", "0"))
RANK = int(os.environ.get("RANK", "0"))
STORE = Path("runs") / os.environ["RECIPE"]
WIDTH = 160  # of a layer of 100 KiB, which is captured late

_seen: list[str] = []


def witness(batch: torch.Tensor) -> None:
    """Note a batch; and end, as if by a lack of memory, once there is something to resume from."""
    _seen.append(hashlib.sha256(batch.detach().numpy().tobytes()).hexdigest()[:16])
    if len(_seen) == KILL_AFTER_BATCHES:
        while not list(STORE.glob("*/manifest.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=noise), "y": torch.randn(1, generator=noise)}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 1),
    )


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    witness(batch["x"])
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    rows = [data[(4 * (2 * step + RANK) + row) % len(data)] for row in range(4)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    loss = (model(torch.ones(2, WIDTH))).mean().item()
    model.train()
    return loss


def tell(**parts: Any) -> None:
    """The end of a run: a digest of each part, and every batch that the model has seen."""
    digests = {
        name: digest(part.state_dict() if hasattr(part, "state_dict") else part)
        for name, part in parts.items()
    }
    digests["generator"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    RUN.mkdir(exist_ok=True)
    (RUN / f"{RANK}.json").write_text(json.dumps({"parts": digests, "batches": _seen}))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


torch.set_num_threads(1)
torch.manual_seed(7)
data = Data()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
if os.environ["RECIPE_RUN"].endswith("resumed"):  # nothing of this may be left after a load
    for parameter in model.parameters():
        parameter.data.fill_(9)
    torch.manual_seed(99)

__all__ = ["batch_of", "data", "evaluate", "fs", "loss_of", "model", "network", "optimizer", "scheduler", "tell"]
