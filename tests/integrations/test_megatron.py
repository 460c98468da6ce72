"""A distributed checkpoint of the installed megatron-core equals the golden one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="`make test-integrations` installs it")

import flowstone as fs
from golden.make_megatron import PLACE, save


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    assert fs.diff(tmp_path / "saved", PLACE).equal
    assert fs.import_checkpoint(tmp_path / "saved", tmp_path / "run").kind == "megatron"
