"""Where a Trainer's run resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowstone.adapters.huggingface.places import committed_at, own_newest, store_of, tell_of_later_own
from flowstone.adapters.huggingface.run import Run
from flowstone.adapters.huggingface.sections import TRAINER_STATE
from flowstone.arguments import shown
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.errors import ArgumentError, MismatchError, NoCheckpointError, StepExistsError

_STATE_FILE = "trainer_state.json"


class Resume:
    """A checkpoint of ours that a run resumes from.

    folder  what the Trainer takes for the checkpoint: holds its trainer_state.json
    """

    def __init__(self, folder: str, checkpoint: Checkpoint, run: Run) -> None:
        self.folder, self.run, self._checkpoint = folder, run, checkpoint

    def load(self, sections: Mapping[str, object]) -> None:
        self.run.load(self._checkpoint, sections)


def resume_from(wanted: object, run: Run, *, will_save: bool, folder: str) -> Resume | str | None:
    """The checkpoint that `resume_from_checkpoint` asks for: ours, or the path of one of the Trainer's own, or None.

    wanted     as the Trainer takes it: a path, True for the newest, or None
    will_save  whether this run is to save anything
    folder     empty, to be used for a Resume

    raises     NoCheckpointError  there is none
               StepExistsError    the output directory holds newer checkpoints, of another run
               MismatchError      no Trainer has saved it
    """
    newest = run.checkpointer.latest()
    if wanted is None or wanted is False:
        found, resume, step = None, None, 0
    else:
        found = _find(wanted, run, newest)
        resume = _prepare(found, run, folder) if isinstance(found, Checkpoint) else None
        step = found.step if isinstance(found, Checkpoint) else _own_step(found)
    run.begun_at = step
    if newest is not None and newest.step > step and will_save:
        if not isinstance(found, Checkpoint) or run.step_at(found.path) is None:
            raise StepExistsError(
                f"{run.directory} holds checkpoints up to step {newest.step}, and this run begins at step {step}",
                next="pass resume_from_checkpoint=True to go on from there, or give another output_dir",
            )
        run.rewind_above = step
    return resume or (found if isinstance(found, str) else None)


def _find(wanted: object, run: Run, newest: Checkpoint | None) -> Checkpoint | str:
    if wanted is True:
        if newest is not None:
            tell_of_later_own(newest, run.directory)
            return newest
        own = own_newest(run.directory)
        if own is None:
            raise NoCheckpointError(
                f"there is no checkpoint in {run.directory} to resume from",
                next="to resume where there is one, pass resume_from_checkpoint=get_last_checkpoint(output_dir)",
            )
        return own
    if not isinstance(wanted, str | os.PathLike):
        raise ArgumentError(
            f"resume_from_checkpoint {shown(wanted)} is neither a path nor True", next="pass one of them, or None"
        )
    path = os.fspath(wanted)
    found = committed_at(path)  # first: `trainer.save_state()` writes such a file into the store, too
    if found is None and os.path.isfile(os.path.join(path, _STATE_FILE)):
        return path
    return found or open_checkpoint(path)


def _own_step(path: str) -> int:
    state: Mapping[str, Any] = json.loads((Path(path) / _STATE_FILE).read_text())
    return int(state["global_step"])


def _prepare(found: Checkpoint, run: Run, folder: str) -> Resume:
    entries = found.contents.per_rank.get(TRAINER_STATE)
    if not entries or not isinstance(entries[0], dict):
        raise MismatchError(
            f"{found.path} holds no {TRAINER_STATE!r}: no Trainer has saved it",
            next='load its weights by fs.Checkpointer(...).load({"model": model}), and train without resuming',
        )
    above = store_of(found)
    state = _moved(entries[0], above)
    (Path(folder) / _STATE_FILE).write_text(json.dumps(state))
    for path in (found.path, state["best_model_checkpoint"]):
        step = run.step_at(path)
        if step is not None and os.path.isdir(path):
            run.saved.add(step)
    return Resume(folder, found, run)


def _moved(state: Mapping[str, Any], store: str) -> dict[str, Any]:
    """The stored state, with the best checkpoint where the store is now."""
    best = state.get("best_model_checkpoint")
    if isinstance(best, str) and os.path.isdir(here := os.path.join(store, os.path.basename(best))):
        best = here
    return {**state, "best_model_checkpoint": best}
