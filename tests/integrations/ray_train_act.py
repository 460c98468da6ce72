"""Training functions of Ray Train, run by its workers; one may be killed during the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
from digests import digest
from ray.train.torch import prepare_model
from torch import nn

import flowstone as fs
from flowstone.adapters.ray import load, report, run_store

STEPS, EVERY = 12, 3


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 200, generator=torch.Generator().manual_seed(100 * step + rank))


def train(config: dict[str, Any]) -> None:
    """Train a model with dropout, and report every third step.

    config  folder, store, keep, steps, background, die_at, die_unreported_at
    """
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    torch.manual_seed(7 + rank)
    torch.set_num_threads(1)
    model = prepare_model(nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": fs.rng(), "step": 0}
    with fs.Checkpointer(config.get("store") or run_store(), keep=config.get("keep")) as checkpointer:
        resumed = load(checkpointer, state)
        (folder / f"resumed-{rank}-{os.getpid()}").write_text(str(resumed and resumed.step))
        for step in range(state["step"] + 1, config.get("steps", STEPS) + 1):
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
            if step == config.get("die_at"):
                ray.train.get_all_reported_checkpoints()  # what was reported has arrived
                die(rank, folder)
            optimizer.step()
            state["step"] = step
            if step % EVERY == 0:
                save = checkpointer.save(step, state)
                if step == config.get("die_unreported_at"):
                    ray.train.get_all_reported_checkpoints()
                    save.committed.result()
                    die(rank, folder)
                report({"steps": step}, save, background=config.get("background", False))
    tell(folder / f"end-{rank}.json", model=model, optimizer=optimizer)


def die(rank: int, folder: Path) -> None:
    """Once, on rank 1."""
    if rank == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def tell(path: Path, **parts: Any) -> None:
    """A digest of each part."""
    digests = {name: digest(part.state_dict()) for name, part in parts.items()}
    digests["generator"] = digest({"generator": torch.get_rng_state()})
    path.write_text(json.dumps(digests))
