"""Other packages' data loaders in a killed training: resumed bit for bit, and on another number of ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed, run_ranks
from mosaic import write_numbers

HERE = Path(__file__).resolve().parent
KINDS = {
    "datasets": "datasets", "streaming": "mosaicml-streaming", "streaming-workers": "mosaicml-streaming",
    "torchdata": "torchdata", "torchdata-workers": "torchdata",
}
STEPS, KILL_AT = 24, 17  # of two epochs of twelve; saved behind every fifth


def act(kind: str, folder: Path, name: str, ranks: int, **value: Any) -> list[dict[str, Any]]:
    """What each rank has ended with; nothing if they were killed."""
    value |= {"kind": kind, "out": str(folder / name)}
    environment = {"OMP_NUM_THREADS": "1", "LOADERS_DATA": str(folder / "data")}
    codes = run_ranks([str(HERE / "loaders_act.py"), json.dumps(value)], folder / name, ranks, environment)
    text = "\n".join((folder / f"{name}-{rank}.txt").read_text()[-3000:] for rank in range(ranks))
    if "kill_at" in value:
        assert -signal.SIGKILL in codes, text
        return []
    assert codes == [0] * ranks, text
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_resumes_exactly_and_on_other_ranks(kind: str, tmp_path: Path) -> None:
    if not is_installed(KINDS[kind]):
        pytest.skip(f"{KINDS[kind]}: not installed; make test-integrations runs this")
    if kind.startswith("streaming"):
        write_numbers(tmp_path / "data", 96)
    whole = act(kind, tmp_path, "whole", 2, runs=str(tmp_path / "a"))
    act(kind, tmp_path, "killed", 2, runs=str(tmp_path / "b"), kill_at=KILL_AT)
    alone = act(kind, tmp_path, "alone", 1, runs=str(tmp_path / "b"), step=10)
    resumed = act(kind, tmp_path, "resumed", 2, runs=str(tmp_path / "b"))
    for expected, actual in zip(whole, resumed, strict=True):
        assert actual["begun"] in (10, 15), "it resumed, behind a save"
        assert len(expected["numbers"]) == STEPS
        assert actual["numbers"] == expected["numbers"][actual["begun"] :]
        assert actual["parts"] == expected["parts"]
    # On one rank: the same samples at each step, whichever rank they were of before.
    assert [sorted(number) for number in alone[0]["numbers"]] == [
        sorted(first + second) for first, second in zip(*(row["numbers"][10:] for row in whole), strict=True)
    ]
