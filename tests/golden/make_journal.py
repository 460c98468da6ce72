"""Makes the golden journal; run once, in tests/: `python -m golden.make_journal`.

A full checkpoint, and a journal of three steps after it, of one process. Weights and gradients are small multiples of
powers of two, so that a replay is exact on every processor.
"""

from __future__ import annotations

from pathlib import Path

import torch

import flowstone as fs
from flowstone.config import BLOCK_BYTES
from golden.make import GOLDEN

STEPS = 4
STORE = GOLDEN / "journal-1"


class Training:
    """Two parameters, an optimizer and a number; every value follows from the step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.seen = 0
        with torch.no_grad():
            self.model.weight.copy_(torch.arange(12.0).reshape(3, 4) / 4)
            self.model.bias.copy_(torch.tensor([1.0, -2.0, 0.5]))

    def state(self, step: int = 0) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "seen": self.seen, "step": step}

    def train_step(self, step: int) -> None:
        self.model.weight.grad = torch.full((3, 4), step / 8)
        self.model.bias.grad = torch.tensor([step / 2, -step / 4, 0.0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += 10 * step


def main(store: Path = STORE, training: Training | None = None, *, steps: int = STEPS, lag_steps: int = 1) -> None:
    training = training or Training()
    with fs.Checkpointer(store, every_step=True, lag_steps=lag_steps) as checkpointer:
        for step in range(1, steps + 1):
            training.train_step(step)
            checkpointer.save(step, training.state(step)).committed.result()
    (store / "flowstone.lock").unlink()
    for path in store.glob("journal-*/*.journal"):
        data = path.read_bytes().rstrip(b"\0")  # the space that was reserved ahead
        path.write_bytes(data + bytes(-len(data) % BLOCK_BYTES))


if __name__ == "__main__":
    main()
