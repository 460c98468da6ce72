"""Lineage of steps across tiers: if a tier was down during a rewind, its old steps do not count when it is back.

Each rewind writes a note into every tier that is up: a file `.rewound-N-<id>`, which means "steps above N were set
aside here". A tier without the note was down: its steps above N are from before the rewind, unless a tier with the note
has the same checkpoint. Nothing is flushed into a tier before it has all notes (docs/ORDERING.md, Tiers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import EntryKind, parse_entry, step_directory
from flowstone.commit.manifests import read_manifest
from flowstone.errors import FormatError, NoCheckpointError
from flowstone.store.base import Names


class TierContents(msgspec.Struct, frozen=True, eq=False):
    """The contents of a tier.

    steps     the steps of its checkpoints, ascending
    notes     notes of rewinds: name -> step
    identity  returns the id of a step's checkpoint; "" if its manifest is damaged or gone
    """

    steps: tuple[int, ...]
    notes: Mapping[str, int]
    identity: Callable[[int], str]


def read_contents(store: Names) -> TierContents:
    """The store's current contents. Manifests are read only when `identity` is called. Raises StorageError."""
    names = store.names()
    notes = {
        entry.name: entry.step for entry in map(parse_entry, names)
        if entry is not None and entry.kind is EntryKind.REWOUND and entry.step is not None
    }
    ids: dict[int, str] = {}

    def identity(step: int) -> str:
        if step not in ids:
            try:
                ids[step] = read_manifest(store, step_directory(step)).id
            except (FormatError, NoCheckpointError):
                ids[step] = ""
        return ids[step]

    return TierContents(catalog.steps(store), notes, identity)


def superseded(tier: TierContents, others: Sequence[TierContents]) -> tuple[int, ...]:
    """The steps of `tier` that are from before a rewind during which the tier was down, ascending."""
    steps = set[int]()
    for note in {name for other in others for name in other.notes} - tier.notes.keys():
        with_note = [other for other in others if note in other.notes]
        above = with_note[0].notes[note]
        for step in tier.steps:
            if step > above and not any(_has(other, step, tier.identity(step)) for other in with_note):
                steps.add(step)
    return tuple(sorted(steps))


def missing_notes(tier: TierContents, others: Sequence[TierContents]) -> tuple[str, ...]:
    return tuple(sorted({name for other in others for name in other.notes} - tier.notes.keys()))


def _has(tier: TierContents, step: int, identity: str) -> bool:
    return step in tier.steps and bool(identity) and tier.identity(step) == identity
