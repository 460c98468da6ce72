"""If a thread cannot be started, only that save or load fails: the next one works, and so does closing."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from large import ENGINE, entries, loaded, state

import flowstone as fs
import sandbox
from own_process import run_in_own_process


def _once_without_threads(path: Path) -> tuple[list[str], list[str], list[bool]]:
    torch.set_num_threads(1)  # its own threads end the process where they cannot start
    sandbox.count_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    message, same = [], []
    with fs.Checkpointer(path, engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        for step in (2, 3):
            resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
            with pytest.raises(fs.StorageError) as refused:
                checkpointer.save(step, state(step))
            message.append(str(refused.value))
            with pytest.raises((fs.StorageError, fs.BudgetError)) as caught:  # the arena of a load has a thread, too
                checkpointer.load(state(0))
            message.append(str(caught.value))
            resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
            same.append(loaded(checkpointer, 1.0))
        checkpointer.save(4, state(4)).committed.result()
        same.append(loaded(checkpointer, 4.0))
    return message, entries(path), same


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_save_or_load_whose_thread_cannot_start_fails_alone(tmp_path: Path) -> None:
    message, left, same = run_in_own_process(_once_without_threads, tmp_path / "run")
    assert len(message) == 4
    for text in message:
        assert os.strerror(errno.EAGAIN) in text, text
        assert "-u, pids.max" in text, text
    assert left == ["step-00000001", "step-00000004"]
    assert same == [True, True, True]
