"""DistributedDataParallel: replicas whose buffers each rank updates by its own batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processes import run

import flowstone as fs


def test_buffers_of_replicated_modules_come_from_rank_0_all_of_them_at_every_save(tmp_path: Path) -> None:
    told: list[Any] = run(2, "ddp_acts", "save_statistics", str(tmp_path / "run"), 3)
    mine, theirs = (one["held"] for one in told)
    assert all(a != b for a, b in zip(mine, theirs, strict=True)), "a test of buffers that are the same shows nothing"
    for number in (1, 2, 3):
        checkpoint = fs.open(tmp_path / "run", step=number)
        assert checkpoint.verify().sound
        assert checkpoint.read("model.1.running_mean")[:4].tolist() == mine[number - 1]
        assert checkpoint.read("model.1.num_batches_tracked").item() == number
    for one in told:
        assert one["buffers"] == [[number, 3] for number in (1, 2, 3)]
