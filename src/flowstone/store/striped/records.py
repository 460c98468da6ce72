"""What a striped store notes of its paths, and where a checkpoint's segments lie on them (docs/FORMAT.md, Paths)."""

from __future__ import annotations

import re

import msgspec

from flowstone.errors import DamagedError
from flowstone.format.checksummed import add_checksum, verify_checksum
from flowstone.store.base import Names

PART_NAME = "path.json"
"""In a further path: which one of which store it is."""
NOTE_BYTES_MAX = 64 * 1024
SEGMENTS = "segments-"
_SAVING = re.compile(r"\.saving-(\d{8,})-([^/]+)", re.ASCII)
_NOTE = re.compile(r"path-(\d{1,4})\.json", re.ASCII)
_SEGMENTS = re.compile(rf"{SEGMENTS}(\d{{8,}})-([^/]+)", re.ASCII)


class PathNote(msgspec.Struct, frozen=True):
    """A further path, noted in both: sealed JSON. `location` is where the other one was when it was noted."""

    path: int
    store: str
    location: str


def note_name(number: int) -> str:
    """In the first path: where a further one is."""
    return f"path-{number}.json"


def noted_numbers(names: tuple[str, ...]) -> list[int]:
    """The numbers of the paths that a store has noted."""
    return sorted(int(found[1]) for name in names if (found := _NOTE.fullmatch(name)) is not None)


def encode_note(note: PathNote) -> bytes:
    return add_checksum(note)


def read_note(store: Names, name: str) -> PathNote:
    """Raises DamagedError, StorageError."""
    path = f"{store.location}/{name}"
    text = verify_checksum(store.read(name, bytes_max=NOTE_BYTES_MAX), path=path)
    try:
        return msgspec.json.decode(text, type=PathNote)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not valid: {error!s:.300}", next="restore the file from a copy") from error


def segments_directory(step: int, identity: str) -> str:
    """Where a further path has the segments of a checkpoint, from its draft on."""
    return f"{SEGMENTS}{step:08d}-{identity}"


def of_draft(directory: str) -> str | None:
    """The same for a draft's directory; None for another one."""
    found = _SAVING.fullmatch(directory)
    return None if found is None else segments_directory(int(found[1]), found[2])


def step_of_segments(name: str) -> int | None:
    found = _SEGMENTS.fullmatch(name)
    return None if found is None else int(found[1])
