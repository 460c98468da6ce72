"""States of many ranks in one process: each rank describes its own, or is restored, one after the other.

The process group is torch's own fake one: it knows ranks and groups, and moves nothing. So every element holds its own
number instead of a result: wherever it lies, it says what it is.
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

from flowstone.state import Described, describe, prepare

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
    at = FIRST + offset
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.arange(at, at + tensor.numel()).view(tensor.shape))
            at += tensor.numel()


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


def saved(make: Make, size: int, check: Callable[[Described], object] | None = None) -> Checkpoint:
    """What `size` ranks save together, whose objects have to be the same."""
    checkpoint = Checkpoint()
    said = set()
    for rank in range(size):
        with rank_of(rank, size):
            described = describe(make(0), rank=rank)
            if check is not None:
                check(described)
            store(described, into=checkpoint)
            said.add(json.dumps({name: _text(value, name) for name, value in described.objects.items()}))
    assert len(said) == 1, "what is no tensor is the same on all ranks"
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
    wanted: set[str] = set()
    for rank in range(size):
        with rank_of(rank, size):
            right, state = make(0), make(500_000)
            before = [tensor.clone() for tensor in elements(state)]
            restoration = prepare(state, known, rank=rank)
            assert restoration.differences == ()
            wanted |= {piece.name for piece in restoration.pieces} | {alias.name for alias in restoration.aliases}
            for alias in restoration.aliases:
                assert whole(checkpoint, alias.name) == whole(checkpoint, alias.target)
            fill(checkpoint, restoration)
            restoration.finish()
            for one, other, was in zip(elements(right), elements(state), before, strict=True):
                mine = one >= FIRST
                assert torch.equal(one[mine], other[mine])
                assert torch.equal(other[~mine], was[~mine]), "padding was written to"
            for mine, theirs in zip(steps(right), steps(state), strict=True):
                assert torch.equal(mine, theirs)
    assert wanted == checkpoint.tensors.keys() | checkpoint.tied.keys()


def steps(state: Mapping[str, object]) -> list[torch.Tensor]:
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    return [slots["step"] for one in optimizers for slots in getattr(one, "optim", one).state.values()]


def whole(checkpoint: Checkpoint, name: str) -> bytes:
    return checkpoint.tensors[checkpoint.tied.get(name, name)].tobytes()


def same_tensors(one: Checkpoint, other: Checkpoint) -> None:
    """Both hold the same tensors, under whatever is tied to what."""
    names = one.tensors.keys() | one.tied.keys()
    assert names == other.tensors.keys() | other.tied.keys()
    for name in names:
        mine, theirs = one.tensors[one.tied.get(name, name)], other.tensors[other.tied.get(name, name)]
        assert mine.shape == theirs.shape, name
        assert mine.tobytes() == theirs.tobytes(), name
