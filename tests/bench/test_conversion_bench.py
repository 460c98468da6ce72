"""bench/conversion.py: rates and memory of import and export, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench import fio
from bench.conversion import measure, told, write_source

MIB = 1 << 20


def test_the_source_is_a_valid_file(tmp_path: Path) -> None:
    write_source(tmp_path / "model.safetensors", 4_000_000)
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()) == 1_000_000


@pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
def test_rates_and_memory_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    (row,) = measure(tmp_path, 40_000_000, 1, 64 * MIB)
    assert min(row.values()) > 0
    assert "of the slower" in told([row])
    assert not list(tmp_path.iterdir())
