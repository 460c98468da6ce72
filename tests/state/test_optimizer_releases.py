"""Optimizers saved by earlier releases of torch: numbers instead of tensors, which torch converts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs

KINDS = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adafactor"]
FORMS = ["import", "objects", "numbered"]


def trained(kind: str, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    for i in range(steps):
        step(model, optimizer, i)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 4), 0.1 * i)).square().mean().backward()
    optimizer.step()


def make_old(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict() as it was when counters were plain numbers."""
    old = copy.deepcopy(optimizer.state_dict())
    for slots in old["state"].values():
        for key, value in slots.items():
            if value.dim() == 0:
                slots[key] = int(value) if key == "step" else float(value)
    return old


@pytest.mark.parametrize("live", [False, True], ids=["fresh", "rollback"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_become_tensors_as_in_torchs_own_load(tmp_path: Path, kind: str, form: str, live: bool) -> None:
    model, optimizer = trained(kind, 3)
    old, weights = make_old(optimizer), copy.deepcopy(model.state_dict())
    if form == "import":
        torch.save({"model": weights, "optimizer": old}, tmp_path / "old.pt")
        fs.import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    else:
        for parameter, slots in zip(model.parameters(), old["state"].values(), strict=True):
            optimizer.state[parameter] = dict(slots)
        with fs.Checkpointer(tmp_path / "run") as ckpt:
            state = {"model": model, "optimizer": optimizer}
            if form == "objects":
                ckpt.save(3, state)
            else:
                ckpt.save_state_dict(3, {"model": weights, "optimizer": old})
    expected, theirs = trained(kind, 0)
    expected.load_state_dict(weights)
    theirs.load_state_dict(copy.deepcopy(old))
    target, ours = trained(kind, 5 if live else 0)
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.load({"model": target, "optimizer": ours})
    for i in (3, 4):
        step(expected, theirs, i)
        step(target, ours, i)
    for param, other in zip(expected.parameters(), target.parameters(), strict=True):
        assert torch.equal(param, other)
        assert theirs.state[param].keys() == ours.state[other].keys()
        assert all(torch.equal(theirs.state[param][key], ours.state[other][key]) for key in theirs.state[param])


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 2)])
def test_factors_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Numbers alone say which parameter is meant."""
    _, optimizer = trained("Adafactor", 3)
    target = torch.nn.Linear(*shape)
    weights = copy.deepcopy(target.state_dict())
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save_state_dict(3, {"model": weights, "optimizer": optimizer.state_dict()})
        with pytest.raises(fs.MismatchError, match=r"optimizer\.state\.model\.weight\.(row|col)_var"):
            ckpt.load({"model": target, "optimizer": torch.optim.Adafactor(target.parameters())})


class Odd(torch.optim.SGD):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.param_groups[0].get("odd"):
            raise KeyError("odd")


def test_a_conversion_that_fails_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Odd(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = True
    optimizer.state[model.weight]["k"] = 3
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        with pytest.raises(fs.StateError, match=r"__setstate__\(\) of Odd raised KeyError"):
            ckpt.load({"model": model, "optimizer": optimizer})
