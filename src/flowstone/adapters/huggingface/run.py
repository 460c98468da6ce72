"""One run of a Trainer: its saves, and the steps that they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from flowstone.adapters.huggingface.documents import Documents
from flowstone.adapters.huggingface.peft_adapters import Bases, to_load
from flowstone.adapters.huggingface.places import store_of
from flowstone.adapters.huggingface.retention import Retained
from flowstone.checkpoint import Checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory, step_of
from flowstone.errors import StepExistsError
from flowstone.log import log


class Run:
    """The store in a Trainer's output directory, while it trains.

    bases         what the adapters of a PEFT model belong to
    documents     the model's configuration and tokenizer
    saved         steps that this run has saved, or has resumed from
    begun_at      the step that it begins at
    rewind_above  the step that it has gone back to: newer ones are set aside before the first save

    The Trainer makes another state object where it begins anew; the one of the attempt before is kept to notice that.
    """

    def __init__(self, directory: str, checkpointer: Checkpointer, retained: Retained) -> None:
        self.directory, self.checkpointer, self._retained = directory, checkpointer, retained
        self.bases, self.documents = Bases(), Documents()
        self.saved: set[int] = set()
        self.begun_at = 0
        self.rewind_above: int | None = None
        self._attempt: object = None

    def path(self, step: int) -> str:
        return os.path.join(self.directory, step_directory(step))

    def step_at(self, path: object) -> int | None:
        """The step of a checkpoint in this store; None for any other path."""
        if not isinstance(path, str):
            return None
        above, name = os.path.split(os.path.abspath(path))
        return step_of(name) if os.path.realpath(above) == os.path.realpath(self.directory) else None

    def load(self, checkpoint: Checkpoint, sections: Mapping[str, object]) -> None:
        loaded = to_load(sections, checkpoint)
        if self.step_at(checkpoint.path) is not None:
            self.checkpointer.load(loaded, step=checkpoint.step)
        else:
            with Checkpointer(store_of(checkpoint)) as other:
                other.load(loaded, step=checkpoint.step)

    def end(self, trainer_state: Any) -> None:
        """Wait for the saves under way: the Trainer is about to load the best step, or to compare others with it."""
        self.checkpointer.wait()
        best = trainer_state.best_model_checkpoint
        if self.step_at(best) is not None and not os.path.isdir(best):
            log.warning("the best checkpoint %s does not exist, and is not loaded", best)
            trainer_state.best_model_checkpoint = None

    def save(self, trainer_state: Any, sections: Callable[[], Mapping[str, object]]) -> None:
        """Save the Trainer's state; `best_model_checkpoint` says where the best step is, if that was saved.

        A second save of one step is left out: no weight has changed since the first.
        """
        step = int(trainer_state.global_step)
        best = trainer_state.best_global_step
        if self._attempt is not None and trainer_state is not self._attempt:
            self._begin_again()
        self._attempt = trainer_state
        if step in self.saved:
            log.info("step %d is saved already", step)
            return
        if self.rewind_above is not None:
            self.checkpointer.rewind(self.rewind_above)
            self.rewind_above = None
        if best is not None and (best in self.saved or best == step):
            trainer_state.best_model_checkpoint = self.path(best)
        self._retained.best_at[step] = best
        self.checkpointer.save(step, sections())
        self.saved.add(step)

    def _begin_again(self) -> None:
        """The Trainer has begun anew, with another batch size, since memory was short: other steps of the same numbers.

        raises  StepExistsError  this run has not begun from a step in this store, so there is none to go back to
        """
        abandoned = sorted(step for step in self.saved if step > self.begun_at)
        if abandoned and self.begun_at not in self.saved:
            raise StepExistsError(
                f"auto_find_batch_size has begun the training anew at step {self.begun_at}, and {self.directory} holds "
                f"steps {', '.join(map(str, abandoned))} of the attempt before",
                next="set the batch size that fits, and give another output_dir",
            )
        if abandoned:
            self.saved -= set(abandoned)
            self.rewind_above = self.begun_at
