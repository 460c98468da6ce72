"""The small state that tests of damage save, corrupt and load; see the fixtures `pristine` and `checkpoint`."""

from __future__ import annotations

import torch

STEP = 7


def state(value: float = 1.0) -> dict[str, object]:
    """A tensor of two and a half chunks, one saved in two boxes, a tie, many small tensors, and objects."""
    small = torch.full((5,), value)
    return {
        "big": torch.full((655_360,), value), "table": torch.full((6, 4), value, dtype=torch.bfloat16),
        "small": small, "tied": small, "many": [torch.full((3,), i + value) for i in range(3)],
        "objects": {"step": 3, "text": "x" * 10},
    }
