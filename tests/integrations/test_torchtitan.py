"""torchtitan's checkpoint manager by Flowstone: its own optimizers, schedules and loaders, trained on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed, run_ranks

import flowstone as fs

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not is_installed("torchtitan"), reason="`make test-integrations` installs torchtitan"
)
MODES = ["disabled", "async", "async_with_pinned_mem"]


def act(name: str, mode: str, directory: Path, ranks: int = 1, script: str = "torchtitan_act.py") -> None:
    """Run it; to be killed is what `killed` is for."""
    command = [str(HERE / script), name, mode, str(directory)]
    log = Path(f"{directory}-{name}")
    codes = run_ranks(command, log, ranks, {"OMP_NUM_THREADS": "1"}, is_launched=True)
    text = "\n".join(Path(f"{log}-{rank}.txt").read_text()[-3000:] for rank in range(ranks))
    assert -9 in codes if name == "killed" else codes == [0] * ranks, text


def told(name: str, directory: Path, ranks: int = 1) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{directory}-{name}-{rank}.json").read_text()) for rank in range(ranks)]


def resumed_from(directory: Path, ranks: int = 1) -> set[str]:
    logs = [Path(f"{directory}-resumed-{rank}.txt").read_text() for rank in range(ranks)]
    return {line for log in logs for line in log.splitlines() if line.startswith("from ")}


@pytest.mark.parametrize(("mode", "ranks"), [("disabled", 1), ("async", 2), ("async_with_pinned_mem", 2)])
def test_a_killed_run_resumes_to_the_last_bit(tmp_path: Path, mode: str, ranks: int) -> None:
    act("whole", mode, tmp_path / "a", ranks)
    act("killed", mode, tmp_path / "b", ranks)
    act("resumed", mode, tmp_path / "b", ranks)
    assert resumed_from(tmp_path / "b", ranks) in ({f"from {step} {step}"} for step in (2, 3, 4))
    assert told("resumed", tmp_path / "b", ranks) == told("whole", tmp_path / "a", ranks)
    folder = tmp_path / "b" / "checkpoint"
    assert {path.name for path in folder.iterdir()} == {f"step-{step}" for step in range(1, 9)}
    assert all(fs.open(path).verify().sound for path in folder.iterdir())


@pytest.mark.parametrize(("mode", "ranks"), [("async", 1), ("async_with_pinned_mem", 2)])
def test_torchtitans_own_trainer_is_killed_and_resumes_to_the_last_bit(tmp_path: Path, mode: str, ranks: int) -> None:
    for name, directory in (("whole", tmp_path / "a"), ("killed", tmp_path / "b"), ("resumed", tmp_path / "b")):
        act(name, mode, directory, ranks, "torchtitan_trainer_act.py")
    whole, resumed = told("whole", tmp_path / "a", ranks), told("resumed", tmp_path / "b", ranks)
    assert {row["begun"] for row in resumed} in ({2}, {3}, {4})
    assert [row["parts"] for row in resumed] == [row["parts"] for row in whole]
    assert all(fs.open(path).verify().sound for path in (tmp_path / "b" / "checkpoint").iterdir())


def test_a_run_that_torchtitan_saved_goes_on_through_flowstone(tmp_path: Path) -> None:
    act("whole", "disabled", tmp_path / "a", 2)
    act("native", "disabled", tmp_path / "b", 2)
    act("resumed", "async", tmp_path / "b", 2)
    assert resumed_from(tmp_path / "b", 2) == {"from 4 4"}
    assert told("resumed", tmp_path / "b", 2) == told("whole", tmp_path / "a", 2)


@pytest.mark.parametrize("mode", MODES)
def test_policies_hold_for_committed_checkpoints(tmp_path: Path, mode: str) -> None:
    act("policies", mode, tmp_path / "a")


def test_weights_go_out_and_come_in(tmp_path: Path) -> None:
    act("exports", "async", tmp_path / "a")


@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_fails_is_raised(tmp_path: Path, mode: str) -> None:
    act("failures", mode, tmp_path / "a")


def test_another_version_goes_on_where_its_interface_is_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torchtitan
    from torchtitan.components.checkpointer import CheckpointManager

    from flowstone.adapters.torchtitan.package import checkpoint_manager_class

    monkeypatch.setattr(torchtitan, "__version__", "9.9.9")
    assert checkpoint_manager_class() is CheckpointManager
    assert "Flowstone's adapter was not tested with torchtitan 9.9.9 (tested: 0.3.0)" in caplog.text
    monkeypatch.setattr(CheckpointManager, "dcp_load", lambda self, checkpoint_id, state_dict: None)
    with pytest.raises(fs.FrameworkError, match=r"9\.9\.9[\s\S]*dcp_load[\s\S]*torchtitan==0\.3\.0"):
        checkpoint_manager_class()
