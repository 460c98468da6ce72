"""Which steps of a tier that was unavailable at a rewind are older than the rewind."""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.commit.entries import EntryKind, is_leftover, new_rewound_note, parse_entry
from flowstone.tiered.lineage import TierContents, missing_notes, superseded


def _held(steps: Mapping[int, str], **notes: int) -> TierContents:
    return TierContents(tuple(sorted(steps)), notes, lambda step: steps[step])


OLD = {step: f"old-{step}" for step in (10, 20, 30, 40)}


def test_a_tier_without_the_note_has_steps_of_before() -> None:
    near = _held({21: "new-21", 30: "new-30"}, one=20)
    assert superseded(_held(OLD), [near]) == (30, 40)
    assert missing_notes(_held(OLD), [near]) == ("one",)


def test_a_tier_with_the_note_has_none() -> None:
    near = _held({21: "new-21"}, one=20)
    assert superseded(_held(OLD, one=20), [near]) == ()


def test_a_copy_that_lost_its_notes_keeps_what_others_have_as_well() -> None:
    near = _held({10: "old-10", 30: "new-30"}, one=20)
    assert superseded(_held({10: "old-10", 30: "new-30", 40: "old-40"}), [near]) == (40,)


def test_the_lowest_of_several_notes_decides() -> None:
    near, middle = _held({}, one=20, two=10), _held({}, two=10)
    assert superseded(_held(OLD), [near, middle]) == (20, 30, 40)
    assert superseded(_held(OLD, one=20), [near, middle]) == (20, 30, 40)


def test_a_damaged_manifest_vouches_for_nothing() -> None:
    assert superseded(_held({30: ""}), [_held({30: ""}, one=20)]) == (30,)


def test_nothing_is_superseded_without_notes() -> None:
    assert superseded(_held(OLD), [_held({21: "new-21"})]) == ()


def test_a_note_is_no_leftover() -> None:
    note = new_rewound_note(20)
    entry = parse_entry(note)
    assert entry is not None
    assert (entry.kind, entry.step) == (EntryKind.REWOUND, 20)
    assert not is_leftover(note)
