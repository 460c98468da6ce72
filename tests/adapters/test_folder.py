"""A folder of checkpoints under names that a framework gives them: those who save there leave each other alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flowstone as fs
from flowstone.adapters.dcp.target import target_of
from flowstone.adapters.folder import Folder
from flowstone.adapters.lightning.reading import await_writer


@pytest.mark.usefixtures("warm")
def test_two_that_save_in_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    folder, target = Folder(tmp_path, fs.EngineOptions()), target_of(tmp_path / "x-7", None)
    claim = folder.begin(target, keep_name=True)
    (tmp_path / target.draft_directory / "manifest.json").touch()
    held = sorted(os.listdir(tmp_path))
    sibling = Folder(tmp_path, fs.EngineOptions())  # which sweeps
    assert sorted(os.listdir(tmp_path)) == held
    assert os.listdir(tmp_path / target.draft_directory) == ["manifest.json"]
    with pytest.raises(fs.LockedError, match="this process already saves"):
        sibling.begin(target, keep_name=True)
    with pytest.raises(fs.LockedError, match="still being saved to"):
        await_writer(tmp_path / "x-7", deadline_s=0)
    script = ("import sys, pathlib; from flowstone.adapters.dcp.claim import is_claimed;"
              "print(is_claimed(pathlib.Path(sys.argv[1]), sys.argv[2]))")
    command = [sys.executable, "-c", script, str(tmp_path), target.draft_directory]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n", "the lock is there"
    folder.give_up(target, claim)
    sibling.give_up(target, sibling.begin(target, keep_name=True))
    assert os.listdir(tmp_path) == []
