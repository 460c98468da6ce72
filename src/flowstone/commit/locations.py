"""What a path is before anything of it is believed: a store, a checkpoint, or something else."""

from __future__ import annotations

import errno
import os

from flowstone.commit import catalog
from flowstone.commit.entries import is_leftover
from flowstone.commit.manifests import read_marker
from flowstone.errors import NotAStoreError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Names
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

_LOOKED_AT_MAX = 200  # entries of a directory that is no store
_OURS = (LOCK_NAME, TUNING_NAME)  # that say nothing yet of a store


def check_store(store: Names) -> None:
    """Raise NotAStoreError where something is, but nothing of ours.

    What passes: a store; checkpoints without a marker; an absent or empty directory; one in which
    a first save was cut short.
    """
    if store.exists(MARKER_NAME):
        read_marker(store)
        return
    check_no_checkpoint(store)
    try:
        foreign = [name for name in store.names() if name not in _OURS and not is_leftover(name)]
        checkpoints = catalog.steps(store)
    except StorageError as error:
        if error.errno != errno.ENOTDIR:
            raise
        foreign, checkpoints = ["a file"], ()
    if foreign and not checkpoints:
        below = "" if foreign == ["a file"] else stores_below(store)
        raise NotAStoreError(
            f"{store.location} is neither a store nor a checkpoint", missing=f"{MARKER_NAME}, step-*, {MANIFEST_NAME}",
            found=", ".join(foreign[:5]), next=f"give one of the stores in it: {below}" if below else "check the path",
        )


def check_no_checkpoint(store: Names) -> None:
    """Raise NotAStoreError where a Checkpointer was given a checkpoint: it would make a store inside of it."""
    if store.exists(MANIFEST_NAME) and not store.exists(MARKER_NAME):
        raise NotAStoreError(
            f"{store.location} is a checkpoint, not a store of checkpoints", found=MANIFEST_NAME,
            next=f"give the directory above it: {os.path.dirname(store.location)}",
        )


def stores_below(store: Names) -> str:
    """The first few directories in a store's place that are stores themselves, for a message; "" if none is."""
    names = [name for name in store.names()[:_LOOKED_AT_MAX] if store.exists(f"{name}/{MARKER_NAME}")]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
