"""Functions for ranks with the state dicts that torch returns for sharded modules and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acts import as_it_lies, fill, local, opened, pattern, put, state_of, tensors
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import flowstone as fs


def dicts_of(state: dict[str, Any], form: str) -> dict[str, Any]:
    """The state dicts of a state, its optimizer's "named" or "flat"."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return {
        "model": get_model_state_dict(state["model"]),
        "optimizer": get_optimizer_state_dict(state["model"], state["optimizer"], options=options), "step": 0,
    }


def save_dicts(rank: int, path: str, how: str, form: str) -> None:
    state = state_of(how)
    put(state, pattern(state))
    with opened(path) as checkpointer:
        checkpointer.save_state_dict(1, dicts_of(state, form)).committed.result(60)


def load_dicts(rank: int, path: str, how: str, form: str) -> None:
    """Load into state dicts, hand them over, and find every element where it belongs."""
    state = state_of(how)
    fill(state, -1)
    dicts = dicts_of(state, form)
    with opened(path) as checkpointer:
        assert checkpointer.load_state_dict(dicts).step == 1
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_model_state_dict(state["model"], dicts["model"])
    set_optimizer_state_dict(state["model"], state["optimizer"], dicts["optimizer"], options=options)
    for tensor, whole in zip(tensors(state), pattern(state), strict=True):
        assert torch.equal(local(tensor), local(as_it_lies(tensor, whole)))


def load_objects(rank: int, path: str, how: str) -> None:
    """Load the same into the objects themselves."""
    state = state_of(how)
    fill(state, -1)
    del state["rng"]
    with opened(path) as checkpointer:
        checkpointer.load(state)
    for tensor, whole in zip(tensors(state), pattern(state), strict=True):
        assert torch.equal(local(tensor), local(as_it_lies(tensor, whole)))


UNUSED = "body.1."  # a layer that no step has used yet


def save_dicts_without_slots(rank: int, path: str, how: str) -> None:
    state = state_of(how)
    put(state, pattern(state))
    for name, parameter in state["model"].named_parameters():
        if name.startswith(UNUSED):
            del state["optimizer"].state[parameter]
    with opened(path) as checkpointer:
        checkpointer.save_state_dict(1, dicts_of(state, "named")).committed.result(60)


def load_dicts_without_slots(rank: int, path: str, how: str) -> None:
    """What the checkpoint lacks is lost on every rank; a flattened dict is refused on every rank."""
    state = state_of(how)
    fill(state, -1)
    with opened(path) as checkpointer:
        with pytest.raises((fs.MismatchError, fs.RankError), match=r"missing .*body\.1\.weight\.exp_avg"):
            checkpointer.load_state_dict(dicts_of(state, "flat"))
        assert all((local(tensor) == -1).all() for tensor in tensors(state) if tensor.dim()), "nothing was changed"
        dicts = dicts_of(state, "named")
        names = {name for name in dicts["optimizer"]["state"] if not name.startswith(UNUSED)}
        report = checkpointer.load_state_dict(dicts)
    assert "removed from the state dict" in str(report.notes)
    assert dicts["optimizer"]["state"].keys() == names
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(state["model"], state["optimizer"], dicts["optimizer"], options=options)
    named = dict(state["model"].named_parameters())
    assert {name for name, item in named.items() if state["optimizer"].state.get(item)} == names
