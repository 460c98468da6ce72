"""Saves of several ranks that write only what the one before does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs
from flowstone.config import MIB


@pytest.mark.parametrize(("ranks", "changes"), [(2, 0), (2, 3), (3, 2)])
def test_each_rank_refers_to_what_it_has_written_before(tmp_path: Path, ranks: int, changes: int) -> None:
    told = run(ranks, "delta_acts", "saves", str(tmp_path / "run"), changes)
    written = [sum(step) for step in zip(*told, strict=True)]
    assert written[0] > 6 * MIB
    for step, bytes_ in enumerate(written[1:], 2):
        assert bytes_ < (3 * MIB if step == changes else MIB), written  # of what changes, 2 MiB are one tensor
    for step in range(1, 5):
        checkpoint = fs.open(tmp_path / "run", step)
        assert checkpoint.verify().sound
        assert (checkpoint.read("model.base.2.weight")[0, 0].item() == 7.0) == (step >= changes > 0)
        assert checkpoint.objects["step"] == step
