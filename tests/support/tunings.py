"""Tuning files like those that `flowstone bench tune` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flowstone.config import READ_DEFAULTS, WRITE_DEFAULTS, Tuning
from flowstone.store.mount import mount_of
from flowstone.store.tuning import TUNING_NAME, TuningFile, encode_tuning, user_file
from forge import with_checksum

__all__ = ["READ_DEFAULTS", "WRITE_DEFAULTS", "edit", "put_beside_marker", "put_for_mount"]


def put_beside_marker(store: Path, *, write: Tuning | None = None, read: Tuning | None = None) -> Path:
    store.mkdir(exist_ok=True)
    return _put(store / TUNING_NAME, store, write, read)


def put_for_mount(place: Path, *, write: Tuning | None = None, read: Tuning | None = None) -> Path:
    """In the user's files, for the mount that contains `place`."""
    path = user_file(mount_of(place))
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    return _put(path, place, write, read)


def _put(path: Path, place: Path, write: Tuning | None, read: Tuning | None) -> Path:
    file = TuningFile(
        created="2026-01-01T00:00:00+00:00", writer="a test", mount=mount_of(place), trial_bytes=1 << 29, write=write,
        read=read,
    )
    path.write_bytes(encode_tuning(file))
    return path


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Call `change` on the fields, and seal them again."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(with_checksum(document))
