"""Makes the golden checkpoint of derived tensors; run once, in tests/: `python -m golden.make_derived`.

A float32 tensor, its roundings to both types of 16 bits, and a tensor that is equal to another one.
"""

from __future__ import annotations

import torch

import flowstone as fs
from golden.make import GOLDEN

STORE = GOLDEN / "derived-1"


def state() -> dict[str, object]:
    numbers = (torch.arange(33_000, dtype=torch.float32) - 16_000) * 1.37e-3
    return {"m": {
        "master": numbers, "work": numbers.bfloat16(), "half": numbers.half(), "copy": numbers.clone(),
        "other": numbers[:20].clone(),
    }}


def main() -> None:
    with fs.Checkpointer(STORE, engine=fs.EngineOptions(compress="derived")) as checkpointer:
        checkpointer.save(1, state())
    (STORE / "flowstone.lock").unlink()


if __name__ == "__main__":
    main()
