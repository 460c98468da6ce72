"""A training that saves every step, with a replica: `python replica_job.py STORE STEPS [BUILD [OPTIONS]]`.

Prints each step once its save has returned, and events of the replica. The replicas use the builders of this module.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import flowstone as fs
from journaled import Training, adamw, momentum


def build() -> dict[str, object]:
    return Training(seed=9).state()


def build_momentum() -> dict[str, object]:
    return Training(momentum, seed=9).state()


class AdamW(torch.optim.AdamW):
    """An optimizer of the same name with other arithmetic, whose weights differ slightly."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-6)


def build_otherwise() -> dict[str, object]:
    return Training(lambda own: AdamW(own, lr=1e-2, weight_decay=0.1), seed=9).state()


def build_nothing() -> dict[str, object]:
    raise RuntimeError("no memory for a second model")


def say(**value: object) -> None:
    """Print in one call, since events arrive on another thread and `print` writes the end of a line separately."""
    os.write(sys.stdout.fileno(), f"{json.dumps(value)}\n".encode())


def told(event: fs.Event) -> None:
    if isinstance(event, fs.ReplicaFollows | fs.ReplicaBehind | fs.ReplicaLost):
        say(event=type(event).__name__, text=str(event))


def main(store: str, last: int, builder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    hold = options.pop("hold", None)
    training = Training(momentum if builder == "build_momentum" else adamw)
    replica = fs.Replica(f"replica_job:{builder}", tolerance=options.pop("tolerance", False))
    with fs.Checkpointer(store, every_step=replica, on_event=told, **options) as checkpointer:
        first = 1
        if checkpointer.latest() is not None:
            first = checkpointer.load(training.state()).step + 1
        say(first=first)
        for step in range(first, last + 1):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
            say(step=step)
            if step == hold:
                sys.stdin.readline()
        sys.stdin.readline()


if __name__ == "__main__":
    import replica_job  # under the name by which the replica imports it

    name, steps, *more = sys.argv[1:]
    replica_job.main(name, int(steps), more[0] if more else "build", json.loads(more[1]) if more[1:] else {})
