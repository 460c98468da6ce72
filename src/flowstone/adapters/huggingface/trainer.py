"""transformers' Trainer: the methods by which it saves and resumes, over Flowstone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from flowstone.adapters.deriving import derive
from flowstone.adapters.huggingface.distributed import check_distributed
from flowstone.adapters.huggingface.options import Options
from flowstone.adapters.huggingface.places import committed_at
from flowstone.adapters.huggingface.resume import Resume, resume_from
from flowstone.adapters.huggingface.retention import Retained
from flowstone.adapters.huggingface.run import Run
from flowstone.adapters.huggingface.sections import live_sections, saved_sections
from flowstone.errors import ArgumentError
from flowstone.state import rng

METHODS: Mapping[str, Sequence[str]] = MappingProxyType({
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_get_output_dir": ("trial",),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_best_model": (),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "store_flos": (),
})
"""What is replaced, or called, of the Trainer."""

T = TypeVar("T")


def adopt(trainer: T, options: Options) -> T:
    """Replace how `trainer` saves and resumes: its class becomes one that derives from its own.

    raises  ArgumentError for settings whose saving is not replaced
    """
    from transformers import Trainer

    _check_settings(trainer)
    derive(trainer, TrainerCheckpoints, Trainer)
    trainer._flowstone = Runs(options)  # type: ignore[attr-defined]
    return trainer


def _check_settings(trainer: Any) -> None:
    check_distributed(trainer.accelerator)
    args = trainer.args
    if args.push_to_hub and args.hub_strategy.value != "end":
        raise ArgumentError(
            "push_to_hub uploads files of the Trainer's own checkpoints, which are no longer written",
            found=f"hub_strategy={args.hub_strategy.value!r}",
            next='set hub_strategy="end", or call trainer.push_to_hub()',
        )


class Runs:
    """The calls of one Trainer's `train`, one after the other, each with a Checkpointer of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.run: Run | None = None
        self.resume: Resume | None = None

    @contextmanager
    def opened(self, trainer: Any, trial: object) -> Iterator[Run]:
        """The run under way; outside of `train`, one that ends with the block: that waits for its commits."""
        if self.run is not None:
            yield self.run
            return
        retained = Retained(trainer.args.save_total_limit)
        directory = os.path.abspath(trainer._get_output_dir(trial))
        with self._options.open(directory, retained.keep) as checkpointer:
            self.run = Run(directory, checkpointer, retained)
            try:
                yield self.run
            finally:
                self.run = None

    @contextmanager
    def training(self, trainer: Any, trial: object, wanted: object) -> Iterator[str | None]:
        """Yields what the Trainer is to be given as `resume_from_checkpoint`."""
        with self.opened(trainer, trial) as run, ExitStack() as ending:
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="flowstone-resume-"))
            found = resume_from(wanted, run, will_save=trainer.args.save_strategy.value != "no", folder=folder)
            self.resume = found if isinstance(found, Resume) else None
            try:
                yield found.folder if isinstance(found, Resume) else found
            finally:
                self.resume = None

    def resumes(self, checkpoint: object) -> Resume | None:
        """The checkpoint of ours that the Trainer resumes from under the name of `checkpoint`, if it is one."""
        return self.resume if self.resume is not None and checkpoint == self.resume.folder else None


class TrainerCheckpoints:
    """The Trainer's own methods, which call its own again for checkpoints that it has written without Flowstone.

    The Trainer reads trainer_state.json where it resumes from, by functions that cannot be replaced: so it resumes from
    a temporary folder that holds this file alone, and each method knows which checkpoint that stands for.
    """

    _flowstone: Runs

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        with self._flowstone.training(self, trial, resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, trial, ignore_keys_for_eval)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        with self._flowstone.opened(self, trial) as run:
            run.save(trainer.state, lambda: saved_sections(trainer, run.bases, run.documents))

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        # With the optimizer, a few lines later: its tensors are named after the model's.
        if self._flowstone.resumes(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        resume = self._flowstone.resumes(checkpoint)
        if resume is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            resume.load(live_sections(self, resume.run.bases))

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._flowstone.resumes(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        resume = self._flowstone.resumes(checkpoint)
        if resume is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            resume.load({"rng": rng()})

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        trainer: Any = self
        if self._flowstone.run is not None:
            self._flowstone.run.end(trainer.state)
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        trainer: Any = self
        run, best = self._flowstone.run, trainer.state.best_model_checkpoint
        found = None if run is None else committed_at(best)
        if run is None or found is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            run.load(found, live_sections(self, run.bases, model_only=True))
