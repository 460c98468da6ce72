"""The names of the entries (files and directories) of a store, see docs/FORMAT.md. Only this module builds and parses
these names.
"""

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
    f".{TUNING_NAME}-": "a tuning file that was never put in place",
    f".{LOCK_NAME}-": "a lock that was never put in place",
}
_JOURNAL = re.compile(r"journal-(\d{8,})-([0-9a-f]{16})", re.ASCII)
_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_SEGMENT_FILE = re.compile(r"(from-[0-9a-f]{16}-)?rank-\d{5,}(\.\d{4,})?(-path\d{1,4})?\.safetensors", re.ASCII)
_JOURNAL_FILE = re.compile(r"rank-\d{5,}\.journal", re.ASCII)
_NUMBERED = re.compile(r"(\d{8,})-(.+)", re.ASCII | re.DOTALL)


class EntryKind(Enum):
    """What an entry (a file or directory) of a store is. Readers ignore all kinds except the directories of steps and
    journals.
    """

    STEP = "a checkpoint, once its manifest is there"
    JOURNAL = "a journal of the steps after a checkpoint"
    SAVING = "a save that never finished"
    DELETING = "a deletion that never finished"
    SUPERSEDED = "a step that was set aside"
    MEASURING = "a measurement that never finished"
    REWOUND = "a note of a tiered store: newer steps were set aside"
    TEMPORARY = "a file that was never put in place"


_KINDS = {
    SAVING: EntryKind.SAVING, DELETING: EntryKind.DELETING, SUPERSEDED: EntryKind.SUPERSEDED,
    MEASURING: EntryKind.MEASURING,
    REWOUND: EntryKind.REWOUND,
}
_SWEPT = (EntryKind.SAVING, EntryKind.DELETING, EntryKind.MEASURING, EntryKind.TEMPORARY)


class StoreEntry(msgspec.Struct, frozen=True):
    """An entry with a name in Flowstone's format.

    step      of a checkpoint, committed or not; None if the name contains no step
    id        distinguishes entries of the same kind and step
    leftover  why the entry is removed if its writer is dead; None: the entry is never removed
    """

    name: str
    kind: EntryKind
    step: int | None = None
    id: str = ""
    leftover: str | None = None


def parse_entry(name: str) -> StoreEntry | None:
    """The entry with this name; None if the name has another format."""
    match = _STEP.fullmatch(name)
    if match is not None and step_directory(int(match[1])) == name:
        return StoreEntry(name, EntryKind.STEP, int(match[1]))
    match = _JOURNAL.fullmatch(name)
    if match is not None and journal_directory(int(match[1]), match[2]) == name:
        return StoreEntry(name, EntryKind.JOURNAL, int(match[1]), match[2])
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            match = _NUMBERED.fullmatch(name, len(prefix))
            step, own = (None, name[len(prefix) :]) if match is None else (int(match[1]), match[2])
            return StoreEntry(name, kind, step, own, kind.value if kind in _SWEPT else None)
    why = next((why for prefix, why in _TEMPORARY.items() if name.startswith(prefix)), None)
    return None if why is None else StoreEntry(name, EntryKind.TEMPORARY, leftover=why)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None if the name is not of such a directory."""
    entry = parse_entry(name)
    return entry.step if entry is not None and entry.kind is EntryKind.STEP else None


def is_journal(name: str) -> bool:
    entry = parse_entry(name)
    return entry is not None and entry.kind is EntryKind.JOURNAL


def is_leftover(name: str) -> bool:
    """Whether this name is of an entry that only a running writer has. If no writer runs, a dead one left it."""
    entry = parse_entry(name)
    return entry is not None and entry.leftover is not None


def is_checkpoint_file(name: str) -> bool:
    """Whether a file with this name belongs to a checkpoint or a journal."""
    if name in (MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME):
        return True
    return _SEGMENT_FILE.fullmatch(name) is not None or is_journal_file(name)


def is_journal_file(name: str) -> bool:
    return _JOURNAL_FILE.fullmatch(name) is not None


def step_directory(step: int) -> str:
    return f"step-{step:08d}"


def journal_directory(after: int, identity: str) -> str:
    """The name of the directory of the journal that begins after step `after`."""
    return f"journal-{after:08d}-{identity}"


def journal_file(rank: int) -> str:
    return f"rank-{rank:05d}.journal"


def saving_directory(step: int, identity: str) -> str:
    return f"{SAVING}{step:08d}-{identity}"


def new_deleting(step: int) -> StoreEntry:
    """A new name for the directory of a step while it is being removed."""
    own = secrets.token_hex(8)
    return StoreEntry(f"{DELETING}{step:08d}-{own}", EntryKind.DELETING, step, own, EntryKind.DELETING.value)


def new_superseded_directory(step: int) -> str:
    return f"{SUPERSEDED}{step:08d}-{secrets.token_hex(8)}"


def new_rewound_note(step: int) -> str:
    """A new name for the note that steps above `step` were set aside (docs/ORDERING.md, Tiers)."""
    return f"{REWOUND}{step:08d}-{secrets.token_hex(8)}"


def new_measuring_directory() -> str:
    return f"{MEASURING}{secrets.token_hex(8)}"


def new_temporary_file(name: str) -> str:
    """A new temporary name for the store's marker, tuning or lock file, until it is renamed to `name`."""
    return f".{name}-{secrets.token_hex(8)}"


def import_journal(step: int) -> str:
    """The name of the file in which an import records its progress. `step`: the step that it will save."""
    return f"{IMPORT_JOURNAL}{step:08d}"


def left_directories(removed: StoreEntry) -> tuple[str, str]:
    """Two names for the directory of a removed step that still has files of other programs: the first choice, and an
    alternative.
    """
    name = f"step-{'unknown' if removed.step is None else f'{removed.step:08d}'}.left"
    return name, f"{name}-{removed.id}"
