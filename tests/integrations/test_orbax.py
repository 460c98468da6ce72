"""Arrays on several devices that the installed Orbax saves are imported, element for element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import is_installed, run_ranks

import flowstone as fs

ACT = Path(__file__).resolve().parent / "orbax_act.py"
pytestmark = pytest.mark.skipif(
    not is_installed("orbax-checkpoint"), reason="`make test-integrations` installs orbax-checkpoint"
)


def check_parameters(store: Path) -> None:
    checkpoint = fs.open(store)
    assert torch.equal(checkpoint.read("params.dense.kernel"), torch.arange(600.0).reshape(20, 30))
    assert torch.equal(checkpoint.read("params.dense.bias"), torch.arange(30, dtype=torch.bfloat16))
    for number in range(3):
        assert torch.equal(checkpoint.read(f"params.layers.{number}"), torch.full((4, 6), float(number)))


def test_what_orbax_saved_comes_in(tmp_path: Path) -> None:
    codes = run_ranks([str(ACT), str(tmp_path / "saved")], tmp_path / "log")
    assert codes == [0], (tmp_path / "log-0.txt").read_text()
    for name in ("ocdbt", "plain", "zarr3", "raw"):
        assert fs.import_checkpoint(tmp_path / "saved" / name, tmp_path / name).skipped == ()
        check_parameters(tmp_path / name)
        objects = fs.open(tmp_path / name).objects
        assert (objects["step"], objects["rate"], objects["note"]) == (7, 0.5, "warm")
        assert objects["opt_state"][1:] == [None, {}]
        assert fs.open(tmp_path / name).read("opt_state.0.mu").tolist() == [0, 1, 2, 3, 4]
    fs.import_checkpoint(tmp_path / "saved" / "managed", tmp_path / "managed", rules=fs.Skip("extra"))
    check_parameters(tmp_path / "managed")
