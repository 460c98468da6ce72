"""The methods with which transformers' Trainer saves and resumes through Flowstone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from flowstone.adapters.class_override import override_methods
from flowstone.adapters.huggingface.distributed import check_distributed
from flowstone.adapters.huggingface.options import CheckpointerOptions
from flowstone.adapters.huggingface.resume import ResumePoint, resume_from
from flowstone.adapters.huggingface.retention import TrainerRetention
from flowstone.adapters.huggingface.run import TrainerRun
from flowstone.adapters.huggingface.sections import live_sections, saved_sections
from flowstone.adapters.huggingface.store_paths import committed_at
from flowstone.errors import ArgumentError
from flowstone.state.kinds.generator import rng

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
"""The methods of the Trainer that are replaced or called."""

T = TypeVar("T")


def adopt(trainer: T, options: CheckpointerOptions) -> T:
    """Replace how `trainer` saves and resumes: its class is replaced by a subclass. Returns the same object.

    raises  ArgumentError  the Trainer has settings that Flowstone does not support
    """
    from transformers import Trainer

    _check_settings(trainer)
    override_methods(trainer, TrainerCheckpoints, Trainer, TrainerRuns(options))
    return trainer


def _check_settings(trainer: Any) -> None:
    check_distributed(trainer.accelerator)
    args = trainer.args
    if args.push_to_hub and args.hub_strategy.value != "end":
        raise ArgumentError(
            "push_to_hub would upload the Trainer's own checkpoints, which are no longer written",
            found=f"hub_strategy={args.hub_strategy.value!r}",
            next='set hub_strategy="end", or call trainer.push_to_hub()',
        )


class TrainerRuns:
    """The calls of a Trainer's `train`, one after the other. Each has its own Checkpointer."""

    def __init__(self, options: CheckpointerOptions) -> None:
        self._options = options
        self.run: TrainerRun | None = None
        self.resume: ResumePoint | None = None

    @contextmanager
    def open_run(self, trainer: Any, trial: object) -> Iterator[TrainerRun]:
        """Context of the current TrainerRun. Outside of a call of `train`, a new run is opened. It ends with the `with`
        block, after its commits.
        """
        if self.run is not None:
            yield self.run
            return
        retained = TrainerRetention(trainer.args.save_total_limit)
        directory = os.path.abspath(trainer._get_output_dir(trial))
        with self._options.open(directory, retained.keep) as checkpointer:
            self.run = TrainerRun(directory, checkpointer, retained)
            try:
                yield self.run
            finally:
                self.run = None

    @contextmanager
    def training(self, trainer: Any, trial: object, requested: object) -> Iterator[str | None]:
        """Context of one call of `train`. Yields what the Trainer uses as its `resume_from_checkpoint`."""
        with self.open_run(trainer, trial) as run, ExitStack() as ending:
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="flowstone-resume-"))
            source = resume_from(requested, run, will_save=trainer.args.save_strategy.value != "no", folder=folder)
            self.resume = source if isinstance(source, ResumePoint) else None
            try:
                yield source.folder if isinstance(source, ResumePoint) else source
            finally:
                self.resume = None

    def resume_point_of(self, checkpoint: object) -> ResumePoint | None:
        """The Flowstone checkpoint that the Trainer's path `checkpoint` stands for; None if there is none."""
        return self.resume if self.resume is not None and checkpoint == self.resume.folder else None


class TrainerCheckpoints:
    """Methods for a Trainer. For checkpoints that were written without Flowstone, they call the original methods.

    The Trainer reads the checkpoint's trainer_state.json with functions that cannot be replaced. So it resumes from a
    temporary folder that has only this file, and each method finds the checkpoint that belongs to the folder.
    """

    _flowstone: TrainerRuns

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        with self._flowstone.training(self, trial, resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, trial, ignore_keys_for_eval)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        with self._flowstone.open_run(self, trial) as run:
            run.save(trainer.state, lambda: saved_sections(trainer, run.bases, run.documents))

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        # A Flowstone checkpoint is loaded later, with the optimizer, whose tensors have names of the model's
        # parameters.
        if self._flowstone.resume_point_of(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        resume = self._flowstone.resume_point_of(checkpoint)
        if resume is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            resume.load(live_sections(self, resume.run.bases))

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._flowstone.resume_point_of(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        resume = self._flowstone.resume_point_of(checkpoint)
        if resume is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            resume.load({"rng": rng()})

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        trainer: Any = self
        if self._flowstone.run is not None:
            self._flowstone.run.wait_for_saves(trainer.state)
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        trainer: Any = self
        run, best = self._flowstone.run, trainer.state.best_model_checkpoint
        checkpoint = None if run is None else committed_at(best)
        if run is None or checkpoint is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            run.load(checkpoint, live_sections(self, run.bases, model_only=True))
