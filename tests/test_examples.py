"""The programs of examples/, run as their first lines describe."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from warm_start import warm_start

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def run(*arguments: object) -> str:
    with warm_start(str(EXAMPLES / "train.py"), "torch.distributed.run"):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(store: Path, steps: int) -> str:
    return run(EXAMPLES / "train.py", store, "--steps", steps)


def train_on_ranks(ranks: int, store: Path, steps: int) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return run(*launch, EXAMPLES / "train_ddp.py", store, "--steps", steps)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store that twenty steps were trained into, not to be changed, and what that training said."""
    store = tmp_path_factory.mktemp("begun") / "run"
    return store, train(store, 20)


def test_training_that_resumes_equals_one_that_was_left_alone(begun: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(begun[0], tmp_path / "resumed")
    resumed = train(tmp_path / "resumed", 40)
    assert resumed.startswith("resumed after step 20\n")
    assert begun[1] + resumed.partition("\n")[2] == train(tmp_path / "alone", 40)


def test_two_ranks_train_and_one_goes_on(tmp_path: Path) -> None:
    assert "step 10: loss" in train_on_ranks(2, tmp_path, 10)
    resumed = train_on_ranks(1, tmp_path, 20)
    assert "resumed after step 10 on 1 ranks" in resumed
    assert "step 20: loss" in resumed


def test_a_checkpoint_is_inspected_without_torch(begun: tuple[Path, str]) -> None:
    inspect = EXAMPLES / "inspect_checkpoint.py"
    results = run("-c", _WITHOUT_TORCH, inspect, begun[0], "--tensor", "model.0.bias", "--rows", "0:3")
    assert f"step 20 at {begun[0]}" in results
    assert "model.0.weight  float32  (256, 64)" in results
    assert "step = 20" in results
    assert re.search(r"\[ *-?\d\S* +-?\d\S* +-?\d\S*\]\s*$", results), "three numbers"


def test_every_example_says_how_it_is_run() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert programs
    for program in programs:
        assert f"examples/{program.name} runs/" in program.read_text().split('"""')[1]
        assert len(program.read_text().splitlines()) <= 60, "an example is read in a minute"
