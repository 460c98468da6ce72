"""The output of the benchmark of derived tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import derived


def test_it_tells_that_12_of_14_bytes_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    derived.main([str(tmp_path / "bench"), "--parameters", "1", "--rounds", "1"])
    record = {line[:14].strip(): float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()}
    assert list(record) == ["stored bytes", "durable s", "processor s", "load s"]
    assert record["stored bytes"] == pytest.approx(12 / 14, abs=2e-3)
    assert list((tmp_path / "bench").iterdir()) == []
