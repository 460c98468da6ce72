"""Samples of docs/RAY.md, run in their order, in a process of their own with its own cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, is_installed, run_ranks, samples

BEFORE = """
import os
import ray
import torch
import flowstone as fs
with fs.Checkpointer("runs/gpt") as checkpointer:
    checkpointer.save(1, {"model": torch.nn.Linear(2000, 1000)})
ray.init("local", num_cpus=2, include_dashboard=False)
storage = os.path.abspath("results")
"""


@pytest.mark.skipif(not is_installed("ray"), reason="`make test-integrations` installs ray")
def test_the_samples_of_the_page(tmp_path: Path) -> None:
    examples = samples("RAY.md")
    assert list(examples) == ["ray-train", "ray-train-run", "ray-cluster"]
    (tmp_path / "sample.py").write_text(BEFORE + "\n".join(examples.values()))
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": str(HERE)}
    codes = run_ranks([str(tmp_path / "sample.py")], tmp_path / "log", folder=tmp_path, environment=environment)
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]
