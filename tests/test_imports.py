"""The modules of ours that a process imports before it can load, and during a load: these delay every start."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs

_MODULES_MAX = 192  # of ours, with one `__init__` for each folder
_OBJECTS_MAX = 19_560  # that the collector tracks, dependencies' not counted; more where each record is a dataclass
_START = """
import gc, json, sys
import msgspec.json, torch
gc.disable()
before = set(sys.modules)
tracked = gc.get_count()[0]
import flowstone as fs
fs.Checkpointer
made = gc.get_count()[0] - tracked
checkpointer = fs.Checkpointer(sys.argv[1])
state = {"m": {"w": torch.zeros(4)}, "step": 0}
"""
_TELL = "\nprint(json.dumps([made, sorted(set(sys.modules) - before), state['step']]))\n"
# What several ranks need for loads, other stores, and what only a call of the user's brings.
_UNUSED = {
    "flowstone.cli", "flowstone.layouts.layout_rules", "flowstone.inspection.explain", "flowstone.node_reads.sharing",
    "flowstone.node_reads.assign_readers", "flowstone.node_reads.node_reads", "flowstone.store.memory",
    "flowstone.node_reads.shared_ring", "flowstone.store.wrap", "numpy.random", "rich", "torch._dynamo",
}


def in_a_process(root: Path, act: str = "") -> tuple[int, set[str], Any]:
    """Objects made by the import, the modules that came after torch, and the step that is loaded."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_START}{act}{_TELL}", str(root)], capture_output=True, text=True, check=True
    )
    made, modules, step = json.loads(done.stdout)
    return made, set(modules), step


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "flowstone"}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """As pip leaves an installed package: what compiles leaves hundreds of objects more, and need not be measured."""
    assert compileall.compile_dir(Path(fs.__file__).parent, quiet=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, {"m": {"w": torch.ones(4)}, "step": 7})
    return tmp_path / "run"


def test_the_class_that_loads_comes_without_what_a_process_by_itself_does_not_need(root: Path) -> None:
    made, modules, _ = in_a_process(root)
    assert not modules & _UNUSED
    assert len(ours(modules)) <= _MODULES_MAX
    assert made <= _OBJECTS_MAX, "every 700 of them are one more collection, of torch's objects, too, at times"


def test_a_load_in_a_process_by_itself_brings_a_few_modules_more(root: Path) -> None:
    act = "\ncheckpointer.latest(); checkpointer.load(state); checkpointer.fence(); checkpointer.wait()\n"
    _, before, _ = in_a_process(root)
    _, modules, step = in_a_process(root, f"{act}checkpointer.close()\n")
    assert step == 7
    assert not modules & _UNUSED
    assert len(ours(modules) - before) <= 5


def test_the_memory_agent_is_small() -> None:
    """It is to hold memory, not to take it."""
    act = "import json, sys; import flowstone.agent.__main__; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", act], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    assert not modules & {"torch", "numpy", "rich", "typer"}
    assert len(ours(modules)) <= 40
