"""Steps in torchtitan's checkpoint folder: which directories are checkpoints, whose, and what is in a save's way."""

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


def is_flowstones(place: Path) -> bool:
    """Whether a directory is a committed checkpoint of Flowstone."""
    return (place / MANIFEST_NAME).is_file()


def committed_steps(folder: Path) -> dict[int, Path]:
    """The directories that are checkpoints, by step: Flowstone's, torchtitan's own and exports for Hugging Face."""
    if not folder.is_dir():
        return {}
    named = ((_STEP.fullmatch(name), folder / name) for name in os.listdir(folder))
    return {int(found[1]): place for found, place in named if found is not None and _is_checkpoint(place)}


def _is_checkpoint(place: Path) -> bool:
    return is_flowstones(place) or any((place / name).is_file() for name in (_METADATA, _EXPORT))


def check_loadable(place: Path) -> None:
    """Raise NoCheckpointError unless torchtitan's own reader would find what it needs."""
    if (place / _METADATA).is_file():
        return
    is_export = (place / _EXPORT).is_file()
    raise NoCheckpointError(
        f"{place} is no checkpoint that training can resume from",
        found="an export for Hugging Face: weights alone" if is_export else "a save that was never committed",
        next="set checkpoint.load_step to a committed step"
        + (", or load it by initial_load_path and initial_load_in_hf in another folder" if is_export else ""),
    )


def make_way(place: Path) -> None:
    """Set aside what torchtitan itself has saved, or has left of a save, where a checkpoint of this step is to be.

    raises  StorageError
    """
    names = os.listdir(place) if place.is_dir() and not place.is_symlink() else []
    found = _STEP.fullmatch(place.name)
    if found is None or not names or not all(_FILE_OF_DCP.fullmatch(name) for name in names):
        return
    aside = new_superseded_directory(int(found[1]))
    store = LocalStore(place.parent)
    try:
        store.rename(place.name, aside)
        store.sync_directory()
    finally:
        store.close()
    log.warning("%s held what torchtitan itself has saved; it is in %s now", place, aside)
