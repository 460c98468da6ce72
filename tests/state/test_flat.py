"""Hand-made flat tensors, and optimizers with sharded state, compared with unsharded ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from across import FIRST, Make, derive, number, rank_of, restored, same_tensors, saved, step
from hypothesis import given
from hypothesis import strategies as st
from reference import fill, load, save, stored
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import flowstone as fs
from flowstone.state import describe, prepare
from flowstone.torch.flat import FlatSlice

PADDING = 5  # behind every parameter


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_range_is_boxes_that_hold_the_very_elements(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - begin))
    laid = torch.arange(total).view([shape[dim] for dim in order])
    whole = laid.permute(sorted(range(len(shape)), key=order.__getitem__))
    assert list(whole.shape) == shape
    flat = laid.reshape(-1)[begin : begin + length].clone()
    seen = torch.zeros(shape, dtype=torch.int64)
    actual = FlatSlice(tuple(shape), begin, length, tuple(order)).cut_boxes(flat)
    assert len(actual) <= max(1, 2 * len(shape) - 1)
    for shard in actual:
        inside = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
        assert shard.shape == tuple(shape)
        assert torch.equal(shard.tensor, whole[inside])
        assert not flat.numel() or shard.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        seen[inside] += 1
    assert int(seen.sum()) == length
    assert seen.max() <= 1 if total else True
    assert FlatSlice(tuple(shape), begin, length, tuple(order)).is_absent == (not actual)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.first = nn.Linear(5, 9)
        self.block = nn.Sequential(nn.Linear(9, 3), nn.Conv2d(2, 3, 2, bias=False))


def members(module: nn.Module) -> list[tuple[str | None, Sequence[int]]]:
    """Its parameters, each with padding behind."""
    return [item for name, p in module.named_parameters() for item in ((name, p.shape), (None, (PADDING,)))]


def sharded(offset: int, section: str = "model") -> dict[str, object]:
    """A job as ZeRO has it: a rank steps a range of all elements, laid end to end, and keeps the moments of those."""
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    module = Net()
    number(module, offset)
    padded = [torch.cat([p.detach().reshape(-1), torch.ones(PADDING)]) for p in module.parameters()]
    flat = torch.cat(padded)
    length = -(-len(flat) // size)
    own = torch.ones(length)  # of the last one some lie behind all
    part = flat[rank * length : (rank + 1) * length]
    own[: len(part)] = part
    buffer = nn.Parameter(own)
    optimizer = torch.optim.Adam([buffer], lr=0.0)
    step(optimizer)
    derive(optimizer, offset)
    return {section: fs.Flat(buffer, members(module), rank * length), "optimizer": optimizer}


def whole(offset: int) -> dict[str, object]:
    module = Net()
    number(module, offset)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.0)
    step(optimizer)
    derive(optimizer, offset)
    return {"model": module, "optimizer": optimizer}


def zero(offset: int) -> dict[str, object]:
    module = Net()
    number(module, offset)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.0)
    step(optimizer)
    derive(optimizer.optim, offset)
    return {"model": module, "optimizer": optimizer}


def elements(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    owner = getattr(optimizer, "optim", optimizer)
    slots = [slot for of in owner.state.values() for name, slot in of.items() if name[:3] == "exp"]
    own = [model.tensor] if isinstance(model, fs.Flat) else list(model.parameters())  # type: ignore[attr-defined]
    return [*(tensor.detach() for tensor in own), *slots]


KINDS: dict[str, Make] = {"sharded by elements": sharded, "sharded by parameters": zero, "whole": whole}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(KINDS, KINDS)))
def test_any_ranks_load_what_any_ranks_save(source: str, target: str) -> None:
    reference = saved(whole, 1)
    for size in (1, 2, 3):
        checkpoint = saved(KINDS[source], size)
        same_tensors(checkpoint, reference)
        assert checkpoint.objects == reference.objects
        for other in (1, 2, 3, 9):
            restored(checkpoint, KINDS[target], other, elements)


def test_slots_that_are_not_there_yet_are_made_once_for_all_that_is_flat() -> None:
    known = stored(saved(whole, 1))
    with rank_of(1, 3):
        state = sharded(0)
        optimizer = state["optimizer"]
        assert isinstance(optimizer, torch.optim.Adam)
        optimizer.state.clear()
        restoration = prepare(state, known, rank=1)
        assert restoration.differences == ()
        restoration.finish()
        (slots,) = optimizer.state.values()
        assert {name: tuple(slot.shape) for name, slot in slots.items()} == {
            "exp_avg": (47,), "exp_avg_sq": (47,), "step": (),
        }
        assert slots["exp_avg"].tolist() == [0.0] * 47, "padding, too, has a value"


def test_a_flat_tensor_is_captured_lazily_if_an_optimizer_of_the_state_steps_it() -> None:
    with rank_of(0, 2):
        state = sharded(0)
        assert all(describe(state).lazy)
        assert not any(describe({"model": state["model"]}).lazy)


def test_members_may_lie_anywhere_in_the_state() -> None:
    with rank_of(0, 1):
        state = sharded(0, "master")
        names = set(describe(state).pieces.names)
    assert {"master.block.1.weight", "optimizer.state.master.block.1.weight.exp_avg"} <= names


def test_a_flat_tensor_that_somebody_has_replaced_by_tensors_is_loaded_from_them() -> None:
    tensors = {"w": torch.arange(6.0).view(2, 3) + FIRST, "layer": {"b": torch.arange(4.0) + FIRST}}
    checkpoint = save({"x": tensors})
    buffer = torch.zeros(7)
    flat = fs.Flat(buffer, [("w", (2, 3)), ("layer.b", (4,))], begin=3)
    load(checkpoint, {"x": fs.Flat(torch.zeros(10), flat.members)})
    restoration = prepare({"x": flat}, stored(checkpoint))
    fill(checkpoint, restoration)
    restoration.finish()
    assert buffer.tolist() == [1003.0, 1004.0, 1005.0, 1000.0, 1001.0, 1002.0, 1003.0]


class Counting(torch.optim.Adam):
    """An optimizer that has more than tensors for a state."""

    def __init__(self, parameters: object, **options: float) -> None:
        super().__init__(parameters, **options)  # type: ignore[arg-type]

    def count(self, value: int) -> None:
        for slots in self.state.values():
            slots["count"] = value


@pytest.mark.parametrize("own", [False, True])
def test_numbers_of_a_flat_parameter_are_those_of_all_that_lies_in_it(own: bool) -> None:
    kind: type[Counting] = Counting
    if own:
        kind = type("Own", (Counting,), {"load_state_dict": lambda self, tree: Counting.load_state_dict(self, tree)})

    def make(offset: int) -> dict[str, object]:
        state = sharded(offset)
        optimizer = kind([state["model"].tensor], lr=0.0)  # type: ignore[attr-defined]
        step(optimizer)
        derive(optimizer, offset)
        optimizer.count(5 + offset)
        return {**state, "optimizer": optimizer}

    checkpoint = saved(make, 3)
    restored(checkpoint, make, 2, elements)
    with rank_of(1, 2):
        state = make(500_000)
        optimizer = state["optimizer"]
        assert isinstance(optimizer, Counting)
        known = stored(checkpoint)
        prepare(state, known, rank=1).finish()
        assert [slots["count"] for slots in optimizer.state.values()] == [5]
        known.objects["optimizer"]["state"]["model.scale"]["count"] = 6  # type: ignore[index]
        differences = prepare(state, known, rank=1).differences
        assert "of the same flat parameter" in differences[0].expected


def test_a_zero_optimizer_hands_its_keeper_what_that_loads_itself() -> None:
    loaded = []

    class Own(torch.optim.Adam):
        def load_state_dict(self, tree: dict[str, object]) -> None:
            loaded.append(tree)
            super().load_state_dict(tree)

    def make(offset: int) -> dict[str, object]:
        state = zero(offset)
        optimizer = ZeroRedundancyOptimizer(state["model"].parameters(), Own, lr=0.1)  # type: ignore[attr-defined]
        step(optimizer)
        derive(optimizer.optim, offset)
        return {**state, "optimizer": optimizer}

    checkpoint = saved(partial(whole), 1)
    restored(checkpoint, make, 2, elements)
    assert len(loaded) == 2
    with rank_of(0, 2):
        state = make(0)
        prepare(state, stored(checkpoint)).finish()
        optimizer = state["optimizer"]
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == 0.0


def test_a_zero_optimizer_that_steps_inside_of_backward_is_refused() -> None:
    with rank_of(0, 2):
        module = Net()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, overlap_with_ddp=True)
        with pytest.raises(fs.UnsupportedStateError, match="overlap_with_ddp"):
            describe({"model": module, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("tensor", "of", "begin", "words"),
    [
        (torch.zeros(2, 3), [("w", (6,))], 0, "needs a 1-D tensor"),
        (torch.zeros(6), [("w", (6,))], -1, "needs a 1-D tensor"),
        ([0.0], [("w", (1,))], 0, "needs a 1-D tensor"),
        (torch.zeros(6), [("w", (3,)), ("module.w", (3,))], 0, "different names"),
        (torch.zeros(6), [("w", (-6,))], 0, "different names"),
        (torch.zeros(6), [("a..b", (6,))], 0, "cannot name a member"),
        (torch.zeros(6), [(7, (6,))], 0, "cannot name a member"),
    ],
)
def test_what_is_no_flat_tensor_is_refused(tensor: object, of: object, begin: int, words: str) -> None:
    with pytest.raises(fs.UnsupportedStateError, match=words):
        fs.Flat(tensor, of, begin)  # type: ignore[arg-type]


def test_what_every_rank_keeps_for_itself_is_no_part_of_a_larger_one() -> None:
    with pytest.raises(fs.UnsupportedStateError, match="remove PerRank"):
        describe({"x": fs.PerRank([fs.Flat(torch.zeros(2), [("w", (4,))])])})


def test_names_and_what_is_no_mapping() -> None:
    assert repr(fs.Flat(torch.zeros(4), [("module.w", (2, 2))], 1)) == "Flat(<4>, 1 members, begin=1)"
    assert fs.Flat(torch.zeros(4), [("module.w", (2, 2))]).spans[0].name == "w"
    known = stored(save({"x": 5}))
    (actual,) = prepare({"x": fs.Flat(torch.zeros(4), [("w", (4,))])}, known).differences
    assert (actual.kind, actual.stored) == ("kind", "int")
