"""torch's random number generators: on the CPU, and on every GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

GENERATOR_TYPES = (torch.Generator,)


def generator_state(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator, as a new tensor."""
    return generator.get_state()


def set_generator_state(generator: torch.Generator, state: object) -> None:
    """Set a generator to a state from `generator_state`."""
    generator.set_state(cast("torch.Tensor", state))


def process_generators() -> dict[str, object]:
    """The states of the generators that belong to the process."""
    return {"torch": torch.get_rng_state(), "cuda": cuda_states()}


def set_process_generators(state: Mapping[str, object]) -> None:
    """Set these generators to states from `process_generators`, for as many GPUs as this process has."""
    torch.set_rng_state(cast("torch.Tensor", state["torch"]))
    saved = cast("list[torch.Tensor]", state["cuda"])
    for device, device_state in enumerate(saved[: cuda_count()]):
        torch.cuda.set_rng_state(device_state, device)


def generators_missing(node: object) -> int:
    """The number of GPUs whose generators are stored, and cannot be restored here."""
    saved = node.get("cuda") if isinstance(node, dict) else None
    return max(0, len(saved) - cuda_count()) if isinstance(saved, list) else 0


def cuda_states() -> list[torch.Tensor]:
    """The state of every GPU's default generator; empty if GPUs cannot be used.

    If the process has not used a GPU yet, this initialises CUDA: earlier calls that set seeds are only queued, and
    would be lost.
    """
    if not torch.cuda.is_available() or torch.cuda._is_in_bad_fork():
        return []
    return torch.cuda.get_rng_state_all()


def cuda_count() -> int:
    """For how many GPUs this process can restore a generator."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
