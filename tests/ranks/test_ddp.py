"""DistributedDataParallel: replicas whose buffers each rank updates by its own batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run

import flowstone as fs


def test_buffers_of_replicated_modules_come_from_rank_0_all_of_them_at_every_save(tmp_path: Path) -> None:
    reported: list[Any] = run(2, "ddp_acts", "save_statistics", str(tmp_path / "run"), 3)
    mine, theirs = (row["held"] for row in reported)
    assert all(a != b for a, b in zip(mine, theirs, strict=True)), "a test of buffers that are the same shows nothing"
    for number in (1, 2, 3):
        checkpoint = fs.open(tmp_path / "run", step=number)
        assert checkpoint.verify().sound
        assert checkpoint.read("model.1.running_mean")[:4].tolist() == mine[number - 1]
        assert checkpoint.read("model.1.num_batches_tracked").item() == number
    for record in reported:
        assert record["buffers"] == [[number, 3] for number in (1, 2, 3)]


@pytest.mark.parametrize("how", ["ddp", "fsdp", "flat", "original"])
def test_no_forward_or_backward_is_taken_for_a_change_and_one_element_on_one_rank_is(tmp_path: Path, how: str) -> None:
    """Parameters are gathered, resharded and swapped meanwhile: none of that counts. What is written in place does."""
    results = run(2, "ddp_acts", "train_beside", str(tmp_path / "run"), how)
    assert results == [[False, False, True, False]] * 2


@pytest.mark.parametrize(("budget_mib", "fails"), [(16, False), (4, True)], ids=["fits", "does not fit"])
def test_in_the_first_save_of_ranks_copies_of_unowned_parameters_are_made_as_far_as_the_budget_goes(
    tmp_path: Path, budget_mib: int, fails: bool
) -> None:
    reported: list[Any] = run(2, "ddp_acts", "follow", str(tmp_path / "run"), budget_mib << 20)
    assert [event[:2] for event in reported] == [[fails, False]] * 2
    first = fs.open(tmp_path / "run", step=2 if fails else 1).read("model.follower.weight")
    second = fs.open(tmp_path / "run", step=2).read("model.follower.weight")
    assert (second - first).mean().item() == pytest.approx(0 if fails else 1)
    assert any(early for *_, early in reported), "the second one captures it early"


def test_a_job_of_which_rank_0_alone_saves_learns_what_to_do_in_seconds_and_trains_on(tmp_path: Path) -> None:
    """As many write it: `if rank == 0: save`. By default a rank may be ten minutes late; these never come."""
    reported: list[Any] = run(2, "ddp_acts", "only_rank_0_saves", str(tmp_path / "run"), 30, 10)
    first, other = reported
    assert len(first["errors"]) == 3
    assert "rank 1 did not reach 'the plan of step 10'" in first["errors"][0]
    assert all("construct a Checkpointer with alone=True" in error for error in first["errors"])
    at_s, line = first["said"][0]
    assert "waiting for rank 1" in line, "said before it fails"
    assert "alone=True" in line
    assert at_s < 30
    assert max(first["took"] + other["took"]) < 40, "a step stands still for no more than it takes to find out"
    assert first["end"] + other["end"] < 60
