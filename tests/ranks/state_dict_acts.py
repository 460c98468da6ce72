"""What ranks do with the state dicts that torch gives of sharded modules and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from acts import as_it_lies, fill, local, opened, pattern, put, state_of, tensors
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


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
