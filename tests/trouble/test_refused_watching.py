"""Refused write protection: samples are compared instead, as event and manifest report; with "exact" it is an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import flowstone as fs
import sandbox
from flowstone.config import MIB, Watch
from flowstone.events.phases import Captured, Event
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from own_process import run_in_own_process, warnings_heard

pytestmark = pytest.mark.skipif(not sandbox.HAS_SECCOMP, reason="no seccomp filters here")


def _opened(path: Path, watch: Watch, events: list[Event]) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)
    return fs.Checkpointer(path, engine=engine, on_error="continue", budget_bytes=4 * MIB, on_event=events.append)


def _saved(path: Path, code: int) -> tuple[object, ...]:
    sandbox.refuse("userfaultfd", code)
    model = nn.Linear(1000, 2000)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    events: list[Event] = []
    refused = ""
    with warnings_heard() as heard, mock.patch.object(Captures, "pace", return_value=Pace(blocks=1, bytes_per_s=1)):
        with _opened(path / "auto", "auto", events) as checkpointer:
            io = checkpointer.save(1, state).committed.result().manifest.io
            quiet = not heard
            save = checkpointer.save(2, state)
            model.weight.data.add_(1)  # a dense change is found by samples
            checkpointer.fence()
            noticed = isinstance(save.committed.exception(60), fs.StateChangedError)
        with _opened(path / "exact", "exact", events) as checkpointer:
            try:
                checkpointer.save(1, state)
            except fs.StorageError as error:
                refused = str(error)
    captured = next(event for event in events if isinstance(event, Captured))
    return io.exact_bytes, io.sampled_bytes, io.sampled_because, captured.sampled_bytes, quiet, noticed, refused


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_userfaultfd_refused_is_samples_and_what_insists_is_refused(tmp_path: Path, code: int) -> None:
    exact, sampled, because, event, quiet, noticed, refused = run_in_own_process(_saved, tmp_path, code)
    assert (exact, sampled, event, quiet, noticed) == (0, 8_000_000, 8_000_000, True, True)
    assert because == f"userfaultfd is refused ({os.strerror(code)})"
    assert 'watch="exact" does not work here: memory cannot be watched for writes' in refused
    assert os.strerror(code) in refused
