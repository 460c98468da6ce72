"""The training as a separate process: `python -m flowstone_demo.child ORDER`. Prints its messages to standard output.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import torch

import flowstone as fs
from flowstone.events.phases import Captured, Committed, Event, Loaded
from flowstone_demo.fingerprint import fingerprint
from flowstone_demo.messages import (
    Began,
    Finished,
    Message,
    Order,
    SaveCaptured,
    SaveCommitted,
    Saved,
    StepDurable,
    Stepped,
    TorchSaved,
    encode,
)
from flowstone_demo.train import Training, train, train_every_step

STDOUT = 1


def main(argument: str) -> None:
    order = msgspec.json.decode(argument, type=Order)
    run = Training(order.form, order.seed)
    load_s: list[float] = []
    stepped_at: list[float] = []

    def on_start(step: int | None) -> None:
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        tell(Began(step, parameters, sum(load_s)))

    def on_step(step: int, loss: float) -> None:
        if order.flip_bit and step == order.form.steps:
            flip_bit(next(run.model.parameters()).detach())
        stepped_at.append(time.perf_counter())
        tell(Stepped(step, loss, 0.0 if len(stepped_at) == 1 else stepped_at[-1] - stepped_at[-2]))

    def on_saved(step: int, seconds: float) -> None:
        tell(Saved(step, seconds))

    def on_event(event: Event) -> None:
        match event:
            case Loaded(seconds=seconds):
                load_s.append(seconds)
            case Captured(step, blocked_s):
                tell(SaveCaptured(step, blocked_s))
            case Committed(step, bytes, seconds):
                tell(SaveCommitted(step, bytes, seconds))
            case fs.Journaled(step, bytes, seconds):
                tell(StepDurable(step, bytes, seconds))

    store = Path(order.store)
    if order.every_step:
        train_every_step(
            run, store, recovery_s=order.form.recovery_s, on_start=on_start, on_step=on_step, on_saved=on_saved,
            on_event=on_event,
        )
    else:
        train(run, store, save_every=order.save_every, on_start=on_start, on_step=on_step, on_event=on_event)
    for _ in range(order.torch_saves):
        tell(torch_save(run, Path(order.scratch)))
    tell(Finished(order.form.steps, *fingerprint(run)))


def tell(message: Message) -> None:
    """Send a message to the supervisor. Can be called on any thread, since writes of up to 4096 bytes into a pipe are
    atomic.
    """
    os.write(STDOUT, encode(message))


def torch_save(run: Training, directory: Path) -> TorchSaved:
    """Measure how long torch.save takes to make the same state durable, with fsync of file and directory."""
    path = directory / "torch_save.pt"
    started = time.monotonic()
    state = {
        "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(), "loader": run.loader.state_dict(),
        "rng": torch.get_rng_state(), "losses": run.losses, "step": run.form.steps,
    }
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    listing = os.open(directory, os.O_RDONLY)
    os.fsync(listing)
    os.close(listing)
    seconds, length = time.monotonic() - started, path.stat().st_size
    path.unlink()
    return TorchSaved(length, seconds)


def flip_bit(weight: torch.Tensor) -> None:
    """Flip the lowest bit of the first number. The demo must notice that."""
    weight.view(torch.int32).view(-1)[0] ^= 1


if __name__ == "__main__":
    main(sys.argv[1])
