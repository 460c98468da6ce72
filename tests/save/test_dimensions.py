"""Tensors with as many dimensions as torch supports, in any order in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flowstone as fs

LONG = 17  # sides of 2; all others are 1


def turned(ndim: int, factor: float = 1.0) -> torch.Tensor:
    """A tensor that lies the other way round: no two of its elements are neighbours."""
    shape = [1] * (ndim - LONG) + [2] * LONG
    return (torch.arange(2.0**LONG) * factor).reshape(shape).permute(*reversed(range(ndim)))


@pytest.mark.parametrize("ndim", [17, 20, 64])
def test_a_turned_tensor_of_more_than_16_dimensions_is_saved_and_loaded(store: Path, ndim: int) -> None:
    lazy = torch.nn.Module()
    lazy.weight = torch.nn.Parameter(turned(ndim))
    state = {"lazy": lazy, "optimizer": torch.optim.SGD(lazy.parameters()), "early": turned(ndim, 2.0)}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        with torch.no_grad():
            lazy.weight.zero_()
        state["early"] = turned(ndim, 0.0)
        checkpointer.load(state)
    assert torch.equal(lazy.weight, turned(ndim))
    assert torch.equal(state["early"], turned(ndim, 2.0))  # type: ignore[arg-type]
    assert torch.equal(fs.open(store).read("early"), turned(ndim, 2.0))
