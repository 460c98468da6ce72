"""Find the checkpoint that a Trainer's run resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowstone.adapters.huggingface.run import TrainerRun
from flowstone.adapters.huggingface.sections import TRAINER_STATE
from flowstone.adapters.huggingface.store_paths import (
    committed_at,
    newest_trainer_checkpoint,
    store_of,
    warn_of_later_trainer_checkpoint,
)
from flowstone.errors import ArgumentError, MismatchError, NoCheckpointError, StepExistsError
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.stores.arguments import shown

_STATE_FILE = "trainer_state.json"


class ResumePoint:
    """A Flowstone checkpoint that a run resumes from.

    folder  the folder that the Trainer gets as the checkpoint; it contains trainer_state.json
    """

    def __init__(self, folder: str, checkpoint: Checkpoint, run: TrainerRun) -> None:
        self.folder, self.run, self._checkpoint = folder, run, checkpoint

    def load(self, sections: Mapping[str, object]) -> None:
        self.run.load(self._checkpoint, sections)


def resume_from(requested: object, run: TrainerRun, *, will_save: bool, folder: str) -> ResumePoint | str | None:
    """The checkpoint from which to resume: a Flowstone checkpoint, the path of one that the Trainer itself wrote, or
    None.

    requested  the Trainer's argument `resume_from_checkpoint`: a path, True for the newest, or None
    will_save  whether this run will save
    folder     an empty folder, which a ResumePoint uses

    raises     NoCheckpointError  there is no checkpoint to resume from
               StepExistsError    the output directory has newer checkpoints, of another run
               MismatchError      the checkpoint was not saved by a Trainer
    """
    newest = run.checkpointer.latest()
    if requested is None or requested is False:
        source, resume, step = None, None, 0
    else:
        source = _find(requested, run, newest)
        resume = _prepare(source, run, folder) if isinstance(source, Checkpoint) else None
        step = source.step if isinstance(source, Checkpoint) else _trainer_step(source)
    run.begin_at(step)
    if newest is not None and newest.step > step and will_save:
        if not isinstance(source, Checkpoint) or run.step_at(source.path) is None:
            raise StepExistsError(
                f"{run.directory} holds checkpoints up to step {newest.step}, and this run begins at step {step}",
                next="pass resume_from_checkpoint=True to resume from the newest checkpoint, or give another "
                "output_dir",
            )
        run.rewind_before_save(step)
    return resume or (source if isinstance(source, str) else None)


def _find(requested: object, run: TrainerRun, newest: Checkpoint | None) -> Checkpoint | str:
    if requested is True:
        if newest is not None:
            warn_of_later_trainer_checkpoint(newest, run.directory)
            return newest
        own = newest_trainer_checkpoint(run.directory)
        if own is None:
            raise NoCheckpointError(
                f"there is no checkpoint in {run.directory} to resume from",
                next="pass resume_from_checkpoint=get_last_checkpoint(output_dir) to resume only if there is one",
            )
        return own
    if not isinstance(requested, str | os.PathLike):
        raise ArgumentError(
            f"resume_from_checkpoint {shown(requested)} is neither a path nor True", next="pass a path, True or None"
        )
    path = os.fspath(requested)
    checkpoint = committed_at(path)  # tried first, as `trainer.save_state()` also writes that file into a store
    if checkpoint is None and os.path.isfile(os.path.join(path, _STATE_FILE)):
        return path
    return checkpoint or open_checkpoint(path)


def _trainer_step(path: str) -> int:
    state: Mapping[str, Any] = json.loads((Path(path) / _STATE_FILE).read_text())
    return int(state["global_step"])


def _prepare(checkpoint: Checkpoint, run: TrainerRun, folder: str) -> ResumePoint:
    entries = checkpoint.contents.per_rank.get(TRAINER_STATE)
    if not entries or not isinstance(entries[0], dict):
        raise MismatchError(
            f"{checkpoint.path} has no section {TRAINER_STATE!r}: it was not saved by a Trainer",
            next='load its weights with fs.Checkpointer(...).load({"model": model}), and train without resuming',
        )
    above = store_of(checkpoint)
    state = _with_current_paths(entries[0], above)
    (Path(folder) / _STATE_FILE).write_text(json.dumps(state))
    for path in (checkpoint.path, state["best_model_checkpoint"]):
        step = run.step_at(path)
        if step is not None and os.path.isdir(path):
            run.saved.add(step)
    return ResumePoint(folder, checkpoint, run)


def _with_current_paths(state: Mapping[str, Any], store: str) -> dict[str, Any]:
    """The stored state of the Trainer, in which the best checkpoint's path is changed to the store's current location.
    """
    best = state.get("best_model_checkpoint")
    if isinstance(best, str) and os.path.isdir(here := os.path.join(store, os.path.basename(best))):
        best = here
    return {**state, "best_model_checkpoint": best}
