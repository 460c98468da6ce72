"""Long benchmarks print each row once it is measured, so the rows survive if the run is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.journal_parts import turns
from bench.journal_ways import PARTS
from flowstone_demo.sizes import SMALL
from flowstone_demo.train import Training

ROOT = Path(__file__).resolve().parents[2]


def test_parts_of_a_journal_are_told_block_by_block(tmp_path: Path) -> None:
    ways = ["whole", "hooks and save only"]
    reported = turns(Training(SMALL, seed=1), tmp_path, ways, rounds=2, steps=1)
    rows = [(name, item.summary()["pairs"]) for name, item in (next(reported), next(reported))]
    assert rows == [("hooks and save only", 1), ("whole", 1)]
    assert [name for name, _ in reported] == ways, "the second round"


@pytest.mark.parametrize("way", sorted(PARTS.keys() - {"another processor"} if os.cpu_count() == 1 else PARTS))
def test_each_way_to_write_a_journal_trains(way: str, tmp_path: Path) -> None:
    (row,) = turns(Training(SMALL, seed=1), tmp_path, [way], rounds=1, steps=1)
    assert row[0] == way


def test_lowdiffs_setting_is_told_round_by_round(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--rounds", "50", "--steps", "2", "--width", "64", "--batch", "2"]
    command = [sys.executable, "-m", "bench.lowdiff", str(tmp_path), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        rows = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while left := in_session(process.pid):
        assert time.monotonic() < deadline, f"processes {left} go on"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    assert [row["round"] for row in rows] == [1, 2]
    assert [row["step"]["pairs"] for row in rows] == [1, 2]
    assert all(row["cpu"] > 0 for row in rows)


def in_session(leader: int) -> list[int]:
    """Processes that are there of what `leader` began."""
    collected = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, words = path.read_text().partition(" ")
        except OSError:
            continue  # it has ended meanwhile
        if int(words.rpartition(")")[2].split()[3]) == leader:
            collected.append(int(number))
    return collected
