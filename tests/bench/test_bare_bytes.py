"""bench/bare_bytes.py: the cost of a step's bytes for a training, without Flowstone."""

from __future__ import annotations

from pathlib import Path

from bench.bare_bytes import REQUEST_BYTES, ways
from flowstone_demo.sizes import SMALL
from flowstone_demo.train import Training


def test_as_many_bytes_as_the_gradients_are_read_or_written_beside_each_step(tmp_path: Path) -> None:
    training = Training(SMALL, seed=1)
    gradients = sum(parameter.nbytes for parameter in training.model.parameters())
    result = ways(training, tmp_path, rounds=2, steps=2)
    assert list(result) == ["read", "written"]
    for name, way in result.items():
        assert way["pairs"] == 2, name
        assert gradients <= int(str(way["bytes"])) < gradients + REQUEST_BYTES, name
    assert (tmp_path / "bytes").stat().st_size == result["written"]["bytes"]
    assert (tmp_path / "bytes").read_bytes().count(0) < gradients // 8, "numbers at random, and no hole"
