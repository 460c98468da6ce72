"""Views of one memory in a job of several ranks."""

from __future__ import annotations

from pathlib import Path

from processes import run


def test_shards_that_are_views_are_loaded_where_they_agree_and_refused_on_all_ranks_where_not(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(2, "view_acts", "save_views", path, 2)
    run(2, "view_acts", "load_views", path, 2)
    run(2, "view_acts", "refuse_views", path, 2)
