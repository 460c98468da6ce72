"""One run of a Trainer, and the steps that it saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from flowstone.adapters.huggingface.documents import ModelDocuments
from flowstone.adapters.huggingface.peft_adapters import BaseModels, to_load
from flowstone.adapters.huggingface.retention import TrainerRetention
from flowstone.adapters.huggingface.store_paths import store_of
from flowstone.checkpointer import Checkpointer
from flowstone.commit.entries import step_directory, step_of
from flowstone.errors import StepExistsError
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint


class TrainerRun:
    """The store in a Trainer's output directory, during one call of `train`.

    bases         identifies the base models of PEFT adapters
    documents     the model's configuration and tokenizer
    saved         steps that this run has saved, or resumed from

    If the Trainer starts from the beginning again, it creates a new state object. A TrainerRun notices this by
    comparing that object with the previous one.
    """

    def __init__(self, directory: str, checkpointer: Checkpointer, retained: TrainerRetention) -> None:
        self.directory, self.checkpointer, self._retained = directory, checkpointer, retained
        self.bases, self.documents = BaseModels(), ModelDocuments()
        self.saved: set[int] = set()
        self._first_step = 0
        self._rewind_above: int | None = None
        self._attempt: object = None

    def begin_at(self, step: int) -> None:
        self._first_step = step

    def rewind_before_save(self, step: int) -> None:
        """Called when the run has gone back to `step`: set newer steps aside before the first save."""
        self._rewind_above = step

    def path(self, step: int) -> str:
        return os.path.join(self.directory, step_directory(step))

    def step_at(self, path: object) -> int | None:
        """The step of the checkpoint at a path in this store. None for any other path."""
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

    def wait_for_saves(self, trainer_state: Any) -> None:
        """Wait for saves in flight, because the Trainer is about to load the best step, or to compare other steps with
        it.
        """
        self.checkpointer.wait()
        best = trainer_state.best_model_checkpoint
        if self.step_at(best) is not None and not os.path.isdir(best):
            log.warning("the best checkpoint %s does not exist, and is not loaded", best)
            trainer_state.best_model_checkpoint = None

    def save(self, trainer_state: Any, sections: Callable[[], Mapping[str, object]]) -> None:
        """Save the Trainer's state. Its field `best_model_checkpoint` is set to the path of the best step, if that step
        was saved.

        A second save of the same step is skipped: no weight has changed since the first.
        """
        step = int(trainer_state.global_step)
        best = trainer_state.best_global_step
        if self._attempt is not None and trainer_state is not self._attempt:
            self._start_over()
        self._attempt = trainer_state
        if step in self.saved:
            log.info("step %d is saved already", step)
            return
        if self._rewind_above is not None:
            self.checkpointer.rewind(self._rewind_above)
            self._rewind_above = None
        if best is not None and (best in self.saved or best == step):
            trainer_state.best_model_checkpoint = self.path(best)
        self._retained.best_at[step] = best
        self.checkpointer.save(step, sections())
        self.saved.add(step)

    def _start_over(self) -> None:
        """Go back to the run's first step, because the Trainer ran out of memory, and starts again with smaller
        batches.

        raises  StepExistsError  this run did not begin from a step in this store, so it cannot go back
        """
        abandoned = sorted(step for step in self.saved if step > self._first_step)
        if abandoned and self._first_step not in self.saved:
            raise StepExistsError(
                f"auto_find_batch_size restarted the training at step {self._first_step}, but {self.directory} holds "
                f"steps {', '.join(map(str, abandoned))} of the previous attempt",
                next="set the batch size that fits, and give another output_dir",
            )
        if abandoned:
            self.saved -= set(abandoned)
            self._rewind_above = self._first_step
