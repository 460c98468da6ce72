"""Replicas that several ranks write in blocks of rows: real processes, lazy capture, a known plan and a new one."""

from __future__ import annotations

from pathlib import Path

from processes import run
from replica_acts import STEPS, check, training

import flowstone as fs


def test_ranks_write_even_parts_of_few_replicas_and_one_process_loads_them(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    results = run(4, "replica_acts", "train", path)
    table = training()["model"].table.nbytes  # type: ignore[attr-defined]
    for number in range(STEPS):
        checkpoint = fs.open(path, number)
        assert checkpoint.verify().sound
        assert checkpoint.tensors["model.table"].pieces > 1, "cut"
        parts = [ranks[number][1] for ranks in results]  # type: ignore[index]
        assert sum(parts) >= table * (3 if number else 1)
        assert max(parts) <= 1.05 * sum(parts) / 4, "whole replicas would give one rank twice as much as another"
    check(path)
