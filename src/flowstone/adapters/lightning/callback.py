"""GeneratorStates: a Trainer callback that saves random number generators."""

from __future__ import annotations

from types import new_class
from typing import TYPE_CHECKING, Any

from flowstone.adapters.lightning.checkpoint_io import FlowstoneIO
from flowstone.adapters.lightning.generators import Generators
from flowstone.adapters.lightning.packages import callback_classes, loads_through_plugins
from flowstone.errors import ArgumentError

if TYPE_CHECKING:
    Callback = object
else:
    Callback = new_class("Callback", callback_classes())


class GeneratorStates(Callback):
    """Saves the generators of every rank, and restores them before the first training batch after a resume.

    Lightning itself saves no generators. With dropout, for example, a resumed run would then differ from an
    uninterrupted one.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Any, module: object, stage: str) -> None:
        """Raise ArgumentError for a strategy that saves, but does not load, through `FlowstoneIO`."""
        strategy = trainer.strategy
        if isinstance(strategy.checkpoint_io, FlowstoneIO) and not loads_through_plugins(strategy):
            raise ArgumentError(
                f"{type(strategy).__name__} does not load through plug-ins, so it could not resume from FlowstoneIO",
                next="leave FlowstoneIO out, or save with a Checkpointer in a callback: docs/RECIPES.md",
            )

    def state_dict(self) -> dict[str, Any]:
        return Generators().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_index: int) -> None:
        # Restored only now, as a loader's iterator draws from torch's generator when it is created.
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            Generators().load_state_dict(loaded)
