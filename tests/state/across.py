"""States of many ranks in one process: each rank describes its own, or is restored, one after the other.

The process group is torch's own fake one: it has ranks and groups, and moves no data. So the value of every element is
its own number, which shows where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from reference import Checkpoint, _text, fill, store, stored
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowstone.state import StateDescription, describe, prepare

FIRST = 1000  # the least number that is an element's own: padding is less
Make = Callable[[int], dict[str, object]]  # a state, whose elements are all so much more than their numbers


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def number(module: nn.Module, offset: int = 0) -> None:
    """Give every element of the parameters and buffers a number of its own."""
    start = FIRST + offset
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
            start += tensor.numel()


def step(optimizer: torch.optim.Optimizer, without: Collection[int] = ()) -> None:
    """Let an optimizer make its slots, of all parameters but frozen ones, and those `without` a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            left_out = id(parameter) in without or not parameter.requires_grad
            parameter.grad = None if left_out else torch.zeros_like(parameter)
    optimizer.step()


def derive(optimizer: torch.optim.Optimizer, offset: int = 0) -> None:
    """Make the slots follow from the elements that they belong to."""
    for parameter, slots in optimizer.state.items():
        slots["exp_avg"].copy_(2 * parameter.detach())
        slots["exp_avg_sq"].copy_(3 * parameter.detach())
        slots["step"].fill_(7 + offset)


def saved(make: Make, size: int, check: Callable[[StateDescription], object] | None = None) -> Checkpoint:
    """What `size` ranks save together, whose objects have to be the same."""
    checkpoint = Checkpoint()
    message = set()
    for rank in range(size):
        with rank_of(rank, size):
            described = describe(make(0), rank=rank)
            if check is not None:
                check(described)
            store(described, into=checkpoint)
            message.add(json.dumps({name: _text(value, name) for name, value in described.objects.items()}))
    assert len(message) == 1, "what is no tensor is the same on all ranks"
    for name, target in checkpoint.tied.items():
        assert target in checkpoint.tensors, f"{name} is tied to nothing"
        if name in checkpoint.tensors:  # of another rank's own
            assert checkpoint.tensors[name].tobytes() == checkpoint.tensors[target].tobytes()
    checkpoint.tied = {name: to for name, to in checkpoint.tied.items() if name not in checkpoint.tensors}
    return checkpoint


def restored(
    checkpoint: Checkpoint, make: Make, size: int, elements: Callable[[dict[str, object]], list[torch.Tensor]]
) -> None:
    """Load what was saved on `size` ranks: each element comes to where it belongs, and padding is left alone."""
    known = stored(checkpoint)
    names: set[str] = set()
    for rank in range(size):
        with rank_of(rank, size):
            right, state = make(0), make(500_000)
            before = [tensor.clone() for tensor in elements(state)]
            restoration = prepare(state, known, rank=rank)
            assert restoration.differences == ()
            names |= {piece.name for piece in restoration.pieces} | {alias.name for alias in restoration.aliases}
            for alias in restoration.aliases:
                assert whole(checkpoint, alias.name) == whole(checkpoint, alias.target)
            fill(checkpoint, restoration)
            restoration.finish()
            for element, other, was in zip(elements(right), elements(state), before, strict=True):
                mine = element >= FIRST
                assert torch.equal(element[mine], other[mine])
                assert torch.equal(other[~mine], was[~mine]), "padding was written to"
            for mine, theirs in zip(steps(right), steps(state), strict=True):
                assert torch.equal(mine, theirs)
    assert names == checkpoint.tensors.keys() | checkpoint.tied.keys()


def steps(state: Mapping[str, object]) -> list[torch.Tensor]:
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    return [slots["step"] for inner in optimizers for slots in getattr(inner, "optim", inner).state.values()]


def whole(checkpoint: Checkpoint, name: str) -> bytes:
    return checkpoint.tensors[checkpoint.tied.get(name, name)].tobytes()


def same_tensors(checkpoint: Checkpoint, other: Checkpoint) -> None:
    """Both hold the same tensors, under whatever is tied to what."""
    names = checkpoint.tensors.keys() | checkpoint.tied.keys()
    assert names == other.tensors.keys() | other.tied.keys()
    for name in names:
        mine, theirs = checkpoint.tensors[checkpoint.tied.get(name, name)], other.tensors[other.tied.get(name, name)]
        assert mine.shape == theirs.shape, name
        assert mine.tobytes() == theirs.tobytes(), name
