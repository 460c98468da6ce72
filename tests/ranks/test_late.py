"""A first save for which one rank is late: the next step of the others does not wait for it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from late_acts import DEADLINE_S
from processes import Ranks, run

import flowstone as fs
from flowstone import _native

watched = pytest.mark.skipif(bool(_native.written_pages_refusal()), reason=_native.written_pages_refusal() or "-")


@pytest.mark.parametrize("saves", [1, 2])
def test_a_step_after_a_first_save_does_not_wait_for_a_rank_that_is_late(tmp_path: Path, saves: int) -> None:
    results = run(2, "late_acts", "rank_1_is_late", str(tmp_path / "run"), saves)
    for row in results:
        assert isinstance(row, dict)
        assert row["equal"] == [True] * saves, "what is committed is what was saved, and not what the step made of it"
        assert row["known"] == [True] * saves
    first = results[0]
    assert isinstance(first, dict)
    assert len(first["fenced"]) == saves, "what a step waited for is told"
    assert max(first["fenced"]) < DEADLINE_S / 2, "who waits for the other one waits until the deadline"
    assert max(first["blocked"]) < DEADLINE_S / 2, "what `save` took, and not what its plan did"


def test_a_step_waits_for_ranks_that_are_late_where_no_copy_fits_the_budget_and_the_log_says_so(tmp_path: Path) -> None:
    first, second = run(2, "late_acts", "no_room", str(tmp_path / "run"))
    assert second == [True, True]
    assert isinstance(first, list)
    equal, captured, (message, was_unchanged) = first
    assert (equal, captured, was_unchanged) == (True, True, True)
    assert "step 1: the next training step waits until other ranks reach this save: copies of" in message
    assert "raise budget_bytes" in message


def test_save_itself_waits_where_what_must_not_wait_does_not_fit_the_budget(tmp_path: Path) -> None:
    first, second = run(2, "late_acts", "no_room_for_what_must_not_wait", str(tmp_path / "run"))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[:4] == second[:4] == [True] * 4
    assert len(first) == 5, "it is told once"
    assert "step 1: save waits until all ranks have called it: copies of 12582952 bytes do not fit" in first[4]
    assert "raise budget_bytes" in first[4]


def test_small_tensors_have_room_for_copies_however_large_the_arena_has_become(tmp_path: Path) -> None:
    for result in run(2, "late_acts", "no_room_but_for_small_ones", str(tmp_path / "run")):
        assert result == [True, 0, 60 << 20]


@pytest.mark.parametrize("when", ["before", "plan", "capture"])
def test_a_save_that_waits_returns_with_a_named_error_where_another_rank_has_died(tmp_path: Path, when: str) -> None:
    first, second = Ranks(2, "late_acts", "dies_while_another_waits", str(tmp_path / "run"), when).end()
    assert second.code == -signal.SIGKILL
    assert first.code == 0, first.said
    assert isinstance(first.result, list)
    assert re.match(r"RankError: nothing heard from rank 1 for \d+ s", first.result[0])
    assert first.result[1] == 1
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("deadline_s", [6.0, 600.0])
def test_a_save_that_waits_for_a_rank_that_waits_for_it_ends_by_its_deadline_or_sooner(
    tmp_path: Path, deadline_s: float
) -> None:
    first, second = run(2, "late_acts", "is_elsewhere_while_another_waits", str(tmp_path / "run"), deadline_s)
    assert str(first).startswith("RankError: rank 1 did not reach 'the plan of step 1' in "), first
    assert "is alive, but has not made this call" in str(first)
    assert str(second).startswith("RankError: rank 1 "), second
    assert fs.open(tmp_path / "run").step == 2


@pytest.mark.parametrize("when", ["before", "after", "twice"])
def test_ctrl_c_while_save_waits_gives_that_save_up_on_all_ranks(tmp_path: Path, when: str) -> None:
    first, second = run(2, "late_acts", "is_interrupted_while_it_waits", str(tmp_path / "run"), when)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[0].startswith("KeyboardInterrupt")
    assert second[0].startswith("RankError: rank 0 failed: save() was interrupted"), second
    assert first[1]
    assert second[1]
    fs.open(tmp_path / "run").verify()


def test_a_save_that_waits_for_room_hurries_the_captures_before_it(tmp_path: Path) -> None:
    for result in run(2, "late_acts", "a_lazy_save_comes_first", str(tmp_path / "run")):
        assert result == [True, 2, 3]


def test_saves_of_several_layouts_wait_one_after_the_other(tmp_path: Path) -> None:
    for right, waits in run(2, "late_acts", "layouts_that_wait", str(tmp_path / "run")):  # type: ignore[misc]
        assert right == [True] * 16
        assert waits == 3


@pytest.mark.parametrize(
    ("how", "words"),
    [("by numpy", "model.body.0.weight changed before it was captured"),
     ("in place", "model.body.0.weight changed before it was captured"),
     ("freed", "the memory of model.body.0.weight was freed before it was captured"),
     *[
         pytest.param(f"one row {how}", f"{name} changed before it was captured", marks=watched) for how, name in (
             ("through data", "model.body.0.weight"), ("by numpy", "model.body.0.weight"),
             ("of a moment", "optimizer.state.model.body.0.weight.exp_avg"),
         )
     ]],
)
@pytest.mark.parametrize("steps", [True, False])
def test_what_changes_before_the_ranks_have_agreed_fails_that_save_by_name(
    tmp_path: Path, how: str, words: str, steps: bool
) -> None:
    own, other = run(2, "late_acts", "changed_before_the_plan", str(tmp_path / "run"), how, steps)
    assert str(own).startswith(f"StateChangedError: {words}"), own
    assert str(other).startswith(f"RankError: rank 0 failed: {words}"), other
