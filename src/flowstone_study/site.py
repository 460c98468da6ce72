"""The directory in which the tuner measures, and the file with its result."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from flowstone._version import __version__
from flowstone.commit import catalog, publish
from flowstone.commit.entries import EntryKind, new_measuring_directory, new_temporary_file, parse_entry
from flowstone.commit.locations import check_store
from flowstone.commit.manifests import path_inside
from flowstone.config import Tuning
from flowstone.errors import LockedError, NotAStoreError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.mount import Mount, mount_of
from flowstone.store.tuning import TUNING_NAME, TuningFile, encode_tuning, user_file

Where = Literal["store", "user"]


@dataclass(frozen=True, slots=True)
class Site:
    """A directory, which is locked during the measurement. `scratch` is a directory in it, which is removed afterwards.
    """

    store: LocalStore
    scratch: Path
    mount: Mount
    where: Where
    holder: str

    def free_bytes(self) -> int:
        return self.store.free_bytes()

    def put(self, trial_bytes: int, *, write: Tuning | None, read: Tuning | None) -> str:
        """Store a result, which replaces an earlier one. Returns its path. `write`, `read`: the settings; None: the
        defaults are used.
        """
        file = TuningFile(
            created=datetime.now(UTC).isoformat(timespec="seconds"), writer=f"flowstone {__version__}",
            mount=self.mount, trial_bytes=trial_bytes, write=write, read=read,
        )
        if self.where == "store":
            _lock(self.store, self.holder)  # already locked if it was a store before
            publish.open_store(self.store)  # makes an empty directory a store, as a first save does
            _put(self.store, TUNING_NAME, file)
            return f"{self.store.location}/{TUNING_NAME}"
        path = user_file(self.mount)
        assert path is not None, "open_site has looked"
        folder = LocalStore(path.parent)
        folder.make_directory()
        _put(folder, path.name, file)
        return str(path)


@contextmanager
def open_site(directory: Path, where: Where | None) -> Iterator[Site]:
    """Lock `directory`, so that no job saves and no other tuner measures there, and create the scratch directory in it.

    where   where the result will be stored: "store" or "user"; None: "store" if `directory` is a store, else "user"
    raises  the errors of `tune`
    """
    store = LocalStore(directory)
    is_store = _judge(store, where)
    where = where or ("store" if is_store else "user")
    mount = mount_of(directory)
    if where == "user" and user_file(mount) is None:
        raise StorageError(
            "there is no directory for this user's files", next="set XDG_CONFIG_HOME or HOME, or tune a store (--store)"
        )
    holder = f"process {os.getpid()} on {socket.gethostname()}, measuring"
    if is_store:
        _lock(store, holder)
    try:
        for name in store.names():
            entry = parse_entry(name)
            if entry is not None and entry.kind is EntryKind.MEASURING and not store.is_link(name):
                _remove_dead(store, name, holder)
        name = new_measuring_directory()
        store.make_directory(name)
        scratch = LocalStore(store.root / name)
        try:
            _lock(scratch, holder)
            yield Site(store, scratch.root, mount, where, holder)
        finally:
            _remove(store, name)
            scratch.close()
    finally:
        store.close()


def _judge(store: LocalStore, where: Where | None) -> bool:
    """Whether the directory is a store. Raises NotAStoreError if the tuner cannot measure in it, or cannot store a
    result there.
    """
    if not store.root.is_dir():
        raise NotAStoreError(f"there is no directory {store.root}", next="check the path, or make the directory")
    if store.exists(MANIFEST_NAME):
        raise NotAStoreError(f"{store.root} is one checkpoint, not a store", next="give the directory above it")
    if where == "store":
        check_store(store)
    return store.exists(MARKER_NAME) or bool(catalog.steps(store))


def _lock(store: LocalStore, holder: str) -> None:
    try:
        store.lock(holder)
    except LockedError as error:
        raise LockedError(
            f"cannot measure in {store.root}: another process saves or measures there", holder=error.facts["holder"],
            next="wait until it ends: two measurements at a time share the device's rate",
        ) from error


def _remove_dead(store: LocalStore, name: str, holder: str) -> None:
    """Remove what a killed tuner has left. Raises LockedError if another tuner is running."""
    left = LocalStore(store.root / name)
    try:
        _lock(left, holder)
        _remove(store, name)
    finally:
        left.close()


def _remove(store: LocalStore, directory: str) -> None:
    for name in store.names(directory):
        store.remove(path_inside(directory, name))
    store.remove(directory)


def _put(store: Store, name: str, file: TuningFile) -> None:
    """Replace an older file. A crash in between may leave no file, so that the tuning is lost."""
    draft = new_temporary_file(TUNING_NAME)
    store.put(draft, encode_tuning(file))
    if store.exists(name):
        store.remove(name)
    store.rename(draft, name)
    store.sync_directory()
