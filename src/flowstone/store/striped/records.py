"""The notes of a striped store about its paths, and the names of the directories of segments (docs/FORMAT.md, Paths).
"""

from __future__ import annotations

import re

import msgspec

from flowstone.errors import DamagedError
from flowstone.format.checksummed import add_checksum, verify_checksum
from flowstone.store.base import Names

PART_NAME = "path.json"
"""Name of the note in a further path that identifies the path and its store."""
NOTE_BYTES_MAX = 64 * 1024
SEGMENTS = "segments-"
_SAVING = re.compile(r"\.saving-(\d{8,})-([^/]+)", re.ASCII)
_NOTE = re.compile(r"path-(\d{1,4})\.json", re.ASCII)
_SEGMENTS = re.compile(rf"{SEGMENTS}(\d{{8,}})-([^/]+)", re.ASCII)


class PathNote(msgspec.Struct, frozen=True):
    """A note about a path that is not the first: JSON with a checksum. One copy is in that path, and one in the first
    path. `location`: where the other of these two paths is.
    """

    path: int
    store: str
    location: str


def note_name(number: int) -> str:
    """The name of the note, in the first path, about path `number`."""
    return f"path-{number}.json"


def noted_numbers(names: tuple[str, ...]) -> list[int]:
    """The numbers of the paths about which there are notes among `names`."""
    return sorted(int(match[1]) for name in names if (match := _NOTE.fullmatch(name)) is not None)


def encode_note(note: PathNote) -> bytes:
    return add_checksum(note)


def read_note(store: Names, name: str) -> PathNote:
    """Read a note. Raises DamagedError, StorageError."""
    path = f"{store.location}/{name}"
    text = verify_checksum(store.read(name, bytes_max=NOTE_BYTES_MAX), path=path)
    try:
        return msgspec.json.decode(text, type=PathNote)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not valid: {error!s:.300}", next="restore the file from a copy") from error


def segments_directory(step: int, identity: str) -> str:
    """The name of the directory, on all paths but the first, for the segments of a checkpoint, finished or not."""
    return f"{SEGMENTS}{step:08d}-{identity}"


def segments_of_draft(directory: str) -> str | None:
    """The name of the directory of segments for the unfinished checkpoint in `directory`. None if `directory` is not
    that of an unfinished checkpoint.
    """
    match = _SAVING.fullmatch(directory)
    return None if match is None else segments_directory(int(match[1]), match[2])


def step_of_segments(name: str) -> int | None:
    match = _SEGMENTS.fullmatch(name)
    return None if match is None else int(match[1])
