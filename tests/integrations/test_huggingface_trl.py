"""TRL's trainers through Flowstone: killed and resumed, they end like uninterrupted trainers, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed, run_ranks

import flowstone as fs

pytestmark = pytest.mark.skipif(not is_installed("trl"), reason="`make test-integrations` installs trl")
ACT = str(Path(__file__).with_name("trl_act.py"))
STEPS, KILL_AT = 30, 18
OF_THE_PROCESS = ("num_tokens", "step_time")  # which TRL counts and measures in one process, also by itself


def act(folder: Path, run: str, *, ranks: int = 1, **value: Any) -> list[int]:
    return run_ranks([ACT, json.dumps({"out": str(folder / "out"), **value})], folder / run, ranks)


def said(folder: Path, run: str) -> str:
    return (folder / f"{run}-0.txt").read_text()[-3000:]


def ended(folder: Path, rank: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"out-{rank}.json").read_text())
    record["log"] = [{key: item for key, item in entry.items() if key not in OF_THE_PROCESS} for entry in record["log"]]
    return record


@pytest.mark.parametrize(("kind", "ranks"), [("sft", 2), ("peft", 1), ("dpo", 1), ("grpo", 1)])
def test_a_killed_and_resumed_run_ends_as_the_trainer_by_itself(kind: str, ranks: int, tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir(), killed.mkdir()
    assert set(act(calm, "undisturbed", ranks=ranks, kind=kind, flowstone=False)) == {0}, said(calm, "undisturbed")
    codes = act(killed, "cut-short", ranks=ranks, kind=kind, kill_at=KILL_AT)
    assert -signal.SIGKILL in codes, said(killed, "cut-short")
    reached = fs.open(killed / "out").step
    assert reached in (5, 10, 15)
    assert set(act(killed, "resumed", ranks=ranks, kind=kind, resume="last")) == {0}, said(killed, "resumed")
    for rank in range(ranks):
        expected, actual = ended(calm, rank), ended(killed, rank)
        assert actual == expected
        assert len([entry for entry in actual["log"] if "loss" in entry]) == STEPS
        assert (actual["reference"] is not None) == (kind == "dpo")
    assert (killed / "resumed-0.txt").read_text().count("'loss'") == STEPS - reached, "it went on behind what was saved"
    checkpoint = fs.open(killed / "out")
    assert checkpoint.verify().sound
    assert any(name.startswith("ref_model.") for name in checkpoint.tensors) == (kind == "dpo")
