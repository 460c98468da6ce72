"""Find the store, and the step in it, that a framework's path means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from flowstone.adapters.step_names import step_at_end
from flowstone.commit.entries import step_directory, step_of
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint

_OWN = re.compile(r"checkpoint-(0|[1-9]\d*)", re.ASCII)  # names of checkpoints that transformers gives


@dataclass(frozen=True, slots=True)
class StoreStep:
    """A store and a step. If `step` is None, a load reads the newest step, and a save writes the next one."""

    store: str
    step: int | None


def store_step_of(path: str | os.PathLike[str]) -> StoreStep:
    """The store and the step that a framework's `path` means. For example, `runs/step_100` is step 100 of the store
    `runs`.

    A path without a number at its end is a store.
    """
    whole = os.path.abspath(os.path.expanduser(path))
    above, name = os.path.split(whole)
    step = step_at_end(name)
    return StoreStep(whole, None) if step is None else StoreStep(above, step)


def committed_at(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """The checkpoint at `path`. If a store is there, its checkpoint of `step` (None: its newest one). Returns None if
    there is no checkpoint.
    """
    try:
        return open_checkpoint(os.path.expanduser(path), step)
    except (NoCheckpointError, NotAStoreError):
        return None


def checkpoint_at(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint at `path`; or the newest one of a store there; or the one of `store_step_of(path)`; or None."""
    place = store_step_of(path)
    checkpoint = committed_at(path)
    return committed_at(place.store, place.step) if checkpoint is None and place.step is not None else checkpoint


def store_of(checkpoint: Checkpoint) -> str:
    """The path of the store that has a checkpoint. Raises ArgumentError if the checkpoint's directory is not named
    after its step.
    """
    above, name = os.path.split(checkpoint.path)
    if step_of(name) != checkpoint.step:
        raise ArgumentError(
            f"the directory {checkpoint.path} is not named after its step",
            next=f"rename the directory to {step_directory(checkpoint.step)}, and load from there",
        )
    return above


def newest_trainer_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in `folder` that a Trainer wrote without Flowstone."""
    step = _newest_trainer_step(folder)
    return None if step is None else _trainer_path(folder, step)


def warn_of_later_trainer_checkpoint(newest: Checkpoint, folder: str | os.PathLike[str]) -> None:
    """Log a warning if `folder` has a later checkpoint, which a Trainer wrote without Flowstone. `newest` is used in
    spite of that.
    """
    step = _newest_trainer_step(folder)
    if step is not None and step > newest.step:
        log.warning(
            "%s, the newest Flowstone checkpoint, is used, although %s, written without Flowstone, is a later step: "
            "pass that path to resume from it", newest.path, _trainer_path(folder, step),
        )


def _newest_trainer_step(folder: str | os.PathLike[str]) -> int | None:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(match[1]) for name in names if (match := _OWN.fullmatch(name))]
    return max((step for step in steps if os.path.isdir(_trainer_path(folder, step))), default=None)


def _trainer_path(folder: str | os.PathLike[str], step: int) -> str:
    return os.path.join(folder, f"checkpoint-{step}")
