"""A state of several requests, the outcome of its save, and the files that a save leaves."""

from __future__ import annotations

from pathlib import Path

import torch

import flowstone as fs
from flowstone.config import MIB, EngineOptions
from forge import content

ENGINE = EngineOptions(request_bytes=2 * MIB)


def state(value: float, mib: int = 9) -> dict[str, object]:
    """`mib` MiB in one tensor, no two of its elements alike, a strided one, small ones, objects."""
    ramp = torch.arange(mib * MIB // 8, dtype=torch.float64) + value
    small = [torch.full((n,), value, dtype=torch.float32) for n in range(5)]
    return {
        "ramp": ramp, "strided": torch.arange(30_000.0).reshape(300, 100).t() * value, "small": small,
        "objects": {"value": float(value), "text": "x" * 100},
    }


def blank(mib: int = 9) -> dict[str, object]:
    return {**state(0.0, mib), "ramp": torch.zeros(mib * MIB // 8, dtype=torch.float64)}


def loaded(checkpointer: fs.Checkpointer, value: float, mib: int = 9) -> bool:
    """Whether a load into a blank state gives `state(value)` back, bit for bit."""
    into = blank(mib)
    checkpointer.load(into)
    return content(into) == content(state(value, mib))


def entries(store: Path) -> list[str]:
    """What a store holds beside its marker and its lock."""
    return sorted(path.name for path in store.iterdir() if not path.name.startswith("flowstone."))
