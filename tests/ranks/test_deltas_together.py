"""Saves of several ranks that write only the chunks that the previous checkpoint does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run

import flowstone as fs
from flowstone.config import MIB


@pytest.mark.parametrize(("ranks", "changes"), [(2, 0), (2, 3), (3, 2)])
def test_each_rank_refers_to_what_it_has_written_before(tmp_path: Path, ranks: int, changes: int) -> None:
    results = run(ranks, "delta_acts", "saves", str(tmp_path / "run"), changes)
    written = [sum(step) for step in zip(*results, strict=True)]
    assert written[0] > 6 * MIB
    for step, bytes_ in enumerate(written[1:], 2):
        assert bytes_ < (3 * MIB if step == changes else MIB), written  # of what changes, 2 MiB are one tensor
    for step in range(1, 5):
        checkpoint = fs.open(tmp_path / "run", step)
        assert checkpoint.verify().sound
        assert (checkpoint.read("model.base.2.weight")[0, 0].item() == 7.0) == (step >= changes > 0)
        assert checkpoint.objects["step"] == step


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_restart_refer_to_what_each_has_written(tmp_path: Path, ranks: int) -> None:
    reported = [run(ranks, "delta_acts", "once", str(tmp_path / "run"), step) for step in (1, 2, 3)]
    written = [sum(bytes_ for bytes_, _ in day) for day in reported]
    assert written[0] > 6 * MIB
    assert max(written[1:]) < MIB
    for step in (1, 2, 3):
        checkpoint = fs.open(tmp_path / "run", step)
        assert checkpoint.verify().sound
        names = [row.name for row in checkpoint.manifest.segments]
        assert len(set(names)) == len(names)


def test_another_number_of_ranks_refers_only_to_files_of_the_same_number(tmp_path: Path) -> None:
    run(2, "delta_acts", "once", str(tmp_path / "run"), 1)
    first = fs.open(tmp_path / "run", 1).manifest
    results = run(1, "delta_acts", "once", str(tmp_path / "run"), 2)
    assert results[0][0] > 2 * MIB, "what rank 1 had written"
    for ranks, step in ((1, 3), (3, 4), (3, 5)):
        run(ranks, "delta_acts", "once", str(tmp_path / "run"), step)
    for step in range(1, 6):
        assert fs.open(tmp_path / "run", step).verify().sound
    linked = [row.name for row in fs.open(tmp_path / "run", 2).manifest.segments if row.home == first.id]
    assert not [name for name in linked if "rank-00001" in name]
