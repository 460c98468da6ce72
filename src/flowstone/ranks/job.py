"""Which rank this process is. One rank for now; a job of several is refused, never half saved."""

from __future__ import annotations

import torch.distributed

from flowstone.errors import UnsupportedStateError


def only_rank() -> int:
    """Rank 0 of a job of one; UnsupportedStateError in a job of several ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            raise UnsupportedStateError(
                f"this job has {world} ranks, and this version of flowstone saves and loads from one",
                next="use it in single-process training; saving from many ranks is the next milestone",
            )
    return 0
