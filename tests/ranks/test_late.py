"""A first save that one rank comes to late: the others' next step does not wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from late_acts import DEADLINE_S
from processes import run


@pytest.mark.parametrize("saves", [1, 2])
def test_a_step_after_a_first_save_does_not_wait_for_a_rank_that_is_late(tmp_path: Path, saves: int) -> None:
    told = run(2, "late_acts", "rank_1_is_late", str(tmp_path / "run"), saves)
    for one in told:
        assert isinstance(one, dict)
        assert one["equal"] == [True] * saves, "what is committed is what was saved, and not what the step made of it"
        assert one["known"] == [True] * saves
    first = told[0]
    assert isinstance(first, dict)
    assert len(first["fenced"]) == saves, "what a step waited for is told"
    assert max(first["fenced"]) < DEADLINE_S / 2, "who waits for the other one waits until the deadline"
    assert max(first["blocked"]) < DEADLINE_S / 2, "what `save` took, and not what its plan did"


def test_a_step_waits_for_ranks_that_are_late_where_no_copy_fits_the_budget_and_the_log_says_so(tmp_path: Path) -> None:
    first, second = run(2, "late_acts", "no_room", str(tmp_path / "run"))
    assert second == [True, True]
    assert isinstance(first, list)
    equal, captured, (said, was_unchanged) = first
    assert (equal, captured, was_unchanged) == (True, True, True)
    assert "step 1: the next step waits until other ranks have reached this save: copies of" in said
    assert "raise budget_bytes" in said


@pytest.mark.parametrize(
    ("how", "words"),
    [("by numpy", "model.body.0.weight changed before it was captured"),
     ("in place", "model.body.0.weight changed before it was captured"),
     ("no step", "model.body.0.weight changed before it was captured"),
     ("freed", "the memory of model.body.0.weight went away before it was captured")],
)
def test_what_changes_before_the_ranks_have_agreed_fails_that_save_by_name(
    tmp_path: Path, how: str, words: str
) -> None:
    own, other = run(2, "late_acts", "changed_before_the_plan", str(tmp_path / "run"), how)
    assert str(own).startswith(f"StateChangedError: {words}"), own
    assert str(other).startswith(f"RankError: rank 0 failed: {words}"), other
