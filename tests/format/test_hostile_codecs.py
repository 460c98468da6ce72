"""Forged checkpoints of every codec: an error, or values; no crash, no more memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile_codecs
import pytest

HERE = Path(__file__).parent


def outcomes(tmp_path: Path, first: int, last: int) -> dict[str, int]:
    """In a process of its own, which a crash would end."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
    done = subprocess.run(
        [sys.executable, "-m", "hostile_codecs", str(tmp_path / "forged"), str(first), str(last)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )
    last_lines = "\n".join(done.stderr.splitlines()[-25:])
    assert done.returncode == 0, f"ended with {done.returncode}:\n{last_lines}"
    outcomes: dict[str, int] = json.loads(done.stdout)
    return outcomes


def test_forged_checkpoints_of_every_codec_end_with_an_error_or_with_values(tmp_path: Path) -> None:
    actual = outcomes(tmp_path, 0, 75)
    for kind in (*hostile_codecs.ENGINES, hostile_codecs.JOURNAL):
        assert actual[f"{kind} DamagedError"] > 0
        assert actual[f"{kind} done"] > 0, "some only change values, or are told by `inspect`"


def test_a_chunk_is_forged_where_the_change_before_it_has_made_a_column_longer(tmp_path: Path) -> None:
    assert sum(count for kind, count in outcomes(tmp_path, 2206, 2207).items() if kind.startswith("near ")) == 3


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_very_many_forged_checkpoints_end_with_an_error_or_with_values(tmp_path: Path, part: int) -> None:
    outcomes(tmp_path, 1000 + part * 4000, 1000 + (part + 1) * 4000)
