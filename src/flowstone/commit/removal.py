"""Removal of a checkpoint's directory: what is ours by its name goes, what somebody else has put there stays."""

from __future__ import annotations

import errno
import re

from flowstone.commit.entries import Entry, left_directories
from flowstone.commit.manifests import inside
from flowstone.errors import StorageError
from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, OBJECTS_NAME
from flowstone.store.base import Store

_SEGMENT = re.compile(r"rank-\d{5,}(\.\d{4,})?\.safetensors", re.ASCII)
# What network file systems and FUSE call a file that is removed while somebody has it open. It goes by itself.
_STILL_OPEN = (".nfs", ".fuse_hidden")


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint has this name."""
    return name in (MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME) or _SEGMENT.fullmatch(name) is not None


def empty(store: Store, directory: str) -> tuple[str, ...]:
    """Remove what is ours of a directory, the manifest first, and then the directory itself if nothing else is in it.

    The manifest first, so that a half-removed directory is no checkpoint under any name.

    returns  the names of what is not ours, which stay, and the directory with them
    raises   StorageError, the first, once all is removed that can be
    """
    names = store.names(directory)
    failure: StorageError | None = None
    for name in sorted(filter(is_ours, names), key=lambda name: name != MANIFEST_NAME):
        try:
            store.remove(inside(directory, name))
        except StorageError as error:
            if name == MANIFEST_NAME:
                raise
            failure = failure or error
    if failure is not None:
        raise failure
    left = tuple(name for name in store.names(directory) if not name.startswith(_STILL_OPEN))
    if not left:
        store.remove(directory)
    return left


def remove_all(store: Store, directory: str) -> None:
    """Remove a directory with every file in it: one that nobody else puts anything into."""
    for name in store.names(directory):
        store.remove(inside(directory, name))
    store.remove(directory)


def set_apart(store: Store, entry: Entry) -> str:
    """Give a directory with what is left in it a name that is neither a step's nor a leftover's; the name it has."""
    name, other = left_directories(entry)
    try:
        store.rename(entry.name, name)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        store.rename(entry.name, other)
        return other
    return name
