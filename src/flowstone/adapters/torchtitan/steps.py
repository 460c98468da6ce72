"""The steps in torchtitan's folder of checkpoints: which directories are checkpoints, and in which format."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flowstone.commit.entries import new_superseded_directory
from flowstone.errors import NoCheckpointError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.store.local import LocalStore

_STEP = re.compile(r"step-(0|[1-9]\d*)", re.ASCII)
_METADATA, _EXPORT = ".metadata", "model.safetensors.index.json"
_FILE_OF_DCP = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?", re.ASCII)


def is_flowstone_checkpoint(place: Path) -> bool:
    """Whether a directory is a committed checkpoint of Flowstone."""
    return (place / MANIFEST_NAME).is_file()


def committed_steps(folder: Path) -> dict[int, Path]:
    """The directories with checkpoints: step -> directory. They may be Flowstone's, torchtitan's own, or exports for
    Hugging Face.
    """
    if not folder.is_dir():
        return {}
    named = ((_STEP.fullmatch(name), folder / name) for name in os.listdir(folder))
    return {int(match[1]): place for match, place in named if match is not None and _is_checkpoint(place)}


def _is_checkpoint(place: Path) -> bool:
    return is_flowstone_checkpoint(place) or any((place / name).is_file() for name in (_METADATA, _EXPORT))


def check_loadable(place: Path) -> None:
    """Raise NoCheckpointError unless torchtitan's own reader can load the checkpoint."""
    if (place / _METADATA).is_file():
        return
    is_export = (place / _EXPORT).is_file()
    raise NoCheckpointError(
        f"training cannot resume from {place}",
        found="an export for Hugging Face, with weights only" if is_export else "a save that was not committed",
        next="set checkpoint.load_step to a committed step"
        + (
            "; or, to begin a new run from these weights, set checkpoint.folder to a new directory, "
            "checkpoint.initial_load_path to this export, and checkpoint.initial_load_in_hf to true"
            if is_export else ""
        ),
    )


def set_aside_torchtitan_save(place: Path) -> None:
    """If a checkpoint of torchtitan's own format, complete or not, is at the path of a new checkpoint, rename it.

    raises  StorageError
    """
    names = os.listdir(place) if place.is_dir() and not place.is_symlink() else []
    match = _STEP.fullmatch(place.name)
    if match is None or not names or not all(_FILE_OF_DCP.fullmatch(name) for name in names):
        return
    aside = new_superseded_directory(int(match[1]))
    store = LocalStore(place.parent)
    try:
        store.rename(place.name, aside)
        store.sync_directory()
    finally:
        store.close()
    log.warning("%s held a save of torchtitan itself; it was renamed to %s", place, aside)
