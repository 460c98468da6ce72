"""Saves and loads of several ranks, in real processes over gloo, on a real disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


def values(path: Path, step: int) -> set[float]:
    """Every number that a checkpoint of a filled state holds."""
    checkpoint = fs.open(path, step=step)
    checkpoint.verify()
    names = [name for name in checkpoint.tensors if not name.startswith("rng@")]
    values = {value for name in names for value in checkpoint.read(name).unique().tolist()}
    return values | {float(checkpoint.objects["step"])}


@pytest.mark.parametrize("how", ["whole", "rows", "fsdp"])
def test_every_step_that_ranks_save_together_holds_exactly_one_value(tmp_path: Path, how: str) -> None:
    run(3, "acts", "save_steps", str(tmp_path / "run"), how, 3)
    for step in (1, 2, 3):
        assert values(tmp_path / "run", step) == {float(step)}
    checkpoint = fs.open(tmp_path / "run")
    assert checkpoint.manifest.ranks == 3
    sizes = [segment.bytes for segment in checkpoint.manifest.segments]
    assert len(sizes) == 3
    assert max(sizes) < 2 * min(sizes), "no rank writes much more than another"
    assert not list((tmp_path / "run").glob(".saving-*"))


@pytest.mark.parametrize(
    ("source", "saved", "target", "loaded"),
    [(3, "rows", 2, "columns"), (2, "fsdp", 3, "fsdp"), (2, "columns", 1, "whole"), (1, "whole", 3, "rows"),
     (2, "whole", 2, "fsdp")],
)
def test_what_any_ranks_save_any_ranks_load(tmp_path: Path, source: int, saved: str, target: int, loaded: str) -> None:
    path = str(tmp_path / "run")
    run(source, "acts", "save_pattern", path, saved)
    fs.open(path).verify()
    run(target, "acts", "load_pattern", path, loaded)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_refuse_a_step_without_its_manifest_or_fall_back_to_the_same_one_and_go_on(
    tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "run"
    run(2, "acts", "save_steps", str(path), "rows", 3)
    (path / "step-00000003/manifest.json").unlink()
    left = sorted((path / "step-00000003").iterdir())
    for refused, untouched, step, held, notes in run(ranks, "acts", "load_and_save_on", str(path), "rows"):  # type: ignore[misc]
        assert [tells_damage for tells_damage, _ in refused] == [True, True]
        assert all("step-00000003 has no manifest.json" in message for _, message in refused)
        assert untouched
        assert (step, held) == (2, [2.0])
        assert "step 3 is damaged and was skipped" in notes[0]
    assert values(path, 3) == {3.0}, "what was trained anew"
    (aside,) = path.glob(".superseded-00000003-*")
    assert sorted(path.name for path in aside.iterdir()) == [path.name for path in left]


def test_that_there_is_nothing_to_load_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    results = run(2, "acts", "begin_afresh", str(tmp_path / "run"))
    for result in results:
        assert isinstance(result, list)
        assert len(result) == 2
        assert f"no checkpoint in {tmp_path / 'run'}" in result[0]
        assert "step 7" in result[1]
    assert results[0] == results[1]


@pytest.mark.parametrize("failing", [0, 2])
def test_what_one_rank_cannot_save_all_are_told_and_the_next_save_succeeds(tmp_path: Path, failing: int) -> None:
    results = run(3, "acts", "one_cannot", str(tmp_path / "run"), failing)
    assert str(results.pop(failing)).startswith("UnsupportedStateError")
    for words in results:
        assert str(words).startswith(f"RankError: rank {failing} failed: ")
        assert "extra" in str(words)
    assert values(tmp_path / "run", 3) == {3.0}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_told_to_all(tmp_path: Path, failing: int) -> None:
    results = run(2, "acts", "one_full_disk", str(tmp_path / "run"), failing)
    assert str(results.pop(failing)).startswith("FullError: no space to allocate")
    assert str(results[0]).startswith(f"RankError: rank {failing} failed: no space to allocate")
    for step in (1, 2):
        assert values(tmp_path / "run", step) == {float(step)}
    assert not list((tmp_path / "run").glob(".saving-*"))


def test_a_first_save_that_fails_on_one_rank_stops_nobody(tmp_path: Path) -> None:
    assert run(2, "acts", "first_fails", str(tmp_path / "run")) == ["RankError", "UnsupportedStateError"]
    assert values(tmp_path / "run", 1) == {1.0}
    assert not list((tmp_path / "run").glob(".saving-*"))


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    results = run(2, "acts", "different_steps", str(tmp_path / "run"))
    assert "rank 1 is in 'the plan of step 2' while rank 0 is in 'the plan of step 1'" in str(results[0])
    assert "rank 0" in str(results[1]), "which has gone, rather than come to step 2"


def test_a_rank_that_has_lost_a_call_catches_up(tmp_path: Path) -> None:
    results = run(2, "acts", "one_step_behind", str(tmp_path / "run"))
    assert results[0] == ["NoneType", "RankError", "NoneType"]
    assert results[1] == ["NoneType", "UnsupportedStateError", "RankError", "NoneType"]
    assert values(tmp_path / "run", 3) == {3.0}


def test_ranks_that_have_not_tried_a_step_equally_often_count_on_together(tmp_path: Path) -> None:
    results = run(2, "acts", "unequal_tries", str(tmp_path / "run"))
    for unlike, then in results:  # type: ignore[misc]
        assert "rank 1 is at attempt 3 to save this step, but rank 0 is at attempt 2" in unlike
        assert then == "None"
    assert values(tmp_path / "run", 3) == {3.0}


def test_ranks_that_go_back_count_alike_again(tmp_path: Path) -> None:
    results = run(2, "acts", "rewound_after_unequal_tries", str(tmp_path / "run"))
    assert results == [["None", "None"]] * 2
    assert values(tmp_path / "run", 3) == {3.0}


def test_values_that_differ_between_ranks_are_refused_by_section(tmp_path: Path) -> None:
    results = run(2, "acts", "other_values", str(tmp_path / "run"))
    assert all("'note' is not the same on rank 1 as on rank 0" in str(words) for words in results)
    assert all("PerRank" in str(words) for words in results)


def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    results = run(2, "acts", "wrong_shape", str(tmp_path / "run"))
    assert str(results[1]).startswith("MismatchError")
    assert str(results[0]).startswith("RankError: rank 1 failed")
    assert "(9,)" in str(results[0])
