"""Where a path of a framework leads: the store, and the step in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.commit.entries import step_directory, step_of
from flowstone.config import STEP_MAX
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError

_OWN = re.compile(r"checkpoint-(0|[1-9]\d*)", re.ASCII)  # as transformers calls them
_TRAILING_NUMBER = re.compile(r"(\d+)$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """`step` None: the newest one of the store, or the one after it."""

    store: str
    step: int | None


def place_of(path: str | os.PathLike[str]) -> Place:
    """Where a checkpoint that a framework calls `path` goes: `runs/step_100` is step 100 of the store `runs`.

    A path without a number at its end is a store by itself.
    """
    whole = os.path.abspath(os.path.expanduser(path))
    above, name = os.path.split(whole)
    number = _TRAILING_NUMBER.search(name)
    if number is None or int(number[1]) > STEP_MAX:
        return Place(whole, None)
    return Place(above, int(number[1]))


def checkpoint_at(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint at `path`, the newest one of the store there, or the one that `place_of` means; None if none."""
    try:
        return open_checkpoint(os.path.expanduser(path))
    except (NoCheckpointError, NotAStoreError):
        place = place_of(path)
    if place.step is None:
        return None
    try:
        return open_checkpoint(place.store, place.step)
    except (NoCheckpointError, NotAStoreError):
        return None


def store_of(checkpoint: Checkpoint) -> str:
    """The store that a checkpoint lies in. Raises ArgumentError for one that is not called by its step."""
    above, name = os.path.split(checkpoint.path)
    if step_of(name) != checkpoint.step:
        raise ArgumentError(
            f"{checkpoint.path} is not called by its step",
            next=f"rename it to {step_directory(checkpoint.step)}, and load that",
        )
    return above


def own_newest(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in `folder` that a Trainer has written without Flowstone."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(found[1]) for name in names if (found := _OWN.fullmatch(name))]
    paths = [os.path.join(folder, f"checkpoint-{step}") for step in sorted(steps)]
    return next((path for path in reversed(paths) if os.path.isdir(path)), None)
