"""Saves of several ranks that encode."""

from __future__ import annotations

from pathlib import Path

import torch
from compress_acts import ROWS, part
from processes import run

import flowstone as fs


def test_of_ranks_that_gain_by_it_and_that_do_not_every_part_is_read(tmp_path: Path) -> None:
    assert run(2, "compress_acts", "saves", str(tmp_path / "run"), 2) == [True, True]
    checkpoint = fs.open(tmp_path / "run", 2)
    assert checkpoint.manifest.critical == ("delta", "codec.planes")
    assert checkpoint.verify().sound
    table = checkpoint.read("m.table")
    assert torch.equal(table[:ROWS], part(0))
    assert torch.equal(table[ROWS:], part(1))
    codecs = checkpoint.index.chunks.codecs().tolist()
    assert set(codecs) == {0, 1}


def test_a_rule_is_looked_for_among_the_tensors_of_all_ranks(tmp_path: Path) -> None:
    assert run(2, "compress_acts", "by_rules", str(tmp_path / "one"), "m.table1") == ["", ""]
    assert fs.open(tmp_path / "one").manifest.lossy
    results = run(2, "compress_acts", "by_rules", str(tmp_path / "none"), "m.tables*")
    assert len(results) == 2
    for result in results:
        assert "Quantize(pattern='m.tables*', bits=8, block=256) matches no tensor of the state" in result
        assert "m.table0" in result
    assert results[0].startswith("NoTensorError")
    assert not list((tmp_path / "none").glob("step-*"))
