"""bench/bare_bytes.py: what a step's bytes cost a training, with nothing of Flowstone beside it."""

from __future__ import annotations

from pathlib import Path

from bench.bare_bytes import REQUEST_BYTES, ways
from flowstone_demo.sizes import SMALL
from flowstone_demo.train import Training


def test_as_many_bytes_as_the_gradients_are_read_or_written_beside_each_step(tmp_path: Path) -> None:
    training = Training(SMALL, seed=1)
    gradients = sum(one.nbytes for one in training.model.parameters())
    found = ways(training, tmp_path, rounds=2, steps=2)
    assert list(found) == ["read", "written"]
    for name, way in found.items():
        assert way["pairs"] == 2, name
        assert gradients <= int(str(way["bytes"])) < gradients + REQUEST_BYTES, name
    assert (tmp_path / "bytes").stat().st_size == found["written"]["bytes"]
    assert (tmp_path / "bytes").read_bytes().count(0) < gradients // 8, "numbers at random, and no hole"
