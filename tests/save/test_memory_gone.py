"""Memory that is freed in place during its capture: the save fails by name, and the next save works.

In processes of their own, since such a capture has ended the process by a signal before.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing  # teaches queues to pass tensors on by sharing their memory
from torch import nn

import flowstone as fs
from flowstone.save.pacing import Captures
from flowstone.store.base import Pace
from own_process import run_in_own_process

MIB = 1 << 20
CRAWL = Pace(blocks=1, bytes_per_s=1)  # the first request goes out, the others wait until something expedites it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Net(nn.Module):
    """Four layers of 4 MiB; the first is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))
        self.layers[0].weight = nn.Parameter(torch.randn(1024, 1024).t())


def _share(net: Net) -> None:
    net.share_memory()


def _put(net: Net) -> None:
    multiprocessing.get_context("fork").SimpleQueue().put(net.state_dict())


def _resize(net: Net) -> None:
    for parameter in net.parameters():
        parameter.untyped_storage().resize_(0)


def _resize_one(net: Net) -> None:
    net.layers[2].weight.untyped_storage().resize_(0)


ACTS: dict[str, tuple[Callable[[Net], None], tuple[int, ...]]] = {
    "share_memory": (_share, (0, 1, 2, 3)),
    "queue put": (_put, (0, 1, 2, 3)),
    "resize_(0)": (_resize, (0, 1, 2, 3)),
    "resize_(0) of one": (_resize_one, (2,)),
}


def _training() -> tuple[Net, dict[str, Any]]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, {"model": net, "optimizer": optimizer, "step": 0}


def _opened(path: Path) -> fs.Checkpointer:
    """With an arena of two blocks, so that most of the state finds no room in it."""
    engine = fs.EngineOptions(request_bytes=2 * MIB)
    return fs.Checkpointer(path, engine=engine, budget_bytes=4 * MIB)


def _save_and(path: Path, act: str, unmapped: bool) -> tuple[str, tuple[str, ...], bool, bool]:
    # What is freed goes back to the system, or stays in the heap, where the allocator's lists and others come to lie.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10 if unmapped else 32 << 20)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 0 if unmapped else 1 << 30)
    net, state = _training()
    with _opened(path) as checkpointer, mock.patch.object(Captures, "pace", return_value=CRAWL):
        save = checkpointer.save(1, state)
        ACTS[act][0](net)
        error = save.committed.exception()
        assert isinstance(error, fs.StateChangedError), error
        fresh, state = _training()
        checkpointer.save(2, state).committed.result()
    module, into = _training()
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.load(into)
    same = all(torch.equal(a, b) for a, b in zip(fresh.parameters(), module.parameters(), strict=True))
    return str(error), error.names, error.gone, same and fs.open(path).verify().sound


@pytest.mark.parametrize("unmapped", [True, False], ids=["unmapped", "in the heap"])
@pytest.mark.parametrize("act", ACTS)
def test_memory_that_goes_away_during_a_capture_fails_that_save_by_name(
    tmp_path: Path, act: str, unmapped: bool
) -> None:
    message, names, gone, sound = run_in_own_process(_save_and, tmp_path, act, unmapped)
    # A capture that has found something gone ends there, and others may go after it.
    assert names
    assert set(names) <= {f"model.layers.{act}.weight" for act in ACTS[act][1]}
    assert gone
    assert "was freed before it was captured" in message
    assert "call fence()" in message
    assert sound
