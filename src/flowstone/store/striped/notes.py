"""Notes, small files by which the paths of a striped store identify each other; and the removal of leftovers
(docs/ORDERING.md, Paths).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.config import PATHS_MAX
from flowstone.errors import ArgumentError, StorageError
from flowstone.format.manifest import MARKER_NAME, decode_marker
from flowstone.log import log
from flowstone.store.base import Store, canonical_location
from flowstone.store.lock import LOCK_NAME
from flowstone.store.striped import records
from flowstone.store.striped.path import StripedPath

_STEP = re.compile(r"step-\d{8,}", re.ASCII)


def check_paths(paths: Sequence[Store], given: Sequence[float | None]) -> None:
    """Raise ArgumentError for an invalid list of paths or weights."""
    if not 1 <= len(paths) <= PATHS_MAX:
        raise ArgumentError(
            f"a striped store has 1 to {PATHS_MAX} paths, got {len(paths)}",
            next="give a list of directories and buckets",
        )
    if len(given) != len(paths):
        raise ArgumentError(
            f"got {len(given)} weights for {len(paths)} paths",
            next="give a list with one entry for each path: a weight, or None to use the path's measured rate",
        )
    invalid = [weight for weight in given if weight is not None and not 0 <= weight < float("inf")]
    if invalid or all(weight == 0 for weight in given):
        raise ArgumentError(
            f"weights must be finite, at least 0, and not all 0, got {list(given)}",
            next="give each path a weight of at least 0, and at least one path a weight above 0",
        )
    for path in paths:
        if not path.capabilities.parts:
            raise ArgumentError(
                f"{path.location} cannot be a path of a striped store: it is neither a directory nor a bucket",
                next="give directories, or URLs of buckets",
            )
    if not paths[0].capabilities.atomic_rename:
        raise ArgumentError(
            f"the first path, {paths[0].location}, cannot rename directories, but a commit must rename one",
            next="put a directory of a file system first in the list; the other paths can be buckets",
        )
    locations = [canonical_location(path.location) for path in paths]
    twice = sorted({path.location for path, place in zip(paths, locations, strict=True) if locations.count(place) > 1})
    if twice:
        raise ArgumentError(f"the path {twice[0]} was given twice", next="give each path once")


def identity_of(first: Store) -> str | None:
    """The identity of the store, from its marker; None if it has no marker yet."""
    if not first.exists(MARKER_NAME):
        return None
    return decode_marker(first.read(MARKER_NAME), path=f"{first.location}/{MARKER_NAME}").store


def is_bare(names: set[str]) -> bool:
    """Whether the root of a first path is empty, or has only the lock file that a failed save leaves."""
    return names <= {LOCK_NAME}


def read_own_note(first: Store, store: Store, identity: str | None) -> records.PathNote | None:
    """The note in the path `store` about that path itself. None if there is none, or it cannot be read now."""
    try:
        if store.exists(MARKER_NAME):
            raise ArgumentError(
                f"{store.location} is a store of its own, so it cannot be an additional path of {first.location}",
                next=f"replace {store.location} in the list of paths by an empty directory",
            )
        if not store.exists(records.PART_NAME):
            return None
        note = records.read_note(store, records.PART_NAME)
    except StorageError as error:
        log.warning("cannot read which path of a striped store %s is: %s", store.location, error)
        return None
    expected = identity or identity_of(first)  # another rank may have created the store meanwhile
    if expected is None and note.location == first.location:
        raise StorageError(
            f"{first.location}, the first path, contains no store, but {store.location} is marked as path {note.path} "
            "of a striped store with this first path",
            errno=errno.ENODEV, missing=MARKER_NAME,
            next="mount the first path; or, to start a new store, give other directories",
        )
    if note.store != expected:
        raise ArgumentError(
            f"{store.location} already belongs to another striped store",
            found=f"path {note.path} of {note.location}",
            next="give another directory instead of this path; or, to use that store, put its first path first in "
            "the list",
        )
    return note


def write_notes(first: Store, path: StripedPath, identity: str) -> None:
    """Write the notes about a path that is not the first: into that path, then into the first path. Durable on return.
    Raises StorageError.
    """
    is_noted, has_own_note = first.exists(records.note_name(path.number)), path.store.exists(records.PART_NAME)
    if is_noted and not has_own_note:
        raise StorageError(
            f"{path.store.location} was path {path.number} of {first.location}, but has no {records.PART_NAME} now",
            errno=errno.ENODEV,
            next="mount the file system that was at this path; or give a directory with another name",
        )
    own_record = records.PathNote(path.number, identity, path.store.location)
    if not (is_noted and has_own_note):
        path.store.make_directory()  # also syncs an existing directory, since its creator may have died before the sync
    if not has_own_note:
        far_record = msgspec.structs.replace(own_record, location=first.location)
        put_atomically(path.store, records.PART_NAME, records.encode_note(far_record))
    if is_noted and records.read_note(first, records.note_name(path.number)).location != own_record.location:
        first.remove(records.note_name(path.number))
        is_noted = False
    if not is_noted:
        put_atomically(first, records.note_name(path.number), records.encode_note(own_record))


def check_mounted(first: Store, number: int, store: Store, missing: str) -> None:
    """Raise StorageError, which names the path, if path number `number` is not mounted. If it is mounted, the file
    `missing` was lost, and this function only returns.
    """
    state, identity = "nothing", identity_of(first)
    if store.exists(records.PART_NAME):
        note = records.read_note(store, records.PART_NAME)
        if identity in (None, note.store):
            return
        state = f"path {note.path} of {note.location}, another store"
    elif store.exists():
        state = f"a directory without {records.PART_NAME}: perhaps a mount point with nothing mounted"
    raise StorageError(
        f"{store.location}, path {number} of the striped store {first.location}, is missing",
        errno=errno.ENODEV, found=state, missing=missing,
        next="mount that path, or give its new location to fs.Striped",
    )


def has_file(store: Store, path: str) -> bool:
    try:
        return store.exists(path)
    except StorageError:
        # if a reader finds the file on no path, it tries the path in the file's name, and gets that path's error
        return False


def sweep(
    first: Store, paths: Mapping[int, StripedPath], segments_of: Callable[[str], str | None]
) -> None:
    """Remove the segments of unfinished checkpoints whose directory the first path has lost in a power loss. Log other
    segments that belong to no checkpoint.
    """
    names = first.names()
    newest = max((int(name[5:]) for name in names if _STEP.fullmatch(name)), default=-1)
    for number, path in paths.items() if MARKER_NAME in names else ():
        try:
            for name in path.store.names() if number else ():
                step = records.step_of_segments(name)
                if step is None or name in (segments_of(near) for near in names if f"{step:08d}" in near):
                    continue
                if step > newest:
                    remove_directory(path.store, name)
                    continue
                log.warning(
                    "%s/%s belongs to no checkpoint in %s; remove it, unless you have moved its checkpoint elsewhere",
                    path.store.location, name, first.location,
                )
        except StorageError as error:
            path.mark_failed(error)


def remove_directory(store: Store, directory: str) -> None:
    """Remove a directory of segments durably, so that the manifest may be removed next. Raises StorageError."""
    for name in store.names(directory):
        store.remove(f"{directory}/{name}")
    store.remove(directory)
    if store.capabilities.needs_sync:
        store.sync_directory()


def put_atomically(store: Store, name: str, data: bytes) -> None:
    """Write a small file at the root of a path. The file appears atomically, and is durable on return."""
    if store.capabilities.conditional_put:
        store.put(name, data)
    else:
        draft = f".{name}-new"
        if store.exists(draft):
            store.remove(draft)
        store.put(draft, data)
        store.rename(draft, name)
    if store.capabilities.needs_sync:
        store.sync_directory()
