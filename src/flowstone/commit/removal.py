"""Removes a checkpoint's directory: files of Flowstone, which are known by their names, are removed; files of other
programs stay.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from flowstone.commit.entries import (
    EntryKind,
    StoreEntry,
    is_checkpoint_file,
    left_directories,
    new_deleting,
    step_directory,
)
from flowstone.commit.manifests import path_inside
from flowstone.errors import StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.base import Store, sync_names

# How network file systems and FUSE rename a file that is removed while it is open. Such files vanish by themselves.
_STILL_OPEN = (".nfs", ".fuse_hidden")


def run_now(act: Callable[[], None]) -> None:
    """Call `act`, which empties a directory, now and on this thread."""
    act()


def retire_step(store: Store, step: int) -> StoreEntry:
    """Rename a step's directory durably, so that it is no longer a checkpoint. Returns its new entry; the caller
    removes the files in it.
    """
    name = step_directory(step)
    if store.capabilities.atomic_rename:
        deleting = new_deleting(step)
        store.rename(name, deleting.name)
        sync_names(store)
        return deleting
    store.remove(path_inside(name, MANIFEST_NAME))
    sync_names(store, name)
    return StoreEntry(name, EntryKind.STEP, step, new_deleting(step).id)


def move_directory(store: Store, source: str, target: str) -> None:
    """Rename a checkpoint's directory to a free name: atomically if the store can. Otherwise its files are renamed one
    by one, the manifest first; files of other programs stay.
    """
    if store.capabilities.atomic_rename:
        store.rename(source, target)
        return
    store.make_directory(target)
    names = store.names(source)
    for name in _manifest_first(filter(is_checkpoint_file, names)):
        store.rename(path_inside(source, name), path_inside(target, name))
    if all(map(is_checkpoint_file, names)):
        store.remove(source)


def _manifest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: name != MANIFEST_NAME)


def empty_directory(store: Store, directory: str) -> tuple[str, ...]:
    """Remove Flowstone's files from a directory, the manifest first; then the directory itself, if it is empty.

    The manifest is removed first, so that a half-removed directory is not a checkpoint under any name.

    returns  the names of other programs' files, which stay; if there are any, the directory stays, too
    raises   StorageError  a file could not be removed; raised after the other files were removed
    """
    names = store.names(directory)
    failure: StorageError | None = None
    for name in _manifest_first(filter(is_checkpoint_file, names)):
        try:
            store.remove(path_inside(directory, name))
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
    """Remove a directory with every file in it. Only for directories in which no other program puts files."""
    for name in store.names(directory):
        store.remove(path_inside(directory, name))
    store.remove(directory)


def rename_foreign_directory(store: Store, entry: StoreEntry) -> str:
    """Rename a directory that has files of other programs to a name that later sweeps ignore. Returns the new name.

    In a store without atomic renames, the directory keeps its name. It has no manifest, so it is not a checkpoint.
    """
    if not store.capabilities.atomic_rename:
        return entry.name
    name, other = left_directories(entry)
    try:
        move_directory(store, entry.name, name)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        move_directory(store, entry.name, other)
        return other
    return name
