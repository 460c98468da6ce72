"""Mistakes of jobs: states that do not fit each other, different stores, clocks, and a second job."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from processes import Ranks, run

import flowstone as fs


def test_states_that_make_no_whole_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    results = run(2, "trouble_acts", "bad_states", str(tmp_path / "run"))
    expected = {
        "overlap": ("CoverageError", "cannot save 'x.w': boxes [0:5] and [3:8] overlap"),
        "hole": ("CoverageError", "cannot save 'x.w': no shard holds [3:5]"),
        "half": ("CoverageError", "cannot save 'x.w': no shard holds [4:8]"),
        "shapes": ("CollisionError", "ranks describe 'x.w' differently"),
        "dtypes": ("CollisionError", "ranks describe 'x.w' differently"),
        "sections": ("UnsupportedStateError", "rank 1 saves different sections than rank 0"),
    }
    for result in results:
        assert isinstance(result, dict)
        assert result.keys() == expected.keys()
    for name, (kind, words) in expected.items():
        own, other = (str(got[name]) for got in results)  # type: ignore[index]
        assert own.startswith(f"{kind}: {words}"), own
        assert other.startswith(f"RankError: rank 0 failed: {words}"), other
        assert "next" in own
        assert "next" in other
    assert "(9,) on rank 1" in str(results[0]["shapes"])  # type: ignore[index, call-overload]
    assert "float16 (8,) on rank 1" in str(results[1]["dtypes"])  # type: ignore[index, call-overload]
    assert sorted(path.name for path in (tmp_path / "run").glob("*step-*")) == ["step-00000099"]
    assert not list((tmp_path / "run").glob(".saving-*"))


def test_a_model_that_cannot_hold_the_checkpoint_is_told_what_differs_on_every_rank(tmp_path: Path) -> None:
    results = run(2, "trouble_acts", "does_not_fit", str(tmp_path / "run"))
    words = {
        "more rows": "shape       x.w: wanted (12,), stored (8,)",
        "other names": "missing     x.v: float32 (8,), is not in the checkpoint",
        "other type": "dtype       x.w: wanted float64, stored float32",
    }
    for name, expected in words.items():
        first, second = (result[name] for result in results)  # type: ignore[index]
        assert first.startswith("MismatchError: state and checkpoint differ in ")
        assert second.startswith("RankError: rank 0 failed: state and checkpoint differ in ")
        assert expected in first
        assert expected in second
    assert [row["a part"] for row in results] == ["loaded", "loaded"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("how", ["gone", "foreign"])
def test_a_store_that_one_rank_cannot_see_fails_saves_and_loads_and_changes_nothing(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    results = run(2, "trouble_acts", "one_does_not_see", str(path), how)
    first, second = results
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    if second["refused"]:
        pytest.skip(f"a mount that one process alone sees was refused: {second['refused']}")
    for row in (first, second):
        assert "rank 0 cannot see the file that rank 1 wrote" in row["save"]
        assert "one directory that every node sees" in row["save"]
        assert "rank 1" in row["load"] or "there is no checkpoint in" in row["load"]
    if how == "foreign":
        assert "rank 1 has read another checkpoint than rank 0" in first["load"]
    else:
        assert first["load"].startswith("RankError: rank 1 failed: there is no checkpoint in")
    assert fs.open(path).verify().step == 3
    assert sorted(path.name for path in path.glob("*step-*")) == ["step-00000001", "step-00000003"]
    assert not list(path.glob(".saving-*"))


@pytest.mark.parametrize("is_there", [True, False])
def test_another_path_on_one_rank_is_refused(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "run-other").mkdir()
    results = run(2, "trouble_acts", "another_path", str(tmp_path / "run"))
    paths = [str(tmp_path / "run"), str(tmp_path / "run-other")]
    for rank, result in enumerate(results):
        words = f" for other ranks with a Checkpointer of {paths[1 - rank]}, not of {paths[rank]}"
        assert f"rank {1 - rank} wait" in str(result)
        assert words in str(result), result
        assert "Checkpointers of the same path" in str(result)
    for path in (tmp_path / "run", tmp_path / "run-other"):
        assert not list(path.glob("step-*"))
        assert not list(path.glob(".saving-*"))


def test_clocks_that_differ_or_go_backwards_decide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run(2, "trouble_acts", "other_clocks", str(path)) == [[3], [3]]
    assert sorted(path.name for path in path.glob("step-*")) == ["step-00000002", "step-00000003"]
    newest = fs.open(path)
    assert (newest.step, newest.manifest.created[:4]) == (3, "2001")
    assert newest.verify().sound


def test_a_checkpoint_that_was_copied_elsewhere_is_valid_for_any_ranks(tmp_path: Path) -> None:
    """As rsync leaves it: other times, no marker, perhaps other names around it."""
    run(3, "acts", "save_pattern", str(tmp_path / "run"), "rows")
    copy = tmp_path / "elsewhere" / "step-00000001"
    shutil.copytree(tmp_path / "run" / "step-00000001", copy, copy_function=shutil.copyfile)
    assert fs.open(copy).verify().sound
    run(2, "acts", "load_pattern", str(tmp_path / "elsewhere"), "columns")
    assert not (tmp_path / "elsewhere" / "flowstone.json").exists(), "a load writes nothing"


def test_a_second_job_is_refused_on_every_rank_and_nothing_is_mixed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holding = Ranks(2, "trouble_acts", "hold_the_store", str(path))
    deadline = time.monotonic() + 60
    while not all(Path(f"{path}.held-{rank}-1").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first, other = run(2, "trouble_acts", "try_to_intrude", str(path))
    assert isinstance(first, list)
    assert isinstance(other, list)
    for text in first:
        assert text.startswith(f"LockedError : cannot save into {path}: another job writes there"), text
        assert "stop that job and its children, or save into another directory" in text
    for text in other:
        assert text.startswith("RankError LockedError: rank 0 failed: cannot save into"), text
    Path(f"{path}.over").touch()
    ids = holding.results()
    assert ids[0] == ids[1]
    assert sorted(path.name for path in path.glob("*step-*")) == ["step-00000001", "step-00000002"]
    for step, identity in zip((1, 2), ids[0], strict=True):  # type: ignore[call-overload]
        checkpoint = fs.open(path, step)
        assert checkpoint.verify().sound
        assert checkpoint.read("wide").unique().tolist() == [float(step)]
        assert json.loads((path / f"step-{step:08d}" / "manifest.json").read_text())["id"] == identity
    assert not list(path.glob(".saving-*"))
