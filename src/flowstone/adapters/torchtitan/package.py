"""Checks that torchtitan's CheckpointManager has the interface that this adapter needs: a tested version, or methods
with the same parameters.
"""

from __future__ import annotations

from typing import Any

from flowstone.adapters.framework import SupportedFramework

TORCHTITAN = SupportedFramework("torchtitan", "torchtitan==0.3.0", ("0.3.0",))
_METHODS = {
    "dcp_save": ("state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"),
    "dcp_load": ("state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    "_save": ("curr_step", "last_step"), "_load": ("step",), "_find_load_step": ("folder",),
    "_purge_stale_checkpoints": (), "_should_purge": (), "_wait_for_saving": (), "_maybe_wait_for_staging": (),
    "_close": (),
}
"""Methods of CheckpointManager that are replaced, and their callers, with the names of their parameters."""


def checkpoint_manager_class() -> Any:
    """torchtitan's class CheckpointManager.

    raises  FrameworkError  torchtitan is not installed, or has an unknown interface
    """
    version = str(TORCHTITAN.load("torchtitan").__version__)
    kind = TORCHTITAN.load("torchtitan.components.checkpointer").CheckpointManager
    TORCHTITAN.check(version, _METHODS, kind)
    return kind
