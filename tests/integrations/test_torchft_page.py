"""Samples of docs/TORCHFT.md, run in their order, by a single replica group."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import HERE, is_installed, run_ranks, samples

BEFORE = """
import os
import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from prelude import batch_of, data, fs, loss_of, model
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
os.environ["TORCHFT_LIGHTHOUSE"] = "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
"""
AFTER = "print('done', flush=True)\nos._exit(0)  # without the end of gloo's threads, which may abort a process\n"


@pytest.mark.skipif(not is_installed("torchft-nightly"), reason="`make test-integrations` installs torchft-nightly")
def test_the_samples_of_the_page(tmp_path: Path) -> None:
    examples = samples("TORCHFT.md")
    assert list(examples) == ["torchft", "torchft-reads"]
    (tmp_path / "sample.py").write_text(BEFORE + "\n".join(examples.values()) + AFTER)
    environment = {"PYTHONPATH": str(HERE), "RECIPE_RUN": str(tmp_path / "run"), "RECIPE": "gpt"}
    codes = run_ranks(
        [str(tmp_path / "sample.py")], tmp_path / "log", folder=tmp_path, environment=environment, is_launched=True
    )
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]
