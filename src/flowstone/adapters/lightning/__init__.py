"""Lightning and Fabric through Flowstone: they save ordinary Flowstone checkpoints.

    trainer = Trainer(plugins=[FlowstoneIO()], callbacks=[GeneratorStates()])
    fabric = Fabric(plugins=[FlowstoneIO()])
    trainer = Trainer(strategy=flowstone_strategy(ModelParallelStrategy(...)))

`FlowstoneIO` replaces `TorchCheckpointIO`, for `lightning` and for `pytorch_lightning`; `flowstone_strategy` is for
sharded strategies. docs/LIGHTNING.md has the lines to change, and the differences. Lightning is imported on first use
of a name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.adapters.lightning.callback import GeneratorStates
    from flowstone.adapters.lightning.checkpoint_io import FlowstoneIO
    from flowstone.adapters.lightning.generators import Generators
    from flowstone.adapters.lightning.sharded import flowstone_strategy
    from flowstone.adapters.lightning.streams import as_torch_file

_LATER = {
    "FlowstoneIO": "flowstone.adapters.lightning.checkpoint_io",
    "GeneratorStates": "flowstone.adapters.lightning.callback",
    "Generators": "flowstone.adapters.lightning.generators",
    "flowstone_strategy": "flowstone.adapters.lightning.sharded",
    "as_torch_file": "flowstone.adapters.lightning.streams",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


__all__ = ["FlowstoneIO", "GeneratorStates", "Generators", "as_torch_file", "flowstone_strategy"]
