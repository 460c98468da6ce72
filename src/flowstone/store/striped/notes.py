"""What the paths of a striped store know of each other, and what is left on them (docs/ORDERING.md, Paths)."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.config import PATHS_MAX
from flowstone.errors import ArgumentError, StorageError
from flowstone.format.manifest import MARKER_NAME, decode_marker
from flowstone.log import log
from flowstone.store.base import Store, place_of
from flowstone.store.lock import LOCK_NAME
from flowstone.store.striped import records
from flowstone.store.striped.path import StripedPath

_STEP = re.compile(r"step-\d{8,}", re.ASCII)


def check_paths(paths: Sequence[Store], given: Sequence[float | None]) -> None:
    """Raise ArgumentError for a list of paths, or of their weights, that cannot be."""
    if not 1 <= len(paths) <= PATHS_MAX:
        raise ArgumentError(f"a striped store has 1 to {PATHS_MAX} paths, not {len(paths)}", next="give its paths")
    if len(given) != len(paths):
        raise ArgumentError(f"{len(given)} weights for {len(paths)} paths", next="give one for each, or None")
    wrong = [weight for weight in given if weight is not None and not 0 <= weight < float("inf")]
    if wrong or all(weight == 0 for weight in given):
        raise ArgumentError(f"weights {list(given)} give no shares", next="give numbers of 0 or more, one above 0")
    for path in paths:
        if not path.capabilities.parts:
            raise ArgumentError(
                f"{path.location} cannot be one path of several", next="give directories, or URLs of buckets"
            )
    if not paths[0].capabilities.atomic_rename:
        raise ArgumentError(
            f"the first path cannot be {paths[0].location}, which renames no directory",
            next="give a directory first: it has the checkpoints; a bucket can be any other path",
        )
    places = [place_of(path.location) for path in paths]
    twice = sorted({path.location for path, place in zip(paths, places, strict=True) if places.count(place) > 1})
    if twice:
        raise ArgumentError(f"{twice[0]} is given twice", next="give each path once")




def identity_of(first: Store) -> str | None:
    """Of the store, once it has a marker."""
    if not first.exists(MARKER_NAME):
        return None
    return decode_marker(first.read(MARKER_NAME), path=f"{first.location}/{MARKER_NAME}").store


def is_bare(names: set[str]) -> bool:
    """Whether the root of a first path has nothing of a store: a save that was refused leaves its lock's file."""
    return names <= {LOCK_NAME}


def own_note(first: Store, store: Store, identity: str | None) -> records.PathNote | None:
    """What a path says of itself; None if it says nothing, or cannot be asked now."""
    try:
        if store.exists(MARKER_NAME):
            raise ArgumentError(
                f"{store.location} is a store of its own, and no further path of {first.location}",
                next="give another directory for that path",
            )
        if not store.exists(records.PART_NAME):
            return None
        note = records.read_note(store, records.PART_NAME)
    except StorageError as error:
        log.warning("%s cannot be asked what it is: %s", store.location, error)
        return None
    known = identity or identity_of(first)  # another rank may have made the store meanwhile
    if known is None and note.location == first.location:
        raise StorageError(
            f"{first.location}, the first path of the store whose path {note.path} is {store.location}, is not there",
            errno=errno.ENODEV, missing=MARKER_NAME, next="mount it; to begin anew, give other directories",
        )
    if note.store != known:
        raise ArgumentError(
            f"{store.location} holds segments of another store", found=f"path {note.path} of {note.location}",
            next="give another directory for that path, or the first path of that store",
        )
    return note


def note(first: Store, path: StripedPath, identity: str) -> None:
    """Note a path on both sides, the other one first; durable on return. Raises StorageError."""
    known, own = first.exists(records.note_name(path.number)), path.store.exists(records.PART_NAME)
    if known and not own:
        raise StorageError(
            f"{path.store.location} was path {path.number} of {first.location}, and has no {records.PART_NAME} now",
            errno=errno.ENODEV, next="mount what was there; or give a directory of another name",
        )
    made = records.PathNote(path.number, identity, path.store.location)
    if not (known and own):
        path.store.make_directory()  # if it is there as well: who made it may have died before its sync
    if not own:
        told = msgspec.structs.replace(made, location=first.location)
        put_whole(path.store, records.PART_NAME, records.encode_note(told))
    if known and records.read_note(first, records.note_name(path.number)).location != made.location:
        first.remove(records.note_name(path.number))
        known = False
    if not known:
        put_whole(first, records.note_name(path.number), records.encode_note(made))


def check_there(first: Store, number: int, store: Store, missing: str) -> None:
    """Raise StorageError, which names the path, if a further path that was noted is not mounted. If it is mounted, a
    file that is missing from it was lost.
    """
    found, identity = "nothing there", identity_of(first)
    if store.exists(records.PART_NAME):
        note = records.read_note(store, records.PART_NAME)
        if identity in (None, note.store):
            return
        found = f"path {note.path} of {note.location}, another store"
    elif store.exists():
        found = f"a directory without {records.PART_NAME}: perhaps the mount point, with nothing mounted"
    raise StorageError(
        f"path {number} of {first.location}, {store.location}, is not there", errno=errno.ENODEV, found=found,
        missing=missing, next="mount that path, or give its new location to fs.Striped",
    )


def has(store: Store, path: str) -> bool:
    try:
        return store.exists(path)
    except StorageError:
        return False  # safe: a reader that finds it nowhere asks its own path, and is told


def sweep(
    first: Store, paths: Mapping[int, StripedPath], segments_of: Callable[[str], str | None]
) -> None:
    """Remove segments of drafts that a power loss has taken from the first path; tell of others that nothing names."""
    names = first.names()
    newest = max((int(name[5:]) for name in names if _STEP.fullmatch(name)), default=-1)
    for number, one in paths.items() if MARKER_NAME in names else ():
        try:
            for name in one.store.names() if number else ():
                step = records.step_of_segments(name)
                if step is None or name in (segments_of(near) for near in names if f"{step:08d}" in near):
                    continue
                if step > newest:
                    remove_directory(one.store, name)
                    continue
                log.warning(
                    "%s/%s belongs to no checkpoint in %s; remove it if none was moved away by hand",
                    one.store.location, name, first.location,
                )
        except StorageError as error:
            one.failed(error)


def remove_directory(store: Store, directory: str) -> None:
    """With the files in it; durably: what told of it may go next. Raises StorageError."""
    for name in store.names(directory):
        store.remove(f"{directory}/{name}")
    store.remove(directory)
    if store.capabilities.needs_sync:
        store.sync_directory()


def put_whole(store: Store, name: str, data: bytes) -> None:
    """A small file in the root of a path, whole or not at all; durable on return."""
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
