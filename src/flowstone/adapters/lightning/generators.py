"""Random number generators, which Lightning's checkpoints leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flowstone.errors import MismatchError
from flowstone.state.kinds.generator import ProcessGenerators, restore, state_of


class Generators:
    """The random generators of every rank's process: Python's `random`, numpy's global generator, torch's, and those of
    the GPUs.

    For Fabric: `state = {"model": model, "generators": Generators(), ...}`. Every rank saves and loads.
    """

    def state_dict(self) -> dict[str, Any]:
        own = state_of(ProcessGenerators(), "generators")
        ranks: list[Any] = [own]  # arrays, not tensors, as torch cannot send tensors of their dtype between ranks
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, own)
        return {"ranks": [_tensors(state) for state in ranks]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the generators. Raises MismatchError if another number of ranks saved them."""
        is_job = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)
        saved = state_dict["ranks"]
        if len(saved) != ranks:
            raise MismatchError(
                "the random generators were saved by another number of ranks",
                expected=f"{ranks} ranks", found=f"{len(saved)} ranks",
                next="resume with as many ranks as saved, or leave the generators out",
            )
        restore(ProcessGenerators(), _arrays(saved[rank]))


def _tensors(state: Any) -> Any:
    """The same state with tensors instead of arrays, so that torch.load can read it from Lightning's own files, too."""
    if isinstance(state, dict):
        return {key: _tensors(item) for key, item in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    numpy = state["numpy"]
    inner = {key: item.numpy() if isinstance(item, torch.Tensor) else item for key, item in numpy["state"].items()}
    return {
        **state, "python": {**state["python"], "words": state["python"]["words"].numpy()},
        "numpy": {**numpy, "state": inner},
    }
