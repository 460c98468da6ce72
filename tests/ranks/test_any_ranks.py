"""Any number of ranks saves in any layout, and any other number loads it: real processes over gloo, on a real disk.

The layouts are those of tests/plan/test_any_layout.py. A failure prints LAYOUT=<number>; with that in the environment
`pytest tests/ranks/test_any_ranks.py` repeats exactly that case.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import run

import flowstone as fs
from layouts import RANKS_MAX

ONLY = int(os.environ["LAYOUT"]) if "LAYOUT" in os.environ else None


def _run(path: Path, seeds: list[int], ranks_max: int) -> None:
    run(ranks_max, "layout_acts", "play", str(path), seeds, ranks_max)
    for seed in seeds:
        for step in (1, 2):
            assert fs.open(path / str(seed), step).verify().sound


@pytest.mark.skipif(ONLY is not None, reason="LAYOUT repeats one case")
def test_a_few_pairs_of_layouts(tmp_path: Path) -> None:
    _run(tmp_path, [1000, 1001, 1002, 1003, 1004], ranks_max=4)


@pytest.mark.soak
def test_many_pairs_of_layouts_of_up_to_thirteen_ranks(tmp_path: Path) -> None:
    _run(tmp_path, list(range(64)), ranks_max=RANKS_MAX)


@pytest.mark.skipif(ONLY is None, reason="set LAYOUT to the number of a case")
def test_case_of_ranks(tmp_path: Path) -> None:
    assert ONLY is not None
    _run(tmp_path, [ONLY], ranks_max=4 if ONLY >= 1000 else RANKS_MAX)
