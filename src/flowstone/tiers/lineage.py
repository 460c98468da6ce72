"""Which steps of several tiers are of one lineage: what was set aside does not come back with a tier that was down.

Each rewind leaves a note in every tier that takes part: `.rewound-N-<id>`, "steps above N were set aside here". A tier
that lacks a note which another one has did not take part: its steps above N are from before that rewind, unless a tier
with the note has the same checkpoint. Nothing is flushed into a tier before it has all notes (docs/ORDERING.md, Tiers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import Kind, parse, step_directory
from flowstone.commit.manifests import read_manifest
from flowstone.errors import FormatError, NoCheckpointError
from flowstone.store.base import Names


class Held(msgspec.Struct, frozen=True, eq=False):
    """What a tier holds.

    steps     ascending
    notes     of rewinds: name to step
    identity  the id of the checkpoint of a step; "" if its manifest is damaged or gone
    """

    steps: tuple[int, ...]
    notes: Mapping[str, int]
    identity: Callable[[int], str]


def look(store: Names) -> Held:
    """What the store holds now; a manifest is read where its id matters. Raises StorageError."""
    names = store.names()
    notes = {
        entry.name: entry.step for entry in map(parse, names)
        if entry is not None and entry.kind is Kind.REWOUND and entry.step is not None
    }
    known: dict[int, str] = {}

    def identity(step: int) -> str:
        if step not in known:
            try:
                known[step] = read_manifest(store, step_directory(step)).id
            except (FormatError, NoCheckpointError):
                known[step] = ""
        return known[step]

    return Held(catalog.steps(store), notes, identity)


def superseded(of: Held, others: Sequence[Held]) -> tuple[int, ...]:
    """Steps of a tier that a rewind has set aside, in which it took no part. Ascending."""
    found = set[int]()
    for note in {name for other in others for name in other.notes} - of.notes.keys():
        with_note = [other for other in others if note in other.notes]
        above = with_note[0].notes[note]
        for step in of.steps:
            if step > above and not any(_has(other, step, of.identity(step)) for other in with_note):
                found.add(step)
    return tuple(sorted(found))


def missing_notes(of: Held, others: Sequence[Held]) -> tuple[str, ...]:
    return tuple(sorted({name for other in others for name in other.notes} - of.notes.keys()))


def _has(held: Held, step: int, identity: str) -> bool:
    return step in held.steps and bool(identity) and held.identity(step) == identity
