"""The jobs of integration tests work as expected: their ranks have the given numbers, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import run_ranks

TELL = "import json, os; print(json.dumps([os.environ.get(name) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]))"


@pytest.mark.parametrize(
    ("ranks", "is_launched", "expected"),
    [(1, False, [[None] * 3]), (1, True, [["0", "1", "0"]]), (2, False, [["0", "2", "0"], ["1", "2", "1"]])],
    ids=["alone", "alone and launched", "two"],
)
def test_ranks_have_no_numbers_of_the_job_that_the_tests_run_in(
    ranks: int, is_launched: bool, expected: list[list[str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "7")
    assert run_ranks(["-c", TELL], tmp_path / "log", ranks, is_launched=is_launched) == [0] * ranks
    assert [json.loads((tmp_path / f"log-{rank}.txt").read_text()) for rank in range(ranks)] == expected
