"""The wheels, installed without a compiler, and used by each available interpreter."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from wheels.bare import DIST, Bare, interpreters, needs_wheels, the_sdist, wheel_for

pytestmark = needs_wheels
ROOT = Path(__file__).resolve().parents[2]
_READ = """
import sys
import flowstone as fs
checkpoint = fs.open(sys.argv[1], engine=fs.EngineOptions(backend=sys.argv[2]))
for name in checkpoint.tensors:
    if "bfloat16" not in checkpoint.tensors[name].dtype and "float8" not in checkpoint.tensors[name].dtype:
        checkpoint.read(name, framework="numpy")
assert not checkpoint.verify().findings
assert "torch" not in sys.modules
"""
_TRAIN = """
import torch
import flowstone as fs
for backend in ("io_uring", "posix"):
    weights = torch.randn(1000, 1000)
    with fs.Checkpointer(backend, engine=fs.EngineOptions(backend=backend)) as checkpointer:
        checkpointer.save(1, {"weights": weights})
    state = {"weights": torch.zeros(1000, 1000)}
    with fs.Checkpointer(backend, engine=fs.EngineOptions(backend=backend)) as checkpointer:
        checkpointer.load(state)
    assert torch.equal(state["weights"], weights)
"""


def test_a_wheel_for_each_and_one_sdist() -> None:
    names = sorted(path.name for path in DIST.glob(f"*_{os.uname().machine}.whl"))
    assert [name.split("-")[2:4] for name in names] == [["cp311", "cp311"], ["cp312", "abi3"]]
    assert the_sdist().name.startswith("flowstone-")


@pytest.mark.parametrize("version", interpreters(), ids=lambda version: "{}.{}".format(*version))
def test_it_installs_and_reads_a_checkpoint_with_no_compiler_no_network_and_no_torch(
    version: tuple[int, int], tmp_path: Path
) -> None:
    bare = Bare(interpreters()[version], tmp_path)
    bare.fetch(wheel_for(version))
    bare.install("flowstone")
    assert bare.run("flowstone", "--version").startswith("flowstone ")
    store = shutil.copytree(ROOT / "tests/golden/v1", tmp_path / "store")
    assert "42" in bare.run("flowstone", "ls", store)
    for backend in ("io_uring", "posix"):
        bare.run("python", "-c", _READ, store, backend)
    results = bare.run("flowstone", "demo", "--small", status=1)
    assert "pip install 'flowstone[torch]'" in results
    assert "Traceback" not in results


def test_the_demo_runs_from_a_wheel(tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    (torch,) = [name for name in groups["dev"] if name.startswith("torch==")]
    bare = Bare(sys.executable, tmp_path)
    bare.fetch(wheel_for(sys.version_info[:2]), torch)
    bare.install("flowstone[torch]")
    bare.run("python", "-c", _TRAIN)
    assert "Act five" in bare.run("flowstone", "demo", "--small"), "its status says that every claim held"
