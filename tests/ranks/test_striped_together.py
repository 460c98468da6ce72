"""Several ranks over two paths: each spreads its own bytes, and rank 0 commits the bytes of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs


@pytest.mark.parametrize("ranks", [2])
def test_each_rank_has_segments_on_both_paths(tmp_path: Path, ranks: int) -> None:
    for first in (1, 3):
        results = run(ranks, "striped_acts", "day", str(tmp_path), first)
        for rank in range(ranks):
            mine = [name for name in results[0] if name.startswith(f"rank-{rank:05d}")]
            assert sorted("path1" in name for name in mine) == [False, True]
    for step in (3, 4):
        assert fs.open(tmp_path / "one", step).verify().sound
    assert len(list((tmp_path / "two").glob("segments-*"))) == 2
