"""The distinct values of a tensor, computed fast if all are equal."""

from __future__ import annotations

import torch


def distinct(tensor: torch.Tensor) -> set[float]:
    """Does not sort all values if there is only one: a sort takes a hundred times as long as minimum and maximum."""
    if tensor.numel() and not tensor.is_complex():
        least, greatest = tensor.aminmax()
        if bool(least == greatest):  # false for a NaN
            return {least.item()}
    return set(tensor.unique().tolist())
