"""bench/conversion.py: rates and memory of import and export, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench import fio
from bench.conversion import goals, measure, told, write_source

MIB = 1 << 20


def test_the_source_is_a_valid_file(tmp_path: Path) -> None:
    write_source(tmp_path / "model.safetensors", 4_000_000)
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()) == 1_000_000


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_rates_and_memory_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    (row,) = measure(tmp_path, 40_000_000, 1, 64 * MIB)
    assert min(row.values()) > 0
    assert "relative to the slower" in told([row])
    assert not list(tmp_path.iterdir())


def test_a_page_says_which_goals_were_reached() -> None:
    row = {"fio_write": 3e9, "fio_read": 3e9, "fio_at_once": 1.5e9, "import": 1.2e9, "export": 0.9e9, "peak": 4e8}
    row["stream"] = 2.8e9
    faster = row | {"import": 1.5e9}
    assert [goal.is_met for goal in goals([row, faster])] == [True, False, True, True]
    text = told([row, faster])
    assert "- pass  import, relative to the slower of two fio jobs that read and write at once: 0.90 (0.80-1" in text
    assert "- miss  export, relative to the slower" in text
    assert "- pass  peak of memory, MB: 400, goal at most 1000" in text
    assert "| import | 1.35 (1.20-1.50) |" in text
