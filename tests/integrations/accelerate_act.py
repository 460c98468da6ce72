"""A training loop over Accelerate, as a process of its own: `python accelerate_act.py '{"out": "runs/x", ...}'`.

out        the directory of its checkpoints
flowstone  whether use_flowstone takes over; without it nothing is saved
kill_at    the step at which the process ends by SIGKILL, once there is something to resume from
full_at    the step from which on no file can become longer than 1 MiB
steps      how many there are

What it ends with goes to out.json, with every loss.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from digests import digest
from torch import nn

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone

RANK = int(os.environ.get("RANK", "0"))
WIDTH = 160


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=noise), "y": torch.randn(1, generator=noise)}


class Seen:
    """Has a state of its own, for `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def prepared(accelerator: Accelerator) -> tuple[Any, ...]:
    """Model, optimizer, scheduler, loader, the generator of its order, and what is registered."""
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    order = torch.Generator()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, generator=order)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    return (*accelerator.prepare(model, optimizer, scheduler, loader), order, seen)


def batches(accelerator: Accelerator, loader: Any, order: torch.Generator, step: int) -> Any:
    """Those of the epoch of `step`, from that step on. The epoch alone decides on their order."""
    epoch, done = divmod(step, len(loader))
    order.manual_seed(epoch)
    return accelerator.skip_first_batches(loader, done) if done else loader


def end_at(record: dict[str, Any], step: int) -> None:
    if step == record.get("full_at"):
        while step and not list(Path(record["out"]).glob("step-*/manifest.json")):
            time.sleep(0.01)  # what was saved before has room
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    if step == record.get("kill_at"):
        while not list(Path(record["out"]).glob("step-*/manifest.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    record = json.loads(sys.argv[1])
    out, resume, steps = record["out"], get_last_checkpoint(record["out"]), record.get("steps", 30)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    if record.get("flowstone", True):
        accelerator = use_flowstone(accelerator)
    model, optimizer, scheduler, loader, order, seen = prepared(accelerator)
    step = 0
    if resume is not None:
        for parameter in model.parameters():  # nothing of this may be left after a load
            parameter.data.fill_(9)
        torch.manual_seed(99)
        accelerator.load_state(resume)
        step = int(resume.rpartition("-")[2])
    while step < steps:
        for batch in batches(accelerator, loader, order, step):
            end_at(record, step)
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            seen.losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            if step % 5 == 0 and record.get("flowstone", True):
                accelerator.save_state(f"{out}/step_{step}")
            if step == steps:
                break
    accelerator.end_training()
    Path(f"{out}-{RANK}.json").write_text(json.dumps({
        "model": digest(accelerator.unwrap_model(model).state_dict()), "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest(scheduler.state_dict()), "generator": digest(torch.get_rng_state()), "losses": seen.losses,
    }))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
