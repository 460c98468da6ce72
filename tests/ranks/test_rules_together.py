"""Loads by layout rules on several ranks: each rank reads the data of its boxes."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize(("source", "saved", "target", "loaded"), [
    (2, "rows", 4, "columns"), (4, "fsdp", 2, "rows"), (1, "whole", 4, "fsdp"), (2, "columns", 1, "whole"),
])
def test_ranks_load_what_others_have_laid_out_otherwise_and_back(
    tmp_path: Path, source: int, saved: str, target: int, loaded: str
) -> None:
    path = str(tmp_path / "run")
    run(source, "rules_acts", "save", path, "apart", saved, 1)
    run(target, "rules_acts", "load", path, "joined", loaded, 1)
    run(target, "rules_acts", "save", path, "joined", loaded, 2)
    run(source, "rules_acts", "load", path, "apart", saved, 2)
    assert fs.open(path, step=2).tensors["model.larges"].shape == (4, 1024, 1024)
    fs.open(path, step=2).verify()


def test_a_rank_reads_the_experts_that_it_has_and_no_others(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(2, "rules_acts", "save", path, "apart", "columns", 1)
    total = sum(entry.bytes for entry in fs.open(path).tensors.values())
    for read, shared in run(4, "rules_acts", "load", path, "joined", "rows", 1):  # type: ignore[misc]
        assert read + shared < total / 4 * 1.2  # type: ignore[has-type]


def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(2, "rules_acts", "save", path, "apart", "rows", 1)
    for result in run(2, "rules_acts", "refused", path):
        assert "model.norms" in str(result)
        assert "(24, 3)" in str(result)
