"""One run of a Trainer: its saves, and the steps that they make."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from flowstone.adapters.huggingface.peft_adapters import Bases, to_load
from flowstone.adapters.huggingface.retention import Retained
from flowstone.checkpoint import open_checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory, step_of

_log = logging.getLogger("flowstone")


class Run:
    """The store in a Trainer's output directory, while it trains.

    bases         what the adapters of a PEFT model belong to
    saved         steps that this run has saved, or has resumed from
    rewind_above  the step that it has gone back to: newer ones are set aside before the first save
    """

    def __init__(self, directory: str, checkpointer: Checkpointer, retained: Retained) -> None:
        self.directory, self.checkpointer, self._retained = directory, checkpointer, retained
        self.bases = Bases()
        self.saved: set[int] = set()
        self.rewind_above: int | None = None

    def path(self, step: int) -> str:
        return os.path.join(self.directory, step_directory(step))

    def step_at(self, path: object) -> int | None:
        """The step of a checkpoint in this store; None for any other path."""
        if not isinstance(path, str):
            return None
        above, name = os.path.split(os.path.abspath(path))
        return step_of(name) if os.path.realpath(above) == os.path.realpath(self.directory) else None

    def load(self, step: int, sections: Mapping[str, object]) -> None:
        loaded = to_load(sections, open_checkpoint(self.directory, step))
        self.checkpointer.load(loaded, step=step)

    def save(self, trainer_state: Any, sections: Callable[[], Mapping[str, object]]) -> None:
        """Save the Trainer's state; `best_model_checkpoint` says where the best step is, if that was saved.

        A second save of one step is left out: no weight has changed since the first.
        """
        step = int(trainer_state.global_step)
        best = trainer_state.best_global_step
        if step in self.saved:
            _log.info("step %d is saved already", step)
            return
        if self.rewind_above is not None:
            self.checkpointer.rewind(self.rewind_above)
            self.rewind_above = None
        if best is not None and (best in self.saved or best == step):
            trainer_state.best_model_checkpoint = self.path(best)
        self._retained.best_at[step] = best
        self.checkpointer.save(step, sections())
        self.saved.add(step)
