"""Makes the golden delta; run once, in tests/: `python -m golden.make_delta`.

Three steps of one process. The last one refers to files of the first two. It has an unchanged tensor, a tensor with a
changed chunk, and a changed tensor. Every value follows from a formula.
"""

from __future__ import annotations

import shutil

import torch

import flowstone as fs
from golden.make import GOLDEN, pattern

STEP = 3
STORE = GOLDEN / "delta-1"
LONG = (1 << 20) + 70_000  # bytes: two chunks


def state(step: int) -> dict[str, object]:
    """`rests` is always the same, `partly` differs in its second chunk, `moves` as a whole."""
    partly = torch.zeros(LONG, dtype=torch.uint8)
    partly[-1] = step
    tensors = {"rests": pattern(torch.empty(70_000, dtype=torch.uint8), 1), "partly": partly}
    return {"m": tensors | {"moves": pattern(torch.empty(40, 3), step)}, "step": step}


def main() -> None:
    with fs.Checkpointer(STORE) as checkpointer:
        for step in range(1, STEP + 1):
            checkpointer.save(step, state(step)).committed.result()
    for step in range(1, STEP):
        shutil.rmtree(STORE / f"step-{step:08d}")
    (STORE / "flowstone.lock").unlink()


if __name__ == "__main__":
    main()
