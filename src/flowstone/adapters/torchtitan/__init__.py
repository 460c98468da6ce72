"""torchtitan through Flowstone: its trainer saves ordinary Flowstone checkpoints.

    checkpoint=FlowstoneCheckpointManager.Config(enable=True, interval=500)

`FlowstoneCheckpointManager` replaces torchtitan's `CheckpointManager`. docs/TORCHTITAN.md has the lines to change, and
the differences. torchtitan is imported on first use of a name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.adapters.torchtitan.plugin import FlowstoneCheckpointManager


def __getattr__(name: str) -> object:
    if name != "FlowstoneCheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowstone.adapters.torchtitan import plugin

    return plugin.FlowstoneCheckpointManager


__all__ = ["FlowstoneCheckpointManager"]
