"""State dicts of sharded modules: saved by any ranks in any form, and loaded by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize(
    ("source", "saved", "form", "target", "loaded", "expected"),
    [(3, "fsdp", "named", 2, "columns", "flat"), (2, "rows", "flat", 1, "whole", "named")],
)
def test_state_dicts_are_cut_anew(
    tmp_path: Path, source: int, saved: str, form: str, target: int, loaded: str, expected: str
) -> None:
    path = str(tmp_path / "run")
    run(source, "state_dict_acts", "save_dicts", path, saved, form)
    assert "optimizer.state.model.body.0.weight.exp_avg" in fs.open(path).tensors
    fs.open(path).verify()
    run(target, "state_dict_acts", "load_dicts", path, loaded, expected)


def test_objects_load_what_ranks_have_saved_of_state_dicts(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(2, "state_dict_acts", "save_dicts", path, "fsdp", "named")
    run(2, "state_dict_acts", "load_objects", path, "columns")


@pytest.mark.parametrize(("source", "saved", "target", "loaded"), [(2, "fsdp", 2, "columns"), (2, "rows", 1, "whole")])
def test_slots_that_no_rank_has_saved_are_kept_on_none(
    tmp_path: Path, source: int, saved: str, target: int, loaded: str
) -> None:
    path = str(tmp_path / "run")
    run(source, "state_dict_acts", "save_dicts_without_slots", path, saved)
    run(target, "state_dict_acts", "load_dicts_without_slots", path, loaded)
