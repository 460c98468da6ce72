"""Saving, loading and reading without torch, in new processes of an environment that has all else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.errors import FlowstoneError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program in an environment without torch, and without other packages that are named."""
    weight = torch.arange(30.0).reshape(10, 3)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, {
            "x": weight, "half": weight.to(torch.bfloat16), "eighth": weight.to(torch.float8_e4m3fn), "model": model,
            "optimizer": optimizer, "plain": {"dtype": torch.float16, "n": 3, "data": b"b"}, "per": fs.PerRank([1]),
        })

    def run(program: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("torch", *without)) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
        begin = f"import site; site.addsitedir({str(site)!r})\n"
        begin += "import flowstone as fs, numpy as np, sys\nc = fs.open('run')\n"
        return subprocess.run(
            [sys.executable, "-S", "-c", begin + program], cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, check=False,
        )

    return run


def test_torch_is_not_there(run: Run) -> None:
    done = run("import torch")
    assert "No module named 'torch'" in done.stderr


def test_what_is_read_is_numpys(run: Run) -> None:
    done = run(
        "part = c['x'][0:8]\n"
        "assert type(part) is np.ndarray and part.shape == (8, 3) and part[7, 2] == 23\n"
        "assert (c.read('x') == np.arange(30).reshape(10, 3)).all() and c['x'].numpy()[1, 0] == 3\n"
        "assert (c.read('x', fs.Box((1, 0), (2, 2))) == [[3, 4], [6, 7]]).all()\n"
    )
    assert done.returncode == 0, done.stderr


def test_state_dicts_hold_arrays(run: Run) -> None:
    done = run(
        "model, optimizer = c.state_dict('model'), c.state_dict('optimizer')\n"
        "assert sorted(model) == ['bias', 'weight'] and model['weight'].shape == (2, 3)\n"
        "assert optimizer['param_groups'][0]['params'] == [0, 1] and optimizer['state'][1]['exp_avg'].shape == (2,)\n"
        "plain = c.state_dict('plain')\n"
        "assert plain['n'] == 3 and plain['data'] == b'b' and plain['dtype'].text == 'float16'\n"
        "assert c.state_dict('per', rank=0) == [1] and set(c.state_dict()) >= {'x', 'model', 'optimizer'}\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_types_that_numpy_lacks_are_those_of_ml_dtypes(run: Run) -> None:
    pytest.importorskip("ml_dtypes")
    done = run(
        "import ml_dtypes\n"
        "for name, kind in (('half', ml_dtypes.bfloat16), ('eighth', ml_dtypes.float8_e4m3fn)):\n"
        "    found = c[name][1:3]\n"
        "    assert found.dtype == kind and found.astype(np.float32).tolist() == [[3, 4, 5], [6, 7, 8]], found\n"
    )
    assert done.returncode == 0, done.stderr


def test_without_ml_dtypes_they_are_refused_with_what_to_install(run: Run) -> None:
    done = run("c['half'][0]", without=("ml_dtypes",))
    assert "UnsupportedStateError: numpy has no dtype bfloat16" in done.stderr
    assert "pip install ml_dtypes" in done.stderr


_SAVED = """
class Settings:
    def __init__(self, rate):
        self.rate, self.steps = rate, np.arange(3) * rate
    def state_dict(self):
        return {"rate": self.rate, "steps": self.steps}
    def load_state_dict(self, state):
        self.rate, self.steps = state["rate"], state["steps"]

def state(n):
    return {
        "a": np.arange(300_000.0).reshape(300, 1000) * n, "n": n, "bytes": b"x" * 100_000 * n,
        "nested": [n, {"x": np.full(3, n, np.int16), "text": f"{n}"}, (np.full((), n),)], "settings": Settings(n),
        "shard": fs.Shard(np.arange(4) * n, (4,), (0,)), "own": fs.PerRank({"n": n}),
        "generator": np.random.default_rng(n), "generators": fs.rng(),
    }

def as_plain(state):
    return repr([state["a"].tobytes(), state["n"], state["bytes"], state["nested"], state["settings"].state_dict(),
                 state["shard"].tensor.tobytes(), state["own"].value, state["generator"].bit_generator.state])
"""
"""A state without anything of torch."""


def test_arrays_and_plain_objects_are_saved_and_loaded(run: Run) -> None:
    done = run(
        _SAVED + "with fs.Checkpointer('new') as checkpointer:\n"
        "    for step in (1, 2):\n"
        "        checkpointer.save(step, state(step))\n"
        "        checkpointer.fence()\n"
        "with fs.Checkpointer('new') as checkpointer:\n"
        "    for step, verify_first in ((2, False), (1, True)):\n"
        "        loaded = state(0)\n"
        "        report = checkpointer.load(loaded, step=step, verify_first=verify_first)\n"
        "        assert report.step == step and as_plain(loaded) == as_plain(state(step)), loaded\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_what_was_saved_without_torch_is_loaded_with_it(run: Run, tmp_path: Path) -> None:
    done = run("with fs.Checkpointer('new') as c: c.save(5, {'a': np.arange(6.0), 'n': 3})")
    assert done.returncode == 0, done.stderr
    state = {"a": np.zeros(6), "n": 0}
    with fs.Checkpointer(tmp_path / "new") as checkpointer:
        checkpointer.load(state)
    assert state["n"] == 3
    assert np.array_equal(state["a"], np.arange(6.0))


def test_values_are_cast_by_numpy(run: Run) -> None:
    done = run(
        "state = {'x': np.zeros((10, 3), np.float64)}\n"
        "with fs.Checkpointer('run') as c: c.load(state, rules=[fs.Cast('x'), fs.Skip('*')])\n"
        "assert (state['x'] == np.arange(30).reshape(10, 3)).all()\n"
    )
    assert done.returncode == 0, done.stderr


def test_an_option_that_needs_torch_says_so(run: Run) -> None:
    done = run("fs.Checkpointer('new', every_step=True)")
    assert "FrameworkError: flowstone.journal needs torch, which is not installed" in done.stderr
    assert "pip install 'flowstone[torch]'" in done.stderr


def test_one_read_looks_for_torch_once(run: Run) -> None:
    done = run(
        "from flowstone.stage import allocation\n"
        "names, find_spec = [], allocation.find_spec\n"
        "allocation.find_spec = lambda name: names.append(name) or find_spec(name)\n"
        "assert len(c.state_dict('model')) == 2\n"
        "assert names == ['torch', 'torch'], names  # for the memory of all tensors, and for other values\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", [
    "fs.Flat", "fs.SplitTensor", "c.read('x', framework='torch')", "next(c.stream())", "fs.CompressedBucket",
])
def test_what_needs_torch_says_how_to_install_it(run: Run, program: str) -> None:
    done = run(program)
    assert done.stderr.strip().splitlines()[-2].startswith("flowstone.errors.FrameworkError: ")
    assert "needs torch, which is not installed" in done.stderr
    assert "pip install 'flowstone[torch]'" in done.stderr


def test_the_error_is_an_import_error_too() -> None:
    assert issubclass(fs.FrameworkError, ImportError)
    assert issubclass(fs.FrameworkError, FlowstoneError)
