"""Samples of docs/RAY.md, run in the order in which they stand, by a process of their own on a cluster of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, is_installed, run_ranks, samples

BEFORE = """
import torch
import flowstone as fs
with fs.Checkpointer("runs/gpt") as checkpointer:
    checkpointer.save(1, {"model": torch.nn.Linear(2000, 1000)})
"""


@pytest.mark.skipif(not is_installed("ray"), reason="`make test-integrations` installs ray")
def test_the_samples_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(BEFORE + "\n".join(samples("RAY.md").values()))
    environment = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(HERE)}
    codes = run_ranks([str(tmp_path / "sample.py")], tmp_path / "log", folder=tmp_path, environment=environment)
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]
