"""Reading: a committed checkpoint as the dict that Lightning has saved, in fresh memory, verified."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flowstone.adapters.dcp.claim import claim_file, is_claimed
from flowstone.adapters.dcp.target import is_draft_of, is_local
from flowstone.adapters.lightning.values import values_of
from flowstone.checkpoint import open_checkpoint
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, LockedError, NoCheckpointError, NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.store.local import LocalStore

_POLL_S = 0.01


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved at `path`.

    raises  NoCheckpointError, NotAStoreError, DamagedError, UnsupportedFormatError
    """
    store = LocalStore(checked(path), EngineOptions())
    try:
        checkpoint = open_checkpoint(store)
        return values_of(checkpoint, checkpoint.objects)
    finally:
        store.close()


def checked(path: str | os.PathLike[str]) -> Path:
    """The directory at `path`, which holds a checkpoint or a store.

    For a link to a checkpoint that was never committed, as a crash leaves one with `save_last="link"`: the newest one
    that is committed beside it.
    """
    if not is_local(path):
        raise ArgumentError(f"{path!r:.200} is no path of a directory", next="give a directory")
    place = Path(os.path.abspath(path))
    if place.is_file():
        raise NotAStoreError(
            f"{place} is a file: Lightning itself has written it by torch.save",
            next="pass FlowstoneIO(reads_torch_files=True) to read such files too",
        )
    if place.is_symlink() and not any(place.glob("*")):
        beside = _committed(place.resolve().parent)
        if beside:
            log.warning("%s leads to a save that never ended: %s is read, the newest beside it", place, beside[0].name)
            return beside[0]
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        raise NoCheckpointError(
            f"there is no checkpoint at {place}" + (": the save of it never ended" if place.exists() else ""),
            found=_others(place.parent), next="resume from one that is there, or start anew without ckpt_path",
        )
    return place


def _others(folder: Path) -> str:
    """The names of a folder's committed checkpoints, the newest first."""
    return ", ".join(one.name for one in _committed(folder)[:5]) or f"no checkpoint in {folder}"


def _committed(folder: Path) -> list[Path]:
    """The committed checkpoints of a folder, the newest first; no drafts."""
    found = [one for one in folder.glob(f"*/{MANIFEST_NAME}") if not one.parent.name.startswith(".")]
    return [one.parent for one in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)]


def await_writer(path: str | os.PathLike[str], deadline_s: float) -> None:
    """Wait until nothing saves to `path`: in a job, rank 0 may still do so.

    raises  LockedError after `deadline_s`: what is there by then is an older checkpoint, which other ranks may not read
    """
    place = Path(os.path.realpath(path))
    end = time.monotonic() + deadline_s
    while _is_saved_to(place):
        if time.monotonic() >= end:
            raise LockedError(
                f"{place} is still being saved to after {deadline_s:g} s",
                next="wait until it is done, or allow more time: FlowstoneIO(deadline_s=...)",
            )
        time.sleep(_POLL_S)


def _is_saved_to(place: Path) -> bool:
    names = os.listdir(place.parent) if place.parent.is_dir() else []
    drafts = [name.removeprefix(claim_file("")) for name in names]
    return any(is_draft_of(name, place.name) and is_claimed(place.parent, name) for name in drafts)
