"""A task on a node with another file system at the same path reports that; a mount of its own hides the directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flowstone as fs

_ACT = """
import subprocess, sys
import flowstone as fs
act, run, target, hidden = sys.argv[1:]
class Elsewhere:
    cpus = 1
    def each(self, work, shared, parts):
        subprocess.run(["mount", "-t", "tmpfs", "none", hidden], check=True)
        for part in parts:
            yield work(shared, part)
try:
    if act == "verify":
        fs.open(run).verify(cluster=Elsewhere())
    elif act == "export":
        fs.export(run, target, cluster=Elsewhere())
    else:
        fs.import_checkpoint(run, target, section="model", cluster=Elsewhere())
except fs.StorageError as error:
    print(error)
"""


def told(tmp_path: Path, act: str, hidden: str) -> str:
    """What a conversion of `a/run` into `b/target` says once `hidden` is another file system."""
    (tmp_path / "b").mkdir()
    with fs.Checkpointer(tmp_path / "a" / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(1000, 1000)}})
    paths = [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "target"), str(tmp_path / hidden)]
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", _ACT, act, *paths], capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"a mount needs rights: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("act", "hidden", "missing"),
    [("verify", "a", "a/run/step-00000001"), ("export", "a", "a/run/step-00000001/rank-00000.safetensors"),
     ("export", "b", "b/.target."), ("import", "a", "a/run/step-00000001/rank-00000.safetensors"),
     ("import", "b", "b/target/.saving-00000000-")],
)
def test_a_node_with_another_file_system_says_so_by_name(tmp_path: Path, act: str, hidden: str, missing: str) -> None:
    message = told(tmp_path, act, hidden)
    assert f"of the Ray cluster sees another {tmp_path}/{missing}" in message
    assert "use a file system that every node has at the same path, or run without --ray" in message
    assert not list((tmp_path / "b").rglob("step-*")), "nothing is committed"
