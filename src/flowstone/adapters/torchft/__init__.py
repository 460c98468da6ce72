"""torchft through Flowstone. Replica groups restore each other's state; if all groups have failed, a checkpoint
restores it.

    ckpt = ReplicaCheckpointer("runs/gpt", manager, {"model": model, "optimizer": optimizer})
    ...
    ckpt.save()  # after optimizer.step()

docs/TORCHFT.md has the lines to change, and says which group saves. torchft is imported on first use of a name that
needs it.
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
