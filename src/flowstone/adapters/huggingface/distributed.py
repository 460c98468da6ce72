"""The kinds of distributed jobs (with Accelerate's names) for which Flowstone can replace saving."""

from __future__ import annotations

from typing import Any

from flowstone.errors import ArgumentError

_REPLACED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "FSDP"})


def check_distributed(accelerator: Any) -> None:
    """Raise ArgumentError for distributed engines that have the state in a form of their own."""
    kind = str(accelerator.distributed_type.value)
    if kind not in _REPLACED:
        raise ArgumentError(
            f"use_flowstone does not support the distributed type {kind}", expected=", ".join(sorted(_REPLACED)),
            next="do not call use_flowstone for this job",
        )
