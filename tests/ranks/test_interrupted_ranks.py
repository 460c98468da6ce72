"""Ctrl-C on one of several ranks: in seconds the others report the rank and the reason, and all continue together."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize("point", ["meeting", "newest", "within", "reading", "waiting"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_load_that_is_interrupted_on_one_rank_is_told_to_all_in_seconds(
    tmp_path: Path, victim: int, point: str
) -> None:
    results = run(2, "interrupt_acts", "one_is_interrupted", str(tmp_path / "run"), victim, point)
    own, other = results[victim], results[1 - victim]
    assert isinstance(own, list)
    assert isinstance(other, list)
    assert own[0].startswith("KeyboardInterrupt"), own
    verb = "latest" if point in ("meeting", "newest") else "load"
    if (victim, point) == (1, "meeting"):
        assert other[0] == "nothing", "all was said before"
    else:
        words = f"RankError: rank {victim} was interrupted in {verb}() by KeyboardInterrupt, and will not reach '"
        assert other[0].startswith(words), other
    assert own[1]
    assert other[1], "it has not waited for deadline_s"
    assert own[2] == other[2] == "well", "and then it is called again"
    fs.open(tmp_path / "run").verify()
    assert fs.open(tmp_path / "run").step == 3


@pytest.mark.parametrize("point", ["describing", "starting"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_is_interrupted_on_one_rank_is_told_to_all_in_seconds(
    tmp_path: Path, victim: int, point: str
) -> None:
    results = run(2, "interrupt_acts", "one_is_interrupted", str(tmp_path / "run"), victim, point)
    own, other = results[victim], results[1 - victim]
    assert isinstance(own, list)
    assert isinstance(other, list)
    assert own[0].startswith("KeyboardInterrupt")
    assert other[0].startswith(
        f"RankError: rank {victim} failed: save() was interrupted: KeyboardInterrupt"
    ), other
    assert other[1], "it has not waited for deadline_s"
    assert own[2] == other[2] == "well", "the same step can be saved again"
