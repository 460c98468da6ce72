"""The kinds of distributed jobs, as Accelerate calls them, whose saving can be replaced."""

from __future__ import annotations

from typing import Any

from flowstone.errors import ArgumentError

_REPLACED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "FSDP"})


def check_distributed(accelerator: Any) -> None:
    """Raise ArgumentError for engines that hold the state in forms of their own."""
    kind = str(accelerator.distributed_type.value)
    if kind not in _REPLACED:
        raise ArgumentError(
            f"use_flowstone does not replace how a job on {kind} saves", expected=", ".join(sorted(_REPLACED)),
            next="leave its saving as it is",
        )
