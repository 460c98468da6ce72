"""Makes the golden checkpoint with codec `planes`, once, in tests/: `python -m golden.make_planes planes-1`."""

from __future__ import annotations

import sys

import numpy as np
import torch

import flowstone as fs
from golden.make import GOLDEN, STEP

ELEMENTS = 16_500


def state() -> dict[str, torch.Tensor]:
    """Floats whose exponents are distributed like those of weights, and ascending integers; by integer arithmetic."""
    drawn = np.arange(1, ELEMENTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn ^= drawn >> np.uint64(31)
    mantissa, sign = (drawn >> np.uint64(40)) & np.uint64(0x7FFFFF), (drawn >> np.uint64(39)) & np.uint64(1)
    lowest = drawn & (~drawn + np.uint64(1)) & np.uint64(0x3FFFFF) | np.uint64(1 << 22)
    zeros = np.frexp((lowest & (~lowest + np.uint64(1))).astype(np.float64))[1].astype(np.uint64) - np.uint64(1)
    bits = sign << np.uint64(31) | (np.uint64(122) - zeros) << np.uint64(23) | mantissa
    floats = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    return {"floats": floats, "numbers": torch.arange(9000), "zeros": torch.zeros(20_000)}


if __name__ == "__main__":
    with fs.Checkpointer(GOLDEN / sys.argv[1], engine=fs.EngineOptions(compress="max")) as checkpointer:
        checkpointer.save(STEP, state())
