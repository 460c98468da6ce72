"""Jobs of tests/store/test_object_checkpoints.py, in one program, so that one process is started and the others forked.

    commit URL NUMBER COUNT   commits step 2, and ignores the lock; its tensor has that many numbers (0: it has none)
    train URL MOST            trains and saves each step, until it is killed, or has made that many

`train` prints the step with which it begins, and each committed step. It ends with an error if the loaded state is not
the result of its steps.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import torch

import flowstone as fs
from flowstone.store.objects.store import ObjectStore
from flowstone.store.wrap import Wrapper

WIDTH = 1200


class Unlocked(Wrapper):
    def lock(self, holder: str) -> None: ...
    def check_lock(self) -> None: ...
    def unlock(self) -> None: ...


def make() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}


def train(state: dict[str, object]) -> None:
    """A step whose result is exact: all numbers stay small integers over a power of two."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer.step()


def commit_at_once(url: str, number: int, count: int) -> None:
    state: dict[str, object] = {"job": number}
    if count:
        state["x"] = np.full(count, float(number))
    ckpt = fs.Checkpointer(Unlocked(ObjectStore(url)))
    ckpt.rewind(1)  # a writer sweeps when it begins; without a lock it would sweep what the other one saves by then
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        ckpt.save(2, state).committed.result(60)
    except fs.FlowstoneError as error:
        print("refused", type(error).__name__, error.message, flush=True)
    else:
        print("committed", flush=True)
    with contextlib.suppress(fs.FlowstoneError):  # the same failure again, if it was not given yet
        ckpt.close()


def train_on(url: str, most: int) -> None:
    state, expected = make(), make()
    for row in (state, expected):
        for parameter in row["model"].parameters():  # type: ignore[attr-defined]
            parameter.data.zero_()
    with fs.Checkpointer(url, keep=3) as ckpt:
        begin = ckpt.load(state).step if ckpt.latest() is not None else 0
        for _ in range(begin):
            train(expected)
        for found, wanted in zip(state["model"].parameters(), expected["model"].parameters(), strict=True):  # type: ignore[attr-defined]
            assert torch.equal(found, wanted), f"step {begin} is not what was saved"
        print("began", begin, flush=True)
        for step in range(begin + 1, begin + 1 + most):
            train(state)
            ckpt.save(step, state).committed.result(60)
            print("committed", step, flush=True)


if __name__ == "__main__":
    verb, url, *numbers = sys.argv[1:]
    {"commit": commit_at_once, "train": train_on}[verb](url, *map(int, numbers))
