"""Read a committed checkpoint as Lightning's dict, into new memory, and verify it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flowstone.adapters.dcp.claim import claim_file, is_claimed
from flowstone.adapters.dcp.target import is_draft_of, is_local
from flowstone.adapters.lightning.values import values_of
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, LockedError, NoCheckpointError, NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.log import log
from flowstone.reading.checkpoint import open_checkpoint
from flowstone.store.local import LocalStore

_POLL_S = 0.01


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the checkpoint at `path`.

    raises  NoCheckpointError, NotAStoreError, DamagedError, UnsupportedFormatError
    """
    store = LocalStore(checkpoint_directory(path), EngineOptions())
    try:
        checkpoint = open_checkpoint(store)
        return values_of(checkpoint, checkpoint.objects)
    finally:
        store.close()


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """The directory at `path`, which has a checkpoint or a store.

    After a crash with `save_last="link"`, `path` may be a link to an uncommitted checkpoint. In that case, the newest
    committed checkpoint in the same folder is returned.
    """
    if not is_local(path):
        raise ArgumentError(f"{path!r:.200} is not the path of a directory", next="give a directory")
    place = Path(os.path.abspath(path))
    if place.is_file():
        raise NotAStoreError(
            f"{place} is a file written by Lightning itself with torch.save",
            next="pass FlowstoneIO(reads_torch_files=True) to read such files too",
        )
    if place.is_symlink() and not any(place.glob("*")):
        beside = _committed(place.resolve().parent)
        if beside:
            log.warning(
                "%s points to an unfinished save: instead, %s is read, the newest checkpoint beside it",
                place, beside[0].name,
            )
            return beside[0]
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        raise NoCheckpointError(
            f"there is no checkpoint at {place}" + (": its save was not finished" if place.exists() else ""),
            found=_others(place.parent), next="resume from an existing checkpoint, or train without ckpt_path",
        )
    return place


def _others(folder: Path) -> str:
    """The names of a folder's committed checkpoints, the newest first."""
    return ", ".join(place.name for place in _committed(folder)[:5]) or f"no checkpoint in {folder}"


def _committed(folder: Path) -> list[Path]:
    """The committed checkpoints of a folder, the newest first."""
    manifests = [manifest for manifest in folder.glob(f"*/{MANIFEST_NAME}") if not manifest.parent.name.startswith(".")]
    return [path.parent for path in sorted(manifests, key=lambda path: path.stat().st_mtime, reverse=True)]


def await_writer(path: str | os.PathLike[str], deadline_s: float) -> None:
    """Wait until no process saves to `path`; rank 0 of the job may still be saving to it.

    raises  LockedError  a process still saves to `path` after `deadline_s`. The checkpoint that is there now is not
                         loaded, because other ranks may load the one that is being saved
    """
    place = Path(os.path.realpath(path))
    end = time.monotonic() + deadline_s
    while _is_saved_to(place):
        if time.monotonic() >= end:
            raise LockedError(
                f"a save to {place} is still running after {deadline_s:g} s",
                next="wait until that save is done, or allow more time: FlowstoneIO(deadline_s=...)",
            )
        time.sleep(_POLL_S)


def _is_saved_to(place: Path) -> bool:
    names = os.listdir(place.parent) if place.parent.is_dir() else []
    drafts = [name.removeprefix(claim_file("")) for name in names]
    return any(is_draft_of(name, place.name) and is_claimed(place.parent, name) for name in drafts)
