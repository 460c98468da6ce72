"""DCP through Flowstone on several ranks: real processes, gloo."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from processes import Ranks, run
from safetensors.torch import load_file

import flowstone as fs

ACTS = "adapters.dcp_acts"


def test_shards_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    first, second = str(tmp_path / "step-1"), str(tmp_path / "step-2")
    run(4, ACTS, "save_sharded", first)
    assert fs.open(first).verify().sound
    assert fs.open(first).manifest.ranks == 4
    assert run(2, ACTS, "load_sharded", first, second) == [[True, 7, [2.0] * 3]] * 2
    assert run(3, ACTS, "load_sharded", second) == [[True, 7, [2.0] * 3]] * 3
    assert run(1, ACTS, "load_whole", first) == [True]
    assert fs.open(second).objects["step"] == 7
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]  # and no draft, no lock


@pytest.mark.parametrize("to_lowest", [False, True])
def test_what_all_ranks_hold_is_written_once_by_whom_the_planner_says(to_lowest: bool, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    assert run(2, ACTS, "save_replicas", str(path), to_lowest) == [True, True]
    held = [set(load_file(file)) for file in sorted(path.glob("rank-*.safetensors"))]
    names = [{name for name in pieces if not name.startswith("__pad__")} for pieces in held]
    assert sorted(name for key in names for name in key) == ["columns", "few", "rows", "same"]
    assert len([name for name in names if name]) == (1 if to_lowest else 2)
    assert fs.open(path).verify().sound


def test_sharded_tensors_load_into_any_other_sharding(tmp_path: Path) -> None:
    names = ["rows", "columns", "turns", "uneven", "other"]
    assert run(2, ACTS, "reshard", str(tmp_path / "step-1"), names) == [[True] * 25] * 2
    assert fs.open(tmp_path / "step-1").verify().sound


@pytest.mark.parametrize("needs", ["fsdp2_on_cpu"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_fsdp_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert run(2, ACTS, "fsdp", str(tmp_path / "step-1")) == [True, True]


@pytest.mark.parametrize("needs", ["cached_plans"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_cached_plans_write_what_there_is_now(tmp_path: Path) -> None:
    assert run(2, ACTS, "cached", str(tmp_path)) == [[[step, [float(step)], True] for step in (1, 2, 3)]] * 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_is_refused_fails_the_save_for_all(which: int, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    results = run(2, ACTS, "refuse_one", str(path), which)
    for rank in results:
        assert len(rank) == 1
        assert rank[0].startswith(f"{which}:StorageError:")
        assert f"rank-{which:05d}.safetensors" in rank[0]
    assert not path.exists()


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_that_are_killed_while_they_save_leave_the_old_checkpoint(which: int, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    run(2, ACTS, "save_sharded", path)
    ranks = Ranks(2, ACTS, "die_while_saving", path, which)
    deadline = time.monotonic() + 60
    while ranks.processes[which].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks.kill(1 - which)
    ranks.end()
    assert fs.open(path).verify().sound
    assert run(2, ACTS, "load_sharded", path) == [[True, 7, [2.0] * 3]] * 2
    run(2, ACTS, "save_sharded", path)  # over what the dead have left
    assert fs.open(path).verify().sound
    left = {name for name in os.listdir(tmp_path) if ".began-" not in name}
    assert left == {"step-1"}


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        for step in (0, 1):
            ckpt.save(step, {"x": torch.full((2,), float(step))}).committed.result()
    for result in run(2, ACTS, "differ", str(tmp_path)):
        assert "another checkpoint" in str(result)
