"""Pointer files, which exist in place of DeepSpeed's files. Each names the checkpoint that has the file's content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_FIRST = "This file is in a checkpoint of Flowstone. Read it with flowstone.adapters.deepspeed, or `flowstone show`.\n"
_BYTES_MAX = 1 << 16
_LATEST = "latest"


class Pointer(msgspec.Struct, frozen=True):
    """Says where a file's content is: in the checkpoint of this step, in the store two directories above. `tag`: the
    name of the checkpoint's directory in DeepSpeed.
    """

    step: int
    tag: str


def read_pointer(path: Path) -> Pointer | None:
    """Read a pointer file. None if it is a file of DeepSpeed itself. Raises DamagedError."""
    with translated(path.parent, "read", path.name), path.open("rb") as opened:
        start = opened.read(_BYTES_MAX)
    first = _FIRST.encode()
    if not start.startswith(first):
        return None
    try:
        return msgspec.json.decode(start[len(first) :], type=Pointer)
    except msgspec.DecodeError as error:
        raise DamagedError(
            f"{path} is damaged: it does not say where its checkpoint is", next="load another tag"
        ) from error


def publish(directory: Path, tag: str, step: int, names: Iterable[str], *, latest: bool) -> None:
    """Make a committed checkpoint visible to DeepSpeed: write its pointer files durably, then the file `latest`."""
    place = directory / tag
    content = _FIRST + json.dumps({"step": step, "tag": tag}) + "\n"
    with translated(directory, "write", tag):
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            _write(place / name, content)
        System().sync_directory(place)
    if latest:
        set_latest(directory, tag)
    else:
        _sync(directory)


def set_latest(directory: Path, tag: str) -> None:
    """Let the file `latest` name a tag. Durable on return."""
    with translated(directory, "write", _LATEST):
        _write(directory / _LATEST, tag)
    _sync(directory)


def has_latest(directory: Path) -> bool:
    return (directory / _LATEST).exists()


def _sync(directory: Path) -> None:
    with translated(directory, "sync", "."):
        System().sync_directory(directory)


def _write(path: Path, content: str) -> None:
    """Write a file atomically. (DeepSpeed itself overwrites `latest` in place, so a crash can leave it empty.)"""
    draft = path.with_name(f".{path.name}.flowstone-draft")
    with draft.open("w", encoding="utf-8") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(draft, path)
