"""The names of a store's entries (docs/FORMAT.md): only this module builds and parses them."""

from __future__ import annotations

import re
import secrets
from enum import Enum

import msgspec

from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, MARKER_NAME, OBJECTS_NAME
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

SAVING, DELETING, SUPERSEDED, MEASURING = ".saving-", ".deleting-", ".superseded-", ".flowstone-tuning-"
REWOUND = ".rewound-"
IMPORT_JOURNAL = ".flowstone-import-"
_TEMPORARY = {
    IMPORT_JOURNAL: "an import that never finished",
    f".{MARKER_NAME}-": "a marker that was never put in place",
    ".flowstone-probe-": "a probe for direct I/O that never finished",
    f".{TUNING_NAME}-": "a tuning that was never put in place",
    f".{LOCK_NAME}-": "a lock that was never put in place",
}
_JOURNAL = re.compile(r"journal-(\d{8,})-([0-9a-f]{16})", re.ASCII)
_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_SEGMENT_FILE = re.compile(r"(from-[0-9a-f]{16}-)?rank-\d{5,}(\.\d{4,})?(-path\d{1,4})?\.safetensors", re.ASCII)
_JOURNAL_FILE = re.compile(r"rank-\d{5,}\.journal", re.ASCII)
_NUMBERED = re.compile(r"(\d{8,})-(.+)", re.ASCII | re.DOTALL)


class Kind(Enum):
    """What an entry is. Readers ignore all kinds except a step's directory, and journals."""

    STEP = "a checkpoint, once its manifest is there"
    JOURNAL = "what replays the steps after one"
    SAVING = "a save that never finished"
    DELETING = "a deletion that never finished"
    SUPERSEDED = "a step that was set aside"
    MEASURING = "a measurement that never finished"
    REWOUND = "a note of several tiers that newer steps were set aside"
    TEMPORARY = "a file that was never put in place"


_KINDS = {
    SAVING: Kind.SAVING, DELETING: Kind.DELETING, SUPERSEDED: Kind.SUPERSEDED, MEASURING: Kind.MEASURING,
    REWOUND: Kind.REWOUND,
}
_SWEPT = (Kind.SAVING, Kind.DELETING, Kind.MEASURING, Kind.TEMPORARY)


class Entry(msgspec.Struct, frozen=True):
    """An entry with a name in Flowstone's format.

    step      of a checkpoint, committed or not; None if the name contains none
    id        tells it apart from others of the same kind and step
    leftover  why the next writer removes it, if no writer is alive; None if it does not
    """

    name: str
    kind: Kind
    step: int | None = None
    id: str = ""
    leftover: str | None = None


def parse(name: str) -> Entry | None:
    """The entry that a name stands for; None for a name in another format."""
    found = _STEP.fullmatch(name)
    if found is not None and step_directory(int(found[1])) == name:
        return Entry(name, Kind.STEP, int(found[1]))
    found = _JOURNAL.fullmatch(name)
    if found is not None and journal_directory(int(found[1]), found[2]) == name:
        return Entry(name, Kind.JOURNAL, int(found[1]), found[2])
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            found = _NUMBERED.fullmatch(name, len(prefix))
            step, own = (None, name[len(prefix) :]) if found is None else (int(found[1]), found[2])
            return Entry(name, kind, step, own, kind.value if kind in _SWEPT else None)
    why = next((why for prefix, why in _TEMPORARY.items() if name.startswith(prefix)), None)
    return None if why is None else Entry(name, Kind.TEMPORARY, leftover=why)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None for any other name."""
    entry = parse(name)
    return entry.step if entry is not None and entry.kind is Kind.STEP else None


def is_journal(name: str) -> bool:
    entry = parse(name)
    return entry is not None and entry.kind is Kind.JOURNAL


def is_leftover(name: str) -> bool:
    """Whether a dead writer left this entry, if no writer is alive."""
    entry = parse(name)
    return entry is not None and entry.leftover is not None


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint, or of a journal, has this name."""
    if name in (MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME):
        return True
    return _SEGMENT_FILE.fullmatch(name) is not None or is_journal_file(name)


def is_journal_file(name: str) -> bool:
    return _JOURNAL_FILE.fullmatch(name) is not None


def step_directory(step: int) -> str:
    return f"step-{step:08d}"


def journal_directory(after: int, identity: str) -> str:
    """The journal of the steps after one."""
    return f"journal-{after:08d}-{identity}"


def journal_file(rank: int) -> str:
    return f"rank-{rank:05d}.journal"


def saving_directory(step: int, identity: str) -> str:
    return f"{SAVING}{step:08d}-{identity}"


def new_deleting(step: int) -> Entry:
    """The directory of a step that is being removed."""
    own = secrets.token_hex(8)
    return Entry(f"{DELETING}{step:08d}-{own}", Kind.DELETING, step, own, Kind.DELETING.value)


def new_superseded_directory(step: int) -> str:
    return f"{SUPERSEDED}{step:08d}-{secrets.token_hex(8)}"


def new_rewound_note(step: int) -> str:
    """The note that steps above `step` were set aside (docs/ORDERING.md, Tiers)."""
    return f"{REWOUND}{step:08d}-{secrets.token_hex(8)}"


def new_measuring_directory() -> str:
    return f"{MEASURING}{secrets.token_hex(8)}"


def new_temporary_file(name: str) -> str:
    """A temporary name for the marker, the tuning or the lock, before it is renamed."""
    return f".{name}-{secrets.token_hex(8)}"


def import_journal(step: int) -> str:
    """The journal of an import that is to become that step."""
    return f"{IMPORT_JOURNAL}{step:08d}"


def left_directories(removed: Entry) -> tuple[str, str]:
    """Names for a removed step's directory that still has foreign files: the first choice, and one if that is taken."""
    name = f"step-{'unknown' if removed.step is None else f'{removed.step:08d}'}.left"
    return name, f"{name}-{removed.id}"
