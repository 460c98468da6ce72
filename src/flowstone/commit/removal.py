"""Remove a checkpoint's directory: files with names of ours are removed, foreign files stay."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from flowstone.commit.durable import sync
from flowstone.commit.entries import Entry, Kind, is_ours, left_directories, new_deleting, step_directory
from flowstone.commit.manifests import inside
from flowstone.errors import StorageError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.base import Store

# Names that network file systems and FUSE give to a file that is removed while open. They vanish by themselves.
_STILL_OPEN = (".nfs", ".fuse_hidden")


def at_once(act: Callable[[], None]) -> None:
    """Empty a directory now, on this thread."""
    act()


def retire(store: Store, step: int) -> Entry:
    """Turn a step into no checkpoint, durably. Returns the directory to be emptied then."""
    name = step_directory(step)
    if store.capabilities.atomic_rename:
        deleting = new_deleting(step)
        store.rename(name, deleting.name)
        sync(store)
        return deleting
    store.remove(inside(name, MANIFEST_NAME))
    sync(store, name)
    return Entry(name, Kind.STEP, step, new_deleting(step).id)


def move(store: Store, source: str, target: str) -> None:
    """Rename a checkpoint's directory to a free name; atomically if the store can, else file by file, manifest first,
    without the files of other programs.
    """
    if store.capabilities.atomic_rename:
        store.rename(source, target)
        return
    store.make_directory(target)
    names = store.names(source)
    for name in _manifest_first(filter(is_ours, names)):
        store.rename(inside(source, name), inside(target, name))
    if all(map(is_ours, names)):
        store.remove(source)


def _manifest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: name != MANIFEST_NAME)


def empty(store: Store, directory: str) -> tuple[str, ...]:
    """Remove our files from a directory, the manifest first; then the directory itself, if nothing else is in it.

    The manifest first, so that a half-removed directory is no checkpoint under any name.

    returns  the names of foreign files, which stay, and the directory with them
    raises   StorageError: the first one, after everything else was removed
    """
    names = store.names(directory)
    failure: StorageError | None = None
    for name in _manifest_first(filter(is_ours, names)):
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
    """Remove a directory with every file in it. Only for directories in which no other program puts files."""
    for name in store.names(directory):
        store.remove(inside(directory, name))
    store.remove(directory)


def set_apart(store: Store, entry: Entry) -> str:
    """Rename a directory with foreign files to a name that is neither a step's nor a leftover's. Returns the new name.

    Without atomic renames it keeps its name: without a manifest it is no checkpoint, and foreign files are not copied.
    """
    if not store.capabilities.atomic_rename:
        return entry.name
    name, other = left_directories(entry)
    try:
        move(store, entry.name, name)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        move(store, entry.name, other)
        return other
    return name
