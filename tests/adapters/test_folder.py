"""A folder of checkpoints with a framework's names: several jobs that save there do not disturb each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flowstone as fs
from flowstone.adapters.dcp.target import target_of
from flowstone.adapters.folder import CheckpointFolder
from flowstone.adapters.lightning.reading import await_writer


@pytest.mark.usefixtures("warm")
def test_two_that_save_in_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    folder, target = CheckpointFolder(tmp_path, fs.EngineOptions()), target_of(tmp_path / "x-7", None)
    claim = folder.begin(target, keep_name=True)
    (tmp_path / target.draft_directory / "manifest.json").touch()
    held = sorted(os.listdir(tmp_path))
    sibling = CheckpointFolder(tmp_path, fs.EngineOptions())  # which sweeps
    assert sorted(os.listdir(tmp_path)) == held
    assert os.listdir(tmp_path / target.draft_directory) == ["manifest.json"]
    with pytest.raises(fs.LockedError, match="this process is already saving"):
        sibling.begin(target, keep_name=True)
    with pytest.raises(fs.LockedError, match="is still running"):
        await_writer(tmp_path / "x-7", deadline_s=0)
    script = ("import sys, pathlib; from flowstone.adapters.dcp.claim import is_claimed;"
              "print(is_claimed(pathlib.Path(sys.argv[1]), sys.argv[2]))")
    command = [sys.executable, "-c", script, str(tmp_path), target.draft_directory]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n", "the lock is there"
    folder.abandon(target, claim)
    sibling.abandon(target, sibling.begin(target, keep_name=True))
    assert os.listdir(tmp_path) == []
