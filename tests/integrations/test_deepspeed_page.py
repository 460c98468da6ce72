"""Samples of docs/DEEPSPEED.md, run in their order, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import is_installed, run_ranks, samples

BEFORE = """
import os
import deepspeed, torch
import flowstone as fs
model = torch.nn.Sequential(torch.nn.Linear(160, 160), torch.nn.ReLU(), torch.nn.Linear(160, 5))
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
def batch():
    return torch.randn(4, 160)
"""
SLOT = """
path, client_state = engine.load_checkpoint("runs/gpt")
assert engine.global_steps == 4 and client_state["epoch"] == 1
"""
AFTER = "print('done', flush=True)\nos._exit(0)  # without the end of gloo's threads, which may abort a process\n"


@pytest.mark.skipif(
    not is_installed("deepspeed"), reason="`make test-integrations` installs deepspeed"
)
def test_the_engine_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = samples("DEEPSPEED.md")
    assert list(examples) == ["deepspeed", "deepspeed-reads", "deepspeed-slot"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample.py").write_text(BEFORE + "".join(examples.values()) + SLOT + AFTER)
    command, environment = [str(tmp_path / "sample.py")], {"DS_ACCELERATOR": "cpu"}
    codes = run_ranks(command, tmp_path / "log", environment=environment, is_launched=True)
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]
