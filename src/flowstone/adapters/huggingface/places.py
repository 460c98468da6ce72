"""Where a path of a framework leads: the store, and the step in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from flowstone.adapters.step_names import step_at_end
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.commit.entries import step_directory, step_of
from flowstone.errors import ArgumentError, NoCheckpointError, NotAStoreError
from flowstone.log import log

_OWN = re.compile(r"checkpoint-(0|[1-9]\d*)", re.ASCII)  # as transformers calls them


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
    step = step_at_end(name)
    return Place(whole, None) if step is None else Place(above, step)


def committed_at(path: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """The checkpoint at `path`, or of `step` or the newest one of the store there; None if there is none."""
    try:
        return open_checkpoint(os.path.expanduser(path), step)
    except (NoCheckpointError, NotAStoreError):
        return None


def checkpoint_at(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint at `path`, the newest one of the store there, or the one that `place_of` means; None if none."""
    place = place_of(path)
    found = committed_at(path)
    return committed_at(place.store, place.step) if found is None and place.step is not None else found


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
    step = _own_newest_step(folder)
    return None if step is None else _own(folder, step)


def tell_of_later_own(newest: Checkpoint, folder: str | os.PathLike[str]) -> None:
    """Log where a Trainer without Flowstone has gone further in `folder` than `newest`, which is used all the same."""
    step = _own_newest_step(folder)
    if step is not None and step > newest.step:
        log.warning(
            "%s is the newest checkpoint of Flowstone's and is used, although %s, which was written without Flowstone, "
            "is of a later step: pass that path to go on from it", newest.path, _own(folder, step),
        )


def _own_newest_step(folder: str | os.PathLike[str]) -> int | None:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(found[1]) for name in names if (found := _OWN.fullmatch(name))]
    return max((step for step in steps if os.path.isdir(_own(folder, step))), default=None)


def _own(folder: str | os.PathLike[str], step: int) -> str:
    return os.path.join(folder, f"checkpoint-{step}")
