"""Reading where torch is not installed: an environment that has all else, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

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
        begin += "import flowstone as fs, numpy as np\nc = fs.open('run')\n"
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
        "import sys; assert 'torch' not in sys.modules\n"
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
    assert "UnsupportedStateError: numpy has no bfloat16" in done.stderr
    assert "pip install ml_dtypes" in done.stderr


@pytest.mark.parametrize("program", [
    "fs.Checkpointer('new')", "fs.rng()", "from flowstone import PerRank", "c.read('x', framework='torch')",
    "next(c.stream())", "fs.Shard",
])
def test_what_needs_torch_says_how_to_install_it(run: Run, program: str) -> None:
    done = run(program)
    assert done.stderr.strip().splitlines()[-2].startswith("flowstone.errors.FrameworkError: ")
    assert "needs torch, which is not installed" in done.stderr
    assert "pip install 'flowstone[torch]'" in done.stderr


def test_the_error_is_an_import_error_too() -> None:
    assert issubclass(fs.FrameworkError, ImportError)
    assert issubclass(fs.FrameworkError, FlowstoneError)
