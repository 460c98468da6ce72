"""Find the directory of a checkpoint id, and check whether it may be overwritten."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from flowstone.adapters.step_names import step_at_end
from flowstone.commit.entries import SAVING, is_checkpoint_file, saving_directory, step_of
from flowstone.commit.manifests import path_inside
from flowstone.errors import ArgumentError, NotAStoreError, StepExistsError
from flowstone.format.digest import digest
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Store

_DRAFT = re.compile(re.escape(SAVING) + r"\d{8,}-dcp-[0-9a-f]{16}", re.ASCII)


class Target(msgspec.Struct, frozen=True):
    """The directory `name` in `parent`, into which a checkpoint is saved. `step`: the step in the checkpoint's
    manifest.
    """

    parent: Path
    name: str
    step: int

    @property
    def path(self) -> Path:
        return self.parent / self.name

    @property
    def draft_directory(self) -> str:
        """The directory in which the checkpoint is written. It is beside the target, so that one rename completes the
        checkpoint.

        Every rank can compute the name; two targets never share one.
        """
        return saving_directory(self.step, _draft_id(self.name))


def _draft_id(name: str) -> str:
    return f"dcp-{digest(name.encode())}"


def is_draft_of(entry: str, name: str) -> bool:
    """Whether the entry is the directory of an unfinished checkpoint for the target `name`, of any step."""
    return entry.startswith(SAVING) and entry.endswith(f"-{_draft_id(name)}")


def is_draft(entry: str) -> bool:
    """Whether the entry is the directory of an unfinished checkpoint for any target. Only the holder of its claim
    (claim.py) writes to it.
    """
    return _DRAFT.fullmatch(entry) is not None


def target_of(checkpoint_id: str | os.PathLike[str] | None, step: int | None) -> Target:
    """The directory that a checkpoint id means, and its step.

    step    the step, if the caller gave one; None: the number at the end of the directory's name, or 0
    raises  ArgumentError
    """
    if checkpoint_id is None:
        raise ArgumentError(
            "no path to save to was given", next="write FlowstoneWriter(path), or dcp.save(..., checkpoint_id=path)"
        )
    if not is_local(checkpoint_id):
        raise ArgumentError(
            f"{checkpoint_id!r:.200} is not the path of a directory",
            next="give a directory: the DCP adapter does not support other stores yet",
        )
    path = Path(os.path.abspath(checkpoint_id))
    if not path.name:
        raise ArgumentError(
            f"cannot save a checkpoint as {path}: this is the root of the file system", next="give another directory"
        )
    named = step_of(path.name)
    if step is not None and named not in (None, step):
        raise ArgumentError(
            f"the directory {path.name} is for step {named}, not {step}",
            next="leave out step=, or rename the directory",
        )
    return Target(path.parent, path.name, (step_at_end(path.name) or 0) if step is None else step)


def is_local(checkpoint_id: object) -> bool:
    """Whether the checkpoint id is a path, not a URL."""
    return isinstance(checkpoint_id, str | os.PathLike) and "://" not in os.fspath(checkpoint_id)


def check_target(store: Store, target: Target, *, overwrite: bool) -> None:
    """Raise an error if the target exists, and is not a Flowstone checkpoint that may be overwritten.

    store   the store of the parent directory
    raises  NotAStoreError, StepExistsError
    """
    name = target.name
    if store.is_link(name):
        raise NotAStoreError(f"{target.path} is a link", next="save to the directory that the link points to")
    if not store.exists(name):
        return
    if not target.path.is_dir():
        raise NotAStoreError(f"{target.path} is a file", next="save to another path")
    entries = store.names(name)
    foreign = [entry for entry in entries if not is_checkpoint_file(entry)]
    if foreign:
        is_store = MARKER_NAME in foreign
        raise NotAStoreError(
            f"{target.path} is a store of checkpoints" if is_store else
            f"{target.path} holds files that do not belong to a Flowstone checkpoint",
            found=", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else ""),
            next="save to a directory inside it" if is_store else "save to another directory, or empty this one",
        )
    if store.exists(path_inside(name, MANIFEST_NAME)) and not overwrite:
        raise StepExistsError(
            f"{target.path} holds a checkpoint, and overwrite=False",
            next="save to another path, or pass overwrite=True",
        )
