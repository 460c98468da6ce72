"""Checks that the base classes of Megatron-core's strategies are known."""

from __future__ import annotations

from types import ModuleType

from flowstone.adapters.framework import SupportedFramework

MEGATRON = SupportedFramework("megatron", "megatron-core==0.16.1", ("0.16.1",))
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "AsyncSaveShardedStrategy": {
        "save": ("sharded_state_dict", "checkpoint_dir"), "async_save": ("sharded_state_dict", "checkpoint_dir"),
    },
    "LoadShardedStrategy": {
        "load": ("sharded_state_dict", "checkpoint_dir"), "load_tensors_metadata": ("checkpoint_dir",),
        "load_sharded_metadata": ("checkpoint_dir",), "remove_sharded_tensors": ("checkpoint_dir", "key_prefix"),
        "check_backend_compatibility": ("loaded_backend",), "check_version_compatibility": ("loaded_version",),
    },
}
"""Methods of the strategies' base classes that Megatron calls, with the names of their parameters."""


def strategies_base() -> ModuleType:
    """The module of Megatron-core with the base classes of save and load strategies.

    raises  FrameworkError  Megatron-core is not installed, or has an unknown interface
    """
    version = str(MEGATRON.load("megatron.core").__version__)
    base = MEGATRON.load(f"{_STRATEGIES}.base")
    for name, methods in _METHODS.items():
        MEGATRON.check(version, methods, getattr(base, name))
    return base
