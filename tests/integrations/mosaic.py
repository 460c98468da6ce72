"""MosaicML's streaming on a machine without CUDA: the package, and a data set of numbers on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def streaming() -> Any:
    """The package. It imports torchvision, whose wheels need torch's CUDA libraries for their own operators: two of
    these have to be known by name, and none is called here.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming

    return streaming


def write_numbers(directory: Path, count: int) -> None:
    """A data set of numbers from 0 on, in several shards."""
    with streaming().MDSWriter(out=str(directory), columns={"number": "int"}, size_limit=400) as writer:
        for number in range(count):
            writer.write({"number": number})
