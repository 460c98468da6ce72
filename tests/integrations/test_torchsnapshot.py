"""Snapshots of the installed torchsnapshot equal the golden ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchsnapshot", reason="`make test-integrations` installs it")

import flowstone as fs
from golden.make_torchsnapshot import ALONE, TOGETHER, take_alone, take_together

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def test_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "")
    take_alone(tmp_path / "taken")
    assert fs.diff(tmp_path / "taken", ALONE, skip=("odd.quantised", "rng.*")).equal
    report = fs.import_checkpoint(tmp_path / "taken", tmp_path / "run", rules=fs.Skip("odd.quantised"))
    assert report.kind == "torchsnapshot"


def test_three_ranks(tmp_path: Path) -> None:
    take_together(tmp_path / "taken")
    assert fs.diff(tmp_path / "taken", TOGETHER, skip="rank*").equal
