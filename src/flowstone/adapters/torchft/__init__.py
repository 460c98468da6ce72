"""torchft through Flowstone: replica groups heal each other while one lives, and a checkpoint is there when none does.

    ckpt = ReplicaCheckpointer("runs/gpt", manager, {"model": model, "optimizer": optimizer})
    ...
    ckpt.save()  # behind optimizer.step()

docs/TORCHFT.md has the lines to change, and says which group saves. torchft is imported with the first name that needs
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.adapters.torchft.replica import ReplicaCheckpointer


def __getattr__(name: str) -> object:
    if name != "ReplicaCheckpointer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowstone.adapters.torchft import replica

    return replica.ReplicaCheckpointer


__all__ = ["ReplicaCheckpointer"]
