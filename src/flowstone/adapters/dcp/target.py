"""Where a checkpoint id leads: the directory that is to be the checkpoint, and what may not be overwritten there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from flowstone.adapters.step_names import step_at_end
from flowstone.commit.entries import SAVING, is_ours, saving_directory, step_of
from flowstone.commit.manifests import inside
from flowstone.errors import ArgumentError, NotAStoreError, StepExistsError
from flowstone.format.digest import digest
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Store

_DRAFT = re.compile(re.escape(SAVING) + r"\d{8,}-dcp-[0-9a-f]{16}", re.ASCII)


class Target(msgspec.Struct, frozen=True):
    """The directory `name` in `parent`; `step` is what its manifest will say."""

    parent: Path
    name: str
    step: int

    @property
    def path(self) -> Path:
        return self.parent / self.name

    @property
    def draft_directory(self) -> str:
        """Where it is written until it is whole: beside it, so that one rename puts it in place.

        Every rank knows the name without asking; two targets never have the same.
        """
        return saving_directory(self.step, _draft_id(self.name))


def _draft_id(name: str) -> str:
    return f"dcp-{digest(name.encode())}"


def is_draft_of(entry: str, name: str) -> bool:
    """Whether a directory is a draft of what is to be called `name`, of whichever step."""
    return entry.startswith(SAVING) and entry.endswith(f"-{_draft_id(name)}")


def is_draft(entry: str) -> bool:
    """Whether a directory is a draft of any target, which only the holder of its claim writes into."""
    return _DRAFT.fullmatch(entry) is not None


def target_of(checkpoint_id: str | os.PathLike[str] | None, step: int | None) -> Target:
    """The target that a checkpoint id stands for.

    step    what the caller says; None: the number at the end of the directory's name, or 0
    raises  ArgumentError
    """
    if checkpoint_id is None:
        raise ArgumentError(
            "there is no path to save to", next="write FlowstoneWriter(path), or dcp.save(..., checkpoint_id=path)"
        )
    if not is_local(checkpoint_id):
        raise ArgumentError(
            f"{checkpoint_id!r:.200} is no path of a directory",
            next="give a directory: other stores have no DCP adapter yet",
        )
    path = Path(os.path.abspath(checkpoint_id))
    if not path.name:
        raise ArgumentError(f"{path} cannot be a checkpoint", next="give a directory inside of it")
    named = step_of(path.name)
    if step is not None and named not in (None, step):
        raise ArgumentError(
            f"the directory {path.name} is for step {named}, not {step}", next="leave out step=, or rename one of them"
        )
    return Target(path.parent, path.name, (step_at_end(path.name) or 0) if step is None else step)


def is_local(checkpoint_id: object) -> bool:
    """Whether it could be a directory of a checkpoint: a path, and no URL."""
    return isinstance(checkpoint_id, str | os.PathLike) and "://" not in os.fspath(checkpoint_id)


def check_target(store: Store, target: Target, *, overwrite: bool) -> None:
    """Raise where a checkpoint must not be put: over anything that Flowstone has not made as one.

    store   of the parent directory
    raises  NotAStoreError, StepExistsError
    """
    name = target.name
    if store.is_link(name):
        raise NotAStoreError(f"{target.path} is a link", next="save to the directory that it leads to")
    if not store.exists(name):
        return
    if not target.path.is_dir():
        raise NotAStoreError(f"{target.path} is a file", next="save to another path")
    held = store.names(name)
    foreign = [entry for entry in held if not is_ours(entry)]
    if foreign:
        is_store = MARKER_NAME in foreign
        raise NotAStoreError(
            f"{target.path} is a store of checkpoints" if is_store else
            f"{target.path} holds files that are no part of a Flowstone checkpoint",
            found=", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else ""),
            next="save to a directory inside of it" if is_store else "save to another directory, or empty this one",
        )
    if store.exists(inside(name, MANIFEST_NAME)) and not overwrite:
        raise StepExistsError(
            f"{target.path} holds a checkpoint, and overwrite=False",
            next="save to another path, or pass overwrite=True",
        )
