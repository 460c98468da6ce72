"""GeneratorStates: the callback that saves random number generators, for the Trainer."""

from __future__ import annotations

from types import new_class
from typing import TYPE_CHECKING, Any

from flowstone.adapters.lightning.generators import Generators
from flowstone.adapters.lightning.packages import callback_classes

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

    def state_dict(self) -> dict[str, Any]:
        return Generators().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_index: int) -> None:
        # Only here: a loader's iterator draws from torch's generator when it is made.
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            Generators().load_state_dict(loaded)
