"""A job that trains and saves each step into a bucket, until it is killed: URL, and how many steps at most.

It says with which step it begins, and each step that is committed. It ends with an error if what it has loaded is not
what its steps make.
"""

from __future__ import annotations

import sys

import torch

import flowstone as fs

WIDTH = 1200


def make() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}


def train(state: dict[str, object]) -> None:
    """A step whose result is exact: all numbers stay small integers over a power of two."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for one in model.parameters():
        one.grad = torch.full_like(one, -1.0)
    optimizer.step()


def main() -> None:
    url, most = sys.argv[1], int(sys.argv[2])
    state, expected = make(), make()
    for one in (state, expected):
        for parameter in one["model"].parameters():  # type: ignore[attr-defined]
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
    main()
