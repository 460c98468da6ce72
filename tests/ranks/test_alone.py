"""One rank that saves, loads or reads by itself, in a job of several."""

from __future__ import annotations

from pathlib import Path

from processes import run

import flowstone as fs


def test_rank_0_saves_what_is_replicated_by_itself_and_all_load_it(tmp_path: Path) -> None:
    assert run(3, "alone_acts", "rank_0_saves", str(tmp_path / "run")) == [[3.0, 3.0, 3.0, 3.0]] * 3
    assert fs.open(tmp_path / "run").verify().sound
    assert fs.open(tmp_path / "run").manifest.ranks == 1


def test_who_saves_alone_is_told_what_is_not_whole_there_and_loads_its_part(tmp_path: Path) -> None:
    for rank, reported in enumerate(run(2, "alone_acts", "alone_with_a_part", str(tmp_path / "run"))):
        assert isinstance(reported, list)
        rows, flat, entry, shard = reported
        assert "this process holds only a part of 'model.body.0.weight'; the rest is on other ranks" in rows
        assert "this process holds only a part of 'model.body." in flat
        assert ("of 'x.one'" in entry, "no element of it" in entry) == ((True, True) if rank else (False, False)), entry
        assert "this process holds only a part of 'x.w'" in shard
        assert f"[{4 * rank}:{4 * rank + 4}]" in shard
        for words in (rows, flat, shard):
            assert "a Checkpointer that all ranks construct and call, without alone=True" in words


def test_one_checkpointer_more_on_rank_0_and_calls_that_it_alone_makes_break_nothing(tmp_path: Path) -> None:
    assert run(2, "alone_acts", "one_more_on_rank_0", str(tmp_path / "run")) == [[1, 2, 3], [3]]
