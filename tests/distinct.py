"""Which numbers a tensor holds, in little time where that is one."""

from __future__ import annotations

import torch


def distinct(tensor: torch.Tensor) -> set[float]:
    """Without a sort of all of them, which takes a hundred times as long as to find the least and the greatest."""
    if tensor.numel() and not tensor.is_complex():
        least, greatest = tensor.aminmax()
        if bool(least == greatest):  # never of a NaN
            return {least.item()}
    return set(tensor.unique().tolist())
