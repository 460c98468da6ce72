"""Makes the golden checkpoint with codec `xor`, once, in tests/: `python -m golden.make_xor`.

Two steps of one process. The last one has chunks with a base, which differ in a few low bits of each number.
"""

from __future__ import annotations

import shutil

import torch

import flowstone as fs
from golden.make import GOLDEN
from golden.make_planes import state as first

STEP = 2
STORE = GOLDEN / "xor-1"


def state(step: int) -> dict[str, torch.Tensor]:
    result = {name: first()[name] for name in ("floats", "numbers")}
    for tensor in result.values():
        bits = tensor.view(torch.int32)
        bits ^= (step - 1) * (torch.arange(len(bits), dtype=torch.int32) % 5)
    return result


def main() -> None:
    with fs.Checkpointer(STORE, engine=fs.EngineOptions(compress="max", kept_bytes=1 << 20)) as checkpointer:
        for step in range(1, STEP + 1):
            checkpointer.save(step, state(step)).committed.result()
    shutil.rmtree(STORE / "step-00000001")
    (STORE / "flowstone.lock").unlink()


if __name__ == "__main__":
    main()
