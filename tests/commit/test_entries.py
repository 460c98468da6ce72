"""The names of a store's entries: each name that is made is read back, and other names are ignored."""

from __future__ import annotations

import pytest

from flowstone.commit import entries
from flowstone.commit.entries import EntryKind, parse_entry


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_name_that_is_made_is_read_back(step: int) -> None:
    deleting = entries.new_deleting(step)
    assert parse_entry(deleting.name) == deleting
    made = {
        entries.step_directory(step): EntryKind.STEP, entries.saving_directory(step, "job-7-2"): EntryKind.SAVING,
        entries.new_superseded_directory(step): EntryKind.SUPERSEDED,
    }
    for name, kind in made.items():
        entry = parse_entry(name)
        assert entry is not None
        assert (entry.kind, entry.step) == (kind, step)
    saving = parse_entry(entries.saving_directory(step, "job-7-2"))
    assert saving is not None
    assert saving.id == "job-7-2"


@pytest.mark.parametrize("name", [
    "step-9", "step-000000007", "step-00000001.left", "step-abcdefgh", " step-00000001", "saving-00000001-a",
    "flowstone.json", "tuning.json", "notes.txt", "", "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661",
])
def test_what_is_not_ours_is_nothing(name: str) -> None:
    assert parse_entry(name) is None
    assert entries.step_of(name) is None


def test_what_dead_writers_leave_is_told_from_what_stays() -> None:
    left = [
        entries.saving_directory(3, "ab"), entries.new_deleting(3).name, entries.new_measuring_directory(),
        entries.new_temporary_file("flowstone.json"), entries.new_temporary_file("tuning.json"),
        ".saving-", ".deleting-x",
    ]
    assert all(map(entries.is_leftover, left))
    stays = [entries.step_directory(3), entries.new_superseded_directory(3), "flowstone.json", "notes.txt"]
    assert not any(map(entries.is_leftover, stays))


def test_what_is_left_of_a_step_has_a_name_that_is_no_entry_of_ours() -> None:
    first, other = entries.left_directories(entries.new_deleting(3))
    assert first == "step-00000003.left"
    assert other.startswith(f"{first}-")
    assert parse_entry(first) is parse_entry(other) is None
