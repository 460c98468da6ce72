"""GeneratorStates: the callback that saves random number generators, for the Trainer."""

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
    """Saves the generators of every rank, and restores them before the first batch that is trained after a resume.

    Lightning saves none: with dropout, a resumed run differs from one that was not disturbed.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Any, module: object, stage: str) -> None:
        """Refuse what would save through `FlowstoneIO` and never load from it. Raises ArgumentError."""
        strategy = trainer.strategy
        if isinstance(strategy.checkpoint_io, FlowstoneIO) and not loads_through_plugins(strategy):
            raise ArgumentError(
                f"{type(strategy).__name__} does not load through plug-ins: it could not resume what FlowstoneIO saves",
                next="leave FlowstoneIO out, or save by a Checkpointer in a callback: docs/RECIPES.md",
            )

    def state_dict(self) -> dict[str, Any]:
        return Generators().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_index: int) -> None:
        # Only here: a loader's iterator draws from torch's generator when it is made.
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            Generators().load_state_dict(loaded)
