"""Ranks that hold different parts of a state: stages of a pipeline, values of their own, loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize(("source", "target"), [(3, 1), (1, 3), (2, 3)])
def test_stages_are_saved_as_one_model_and_loaded_by_any_number_of_stages(
    tmp_path: Path, source: int, target: int
) -> None:
    path = str(tmp_path / "run")
    run(source, "stages", "save", path, source)
    checkpoint = fs.open(path)
    checkpoint.verify()
    groups = checkpoint.objects["optimizer"]["param_groups"]  # type: ignore[index]
    assert [sorted(group["params"]) for group in groups] == [
        [f"model.layers.{index}.{kind}" for index in range(5)] for kind in ("weight", "bias")
    ]
    assert sorted(checkpoint.objects["parts"]) == [f"part{index}" for index in range(5)]  # type: ignore[call-overload]
    assert run(target, "stages", "load", path, target) == [0.25] * target


def test_what_no_stage_wants_is_refused_and_may_be_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(1, "stages", "save", path, 1)
    for words in run(2, "stages", "load_part", path):
        assert "model.layers.4.weight" in str(words)
        assert "optimizer.param_groups.0.model.layers.2.weight" in str(words)
        assert "layers.0.weight" not in str(words), "one of the ranks wants it"


def test_stages_that_call_different_tensors_alike_are_refused(tmp_path: Path) -> None:
    for words in run(2, "stages", "same_local_names", str(tmp_path / "run")):
        assert "'model.layers.0.weight' is not the same on rank 1 as on rank 0" in str(words)


def test_every_sample_is_seen_exactly_once_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    seen = [
        *run(3, "stages", "loop", path, 3, 7, True), *run(2, "stages", "loop", path, 2, 12, False),
        *run(1, "stages", "loop", path, 1, 3, False), *run(3, "stages", "loop", path, 3, 99, False),
    ]
    assert sorted(sample for some in seen for sample in some) == list(range(100))  # type: ignore[attr-defined]
