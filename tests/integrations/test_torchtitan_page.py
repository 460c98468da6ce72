"""Samples of docs/TORCHTITAN.md, run in their order, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import is_installed, run_ranks, samples

HERE = Path(__file__).resolve().parent
BEFORE = f"""
import os, sys
from pathlib import Path
import torch.distributed as dist
import flowstone as fs
sys.path.insert(0, {str(HERE)!r})
from torchtitan_act import Job
dist.init_process_group("gloo")
"""
BETWEEN = """
class Given:
    Config = staticmethod(lambda **_: checkpoint)
job = Job(Path("outputs"), Given)
assert not job.load()
job.train(5)
job.checkpointer.close()
"""
AFTER = "print('done', flush=True)\nos._exit(0)  # without the end of gloo's threads, which may abort a process\n"


@pytest.mark.skipif(
    not is_installed("torchtitan"), reason="`make test-integrations` installs torchtitan"
)
def test_the_configuration_of_the_page(tmp_path: Path) -> None:
    result = samples("TORCHTITAN.md")
    assert list(result) == ["torchtitan", "torchtitan-reads"]
    (tmp_path / "sample.py").write_text(BEFORE + result["torchtitan"] + BETWEEN + result["torchtitan-reads"] + AFTER)
    codes = run_ranks([str(tmp_path / "sample.py")], tmp_path / "log", folder=tmp_path, is_launched=True)
    assert codes == [0], (tmp_path / "log-0.txt").read_text()[-3000:]
