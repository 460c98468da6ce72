"""Megatron-core through Flowstone: the sharded part of its distributed checkpoints is a Flowstone checkpoint.

    dist_checkpointing.save(sharded_state_dict, directory, sharded_strategy=FlowstoneSaveStrategy())
    dist_checkpointing.load(sharded_state_dict, directory)

`register` makes Megatron find the load strategy by itself. docs/MEGATRON.md has the lines to change, and the
differences. Megatron-core is imported on first use of a name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.adapters.megatron.strategies import FlowstoneLoadStrategy, FlowstoneSaveStrategy, register


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowstone.adapters.megatron import strategies

    return getattr(strategies, name)


__all__ = ["FlowstoneLoadStrategy", "FlowstoneSaveStrategy", "register"]
