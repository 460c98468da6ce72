"""Replicas that drift apart after the first save: each save compares them, and no checkpoint mixes ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_that_drift_apart_fail_that_save_by_name_and_rank(tmp_path: Path, size: int) -> None:
    results = run(size, "drift_acts", "drifts", str(tmp_path / "run"))
    others = "rank 1" if size == 2 else "ranks 1, 2"
    for result in results:
        assert isinstance(result, list)
        assert [result[index] for index in (0, 1, 3, 4)] == ["1", "2", "4", "5"]
        assert re.search(f"'model.table' is not the same on {others} as on rank 0; .* differ", result[2]), result[2]
        assert "if these tensors should be equal, make them equal before the save; if they should differ" in result[2]
    names = sorted(path.name for path in (tmp_path / "run").glob("*step-*"))
    assert names == [f"step-{number:08d}" for number in (1, 2, 4, 5)]
    assert not list((tmp_path / "run").glob(".saving-*"))
    assert all(fs.open(tmp_path / "run", step).verify().sound for step in (1, 2, 4, 5))


def test_one_tensor_that_differs_is_named_at_whichever_save(tmp_path: Path) -> None:
    for item in run(2, "drift_acts", "one_drifts_by_one_tensor", str(tmp_path / "run")):
        assert isinstance(item, list)
        for text in item:
            name, _, words = text.partition(": ")
            assert f"'model.{name}' is not the same on rank 1 as on rank 0\n" in words


def test_models_of_each_rank_are_kept_per_rank(tmp_path: Path) -> None:
    saved = run(2, "drift_acts", "inner_and_outer", str(tmp_path / "run"), True)
    assert saved[0] != saved[1]
    assert run(3, "drift_acts", "inner_and_outer", str(tmp_path / "run"), False) == [saved[0], saved[1], saved[0]]
