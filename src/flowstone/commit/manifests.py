"""Manifests, one or all of a store's, read with as few calls and imports as a listing needs."""

from __future__ import annotations

import errno

import msgspec

from flowstone.commit.entries import is_ours, step_of
from flowstone.config import MANIFEST_BYTES_MAX, MARKER_BYTES_MAX
from flowstone.errors import DamagedError, FormatError, NoCheckpointError, StorageError
from flowstone.format.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    Marker,
    decode_manifest,
    decode_marker,
)
from flowstone.store.base import Names

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)


class Listed(msgspec.Struct, frozen=True):
    """A step of a store: its directory, and its manifest, or the error of reading it."""

    step: int
    directory: str
    manifest: Manifest | None
    error: FormatError | StorageError | None


def inside(directory: str, name: str) -> str:
    """The path of a checkpoint's file; the directory is "" when the store's root is the checkpoint."""
    return f"{directory}/{name}" if directory else name


def lacks_manifest(store: Names, directory: str) -> bool:
    """Whether a step's directory is damaged: it has files of a checkpoint, but no manifest. False on stores where the
    put of the manifest is the commit.

    A writer may rename the directory meanwhile; then its name may belong to another directory, or to none.
    """
    if not store.capabilities.atomic_rename or step_of(directory) is None or store.is_link(directory):
        return False
    try:
        names = store.names(directory)
        if MANIFEST_NAME in names or not any(map(is_ours, names)) or not store.exists(directory):
            return False
    except StorageError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return False  # a file of that name, say
    return not store.exists(inside(directory, MANIFEST_NAME))


def read_manifest(store: Names, directory: str) -> Manifest:
    """The manifest, checked. Raises NoCheckpointError, DamagedError or UnsupportedFormatError."""
    path = inside(directory, MANIFEST_NAME)
    shown = f"{store.location}/{path}"
    try:
        text = store.read(path, bytes_max=MANIFEST_BYTES_MAX)
    except StorageError as error:
        if error.errno not in _NOTHING_THERE and not store.is_link(directory):
            raise
        if lacks_manifest(store, directory):
            raise DamagedError(
                f"{store.location}/{directory} has no {MANIFEST_NAME}", found=", ".join(store.names(directory)[:5]),
                next="restore it from a copy, or load with fallback=True: that loads the step before, and the next "
                "save sets this one aside",
            ) from None
        raise NoCheckpointError(
            f"there is no checkpoint in {store.location}/{directory}", missing=MANIFEST_NAME,
            next="run `flowstone ls` to see what is there",
        ) from None
    manifest = decode_manifest(text, path=shown)
    named = step_of(directory or store.location.rpartition("/")[2])
    if named is not None and named != manifest.step:
        raise DamagedError(
            f"{shown} is in the wrong directory", expected=f"step {named}", found=f"step {manifest.step}",
            next="rename the directory to match its step",
        )
    return manifest


def read_marker(store: Names) -> Marker:
    data = store.read(MARKER_NAME, bytes_max=MARKER_BYTES_MAX)
    return decode_marker(data, path=f"{store.location}/{MARKER_NAME}")


def listing(store: Names) -> list[Listed]:
    """Every step, ascending: also those whose manifest is damaged, or missing. Lists the names once, and opens one file
    per step.
    """
    found = []
    for name in store.names():
        step = step_of(name)
        if step is None:
            continue
        try:
            found.append(Listed(step, name, read_manifest(store, name), None))
        except NoCheckpointError:
            continue  # a directory with a step's name, and nothing committed in it
        except (FormatError, StorageError) as error:
            found.append(Listed(step, name, None, error))
    return sorted(found, key=lambda one: one.step)
