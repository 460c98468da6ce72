"""Megatron-core's distributed checkpoints by Flowstone: its GPT, with tensor parallelism, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed, run_ranks, samples

import flowstone as fs

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not is_installed("megatron-core"), reason="`make test-integrations` installs megatron-core"
)


def act(name: str, mode: str, directory: Path, ranks: int = 2) -> list[Any]:
    """What each rank told; nothing of one that is to be killed."""
    log = Path(f"{directory}-{name}")
    command = [str(HERE / "megatron_act.py"), name, mode, str(directory)]
    codes = run_ranks(command, log, ranks, {"OMP_NUM_THREADS": "1"}, is_launched=True)
    text = "\n".join(Path(f"{log}-{rank}.txt").read_text()[-3000:] for rank in range(ranks))
    assert -9 in codes if name == "killed" else codes == [0] * ranks, text
    return [] if name == "killed" else [
        json.loads(Path(f"{directory}-{name}-{rank}.json").read_text()) for rank in range(ranks)
    ]


def resumed_from(directory: Path) -> set[str]:
    logs = [Path(f"{directory}-resumed-{rank}.txt").read_text() for rank in range(2)]
    return {line for log in logs for line in log.splitlines() if line.startswith("from ")}


@pytest.mark.parametrize("mode", ["save", "async"])
def test_a_killed_run_resumes_to_the_last_bit(tmp_path: Path, mode: str) -> None:
    whole = act("whole", mode, tmp_path / "a")
    act("killed", mode, tmp_path / "b")
    assert act("resumed", mode, tmp_path / "b") == whole
    assert resumed_from(tmp_path / "b") in ({"from 3"}, {"from 4"}, {"from 5"})
    for number in range(1, 9):
        place = tmp_path / "b" / f"iter_{number:07d}"
        if (place / "metadata.json").exists():
            checkpoint = fs.open(place / "sharded")
            assert (checkpoint.step, checkpoint.verify().sound) == (number, True)


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks_loads_its_parts(tmp_path: Path, ranks: int) -> None:
    act("whole", "save", tmp_path / "a")
    for result in act("loads", "save", tmp_path / "a", ranks):
        assert result == {
            "twins": True, "equal": True, "iteration": 8, "tensors": 29, "described": True,
            "objects": ["rng/shard_0_2", "rng/shard_1_2"],
        }


def test_a_run_that_megatron_saved_goes_on_through_flowstone(tmp_path: Path) -> None:
    whole = act("whole", "save", tmp_path / "a")
    act("native", "save", tmp_path / "b")
    assert act("resumed", "save", tmp_path / "b") == whole
    assert resumed_from(tmp_path / "b") == {"from 4"}


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    act("whole", "save", tmp_path / "a")
    segment = next((tmp_path / "a" / "iter_0000008" / "sharded").rglob("*.safetensors"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    reported = act("damaged", "save", tmp_path / "a")
    assert any("sharded" in event and segment.name in event for event in reported), reported


@pytest.mark.parametrize("mode", ["save", "async"])
def test_what_cannot_be_stored_fails_the_save_on_every_rank_and_is_no_checkpoint(tmp_path: Path, mode: str) -> None:
    for result in act("refused", mode, tmp_path / "a"):
        assert all("UnsupportedStateError" in item and "extra/shard" in item for item in result[0:4:2]), result
        assert result[1::2][:2] == ["False", "False"]
        assert result[4] == "True", "the next save works"
        assert "expected a ShardedTensor" in result[5], "which one rank alone has found"
        assert result[6] == "OSError: the disk is gone"


def test_another_version_goes_on_where_its_interface_is_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import megatron.core
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy

    from flowstone.adapters.megatron.package import strategies_base

    monkeypatch.setattr(megatron.core, "__version__", "9.9.9")
    strategies_base()
    assert "9.9.9" in caplog.text
    monkeypatch.setattr(LoadShardedStrategy, "load", lambda self, state, place, more: None)
    with pytest.raises(fs.FrameworkError, match=r"LoadShardedStrategy\.load\(state, place, more"):
        strategies_base()


def test_the_samples_of_the_page(tmp_path: Path) -> None:
    result = samples("MEGATRON.md")
    (tmp_path / "sample.py").write_text(BEFORE + result["megatron"] + result["megatron-registered"] + AFTER)
    codes = run_ranks([str(tmp_path / "sample.py")], tmp_path / "log", folder=tmp_path, is_launched=True)
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]


BEFORE = f"""
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
sys.path.insert(0, {str(HERE)!r})
from megatron_act import Job, prepare
prepare()
job = Job(Path("iterations"), "save")
job.step = 100
os.makedirs("runs/iter_0000100")
sharded_state_dict = job.state
directory = "runs/iter_0000100"
"""
AFTER = "dist.barrier()\nprint('done', flush=True)\nos._exit(0)\n"
