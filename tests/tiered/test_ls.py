"""`flowstone ls` of the stores of one run: the place of each step, damage, and pending flushes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import state
from typer.testing import CliRunner, Result

import flowstone as fs
from flowstone.cli import app
from memory_agent import own_agent


def _ls(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ls", *map(str, arguments)])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Step 1 and 3 in both, step 2 and 4 in the near one alone."""
    paths = [tmp_path / "near", tmp_path / "far"]
    with fs.Checkpointer([paths[0], fs.Tier(paths[1], every=2)]) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state(step)).committed.result()
            checkpointer.drain(60)
    return paths


def test_it_tells_which_step_is_where(paths: list[Path]) -> None:
    done = _ls(*paths)
    assert done.exit_code == 0, done.output
    lines = [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in done.stdout.splitlines()]
    rows = {line[0]: line[3:] for line in lines if line[0].isdigit()}
    assert rows == {
        "1": ["whole", "whole"], "2": ["whole", "-"], "3": ["whole", "whole"], "4": ["whole", "-"],
    }
    assert f"{paths[0]}: newest step 4\n" in done.stdout
    assert f"{paths[1]}: newest step 3; 1 newer step(s) in nearer stores only: 4\n" in done.stdout


def test_json_says_the_same(paths: list[Path]) -> None:
    record = json.loads(_ls("--json", *paths).stdout)
    assert [(row["step"], row["where"]) for row in record["checkpoints"]] == [
        (1, ["whole", "whole"]), (2, ["whole", "-"]), (3, ["whole", "whole"]), (4, ["whole", "-"]),
    ]
    assert record["checkpoints"][3]["bytes"] == json.loads(_ls("--json", paths[0]).stdout)["checkpoints"][3]["bytes"]
    assert record["tiers"] == [
        {"path": str(paths[0]), "answers": True, "exists": True, "newest": 4, "missing": []},
        {"path": str(paths[1]), "answers": True, "exists": True, "newest": 3, "missing": [4]},
    ]


def test_what_is_damaged_is_told_and_so_is_the_exit_status(paths: list[Path]) -> None:
    with (paths[0] / "step-00000003/rank-00000.safetensors").open("r+b") as file:
        file.truncate(5000)
    (paths[1] / "step-00000001/manifest.json").write_bytes(b"{}")
    done = _ls("--json", *paths)
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert [row["where"] for row in record["checkpoints"]] == [
        ["whole", "damaged"], ["whole", "-"], ["damaged", "whole"], ["whole", "-"],
    ]


def test_another_runs_store_is_refused_by_name(paths: list[Path], tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, state(1))
    done = _ls(*paths, tmp_path / "other")
    assert done.exit_code != 0
    assert f"{tmp_path / 'other'} is a store of another run" in done.output


def test_memory_tells_what_its_agent_holds(tmp_path: Path) -> None:
    with own_agent(), fs.Checkpointer(["memory://run", tmp_path / "disk"]) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        checkpointer.drain(60)
        done = _ls("memory://run", tmp_path / "disk")
        assert done.exit_code == 0, done.output
        assert "memory://run: newest step 1; " in done.stdout
        assert "of memory" in done.stdout
