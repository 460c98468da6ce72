"""Functions that ranks run in tests of replicas that several ranks write."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
from acts import opened
from torch import nn

from flowstone.plan.assign_writers import assign_writers

STEPS = 4


def training() -> dict[str, object]:
    """A table that is most of the model, a parameter that is not dense, and an optimizer, alike on every rank."""
    torch.manual_seed(3)
    model = nn.Module()
    model.table = nn.Parameter(torch.randn(3001, 40))  # type: ignore[assignment]
    model.turned = nn.Parameter(torch.randn(70, 300).t())  # type: ignore[assignment]
    model.bias = nn.Parameter(torch.randn(40))  # type: ignore[assignment]
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def step(state: dict[str, object]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, path: str) -> list[tuple[int, int]]:
    """Save before each step, the optimizer's half from the second on; from the third on rank 1 has another order.

    Of each save, how many pieces of how many bytes this rank wrote.
    """
    state, written = training(), []
    with (
        mock.patch(
            "flowstone.coordination.rank_zero.assign_writers",
            partial(assign_writers, worth_bytes=1, block_bytes_min=4096),
        ),
        opened(path) as saver,
    ):
        for number in range(STEPS):
            turned = number >= 2 and rank == 1
            save = saver.save(number, dict(reversed(state.items())) if turned else state)
            step(state)
            save.committed.result(60)
            assignment = saver._saves._coordinator.assignment(saver._saves._planner.last.layout)  # type: ignore[union-attr]
            pieces = assignment.layout.pieces.take(assignment.positions.tolist(), assignment.blocks)  # type: ignore[union-attr]
            written.append((len(pieces), sum(piece.bytes for piece in pieces)))
    return written


def check(path: str) -> None:
    """One process loads each step, and finds what one process alone trains to."""
    expected = training()
    for number in range(STEPS):
        state = training()
        with opened(path) as saver:
            saver.load({"model": state["model"]} if number == 0 else state, step=number)
        _compare(state["model"], expected["model"])
        if number:
            _compare(state["optimizer"], expected["optimizer"])
        step(expected)


def _compare(actual: object, expected: object) -> None:
    left, right = actual.state_dict(), expected.state_dict()  # type: ignore[attr-defined]
    torch.testing.assert_close(left, right, rtol=0, atol=0)
