"""Reads one manifest, or all manifests of a store. Uses few calls and imports, so that listings are fast."""

from __future__ import annotations

import errno

import msgspec

from flowstone.commit.entries import is_checkpoint_file, step_of
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


class ListedStep(msgspec.Struct, frozen=True):
    """A step of a store: its directory, and its manifest or the error from reading it."""

    step: int
    directory: str
    manifest: Manifest | None
    error: FormatError | StorageError | None


def path_inside(directory: str, name: str) -> str:
    """The path of a checkpoint's file in the store. `directory` is "" if the store's root is itself the checkpoint."""
    return f"{directory}/{name}" if directory else name


def lacks_manifest(store: Names, directory: str) -> bool:
    """Whether a step's directory is damaged: it has files of a checkpoint, but no manifest. Always False on stores
    without atomic renames, where such a directory may be a checkpoint that is still being written.

    A writer may rename the directory during this call. Then the name may belong to no directory, or to a new one.
    """
    if not store.capabilities.atomic_rename or step_of(directory) is None or store.is_link(directory):
        return False
    try:
        names = store.names(directory)
        if MANIFEST_NAME in names or not any(map(is_checkpoint_file, names)) or not store.exists(directory):
            return False
    except StorageError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return False  # for example, there is a file of that name
    return not store.exists(path_inside(directory, MANIFEST_NAME))


def read_manifest(store: Names, directory: str) -> Manifest:
    """Read and check the manifest. Raises NoCheckpointError, DamagedError or UnsupportedFormatError."""
    path = path_inside(directory, MANIFEST_NAME)
    shown = f"{store.location}/{path}"
    try:
        text = store.read(path, bytes_max=MANIFEST_BYTES_MAX)
    except StorageError as error:
        if error.errno not in _NOTHING_THERE and not store.is_link(directory):
            raise
        if lacks_manifest(store, directory):
            raise DamagedError(
                f"{store.location}/{directory} has no {MANIFEST_NAME}", found=", ".join(store.names(directory)[:5]),
                next="restore this file from a copy, or load with fallback=True, which loads the step before this "
                "one; the next save sets the damaged step aside",
            ) from None
        raise NoCheckpointError(
            f"there is no checkpoint in {store.location}/{directory}", missing=MANIFEST_NAME,
            next="run `flowstone ls` to list the checkpoints",
        ) from None
    manifest = decode_manifest(text, path=shown)
    named = step_of(directory or store.location.rpartition("/")[2])
    if named is not None and named != manifest.step:
        raise DamagedError(
            f"{shown} is in the wrong directory", expected=f"step {named}", found=f"step {manifest.step}",
            next="rename the directory to match the step in its manifest",
        )
    return manifest


def read_marker(store: Names) -> Marker:
    data = store.read(MARKER_NAME, bytes_max=MARKER_BYTES_MAX)
    return decode_marker(data, path=f"{store.location}/{MARKER_NAME}")


def list_steps(store: Names) -> list[ListedStep]:
    """Every step of the store, ascending, even if its manifest is damaged or missing. Lists names once, and opens one
    file for each step.
    """
    entries = []
    for name in store.names():
        step = step_of(name)
        if step is None:
            continue
        try:
            entries.append(ListedStep(step, name, read_manifest(store, name), None))
        except NoCheckpointError:
            continue  # a directory with a step's name, in which nothing was committed
        except (FormatError, StorageError) as error:
            entries.append(ListedStep(step, name, None, error))
    return sorted(entries, key=lambda entry: entry.step)
