"""DTensors of any placement, on meshes of any shape: described and restored rank by rank, in one process.

The process group is torch's own fake one: it has ranks and meshes, and moves no data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import flowstone as fs
from flowstone.format.objects import TensorRef
from flowstone.stage.bounce import host_array
from flowstone.state import StoredState, TensorSpec, describe, prepare
from flowstone.table.pieces import Memory
from flowstone.torch.tensors import dtype_of


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """What distribute_tensor() gives this rank, without a word to the others."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for placement, parts, mine in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            local = placement._split_tensor(local, parts, with_padding=False)[0][mine]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape))


class Layout:
    """A mesh, and how one tensor lies on it."""

    def __init__(self, chance: random.Random, ndim: int) -> None:
        self.mesh = tuple(chance.randint(1, 3) for _ in range(chance.randint(1, 3)))
        self.placements: list[Placement] = []
        for _ in self.mesh:
            kinds: list[Placement] = [Replicate()]
            if ndim:
                dim = chance.randrange(ndim)
                kinds += [Shard(dim), _StridedShard(dim, split_factor=chance.randint(2, 3))]
            self.placements.append(chance.choice(kinds))

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    def of(self, whole: torch.Tensor) -> DTensor:
        return sharded(whole, mesh_of(self.mesh), self.placements)


def can_be_cut(whole: torch.Tensor, layout: Layout) -> bool:
    """Torch itself fails to cut few rows into more."""
    try:
        for rank in range(layout.size):
            with rank_of(rank, layout.size):
                layout.of(whole)
    except IndexError:
        return False
    return True


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_what_any_ranks_save_any_ranks_load(seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.choice((0, 1, 2, 3, 5, 8)) for _ in range(chance.randint(0, 3)))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    source, target = Layout(chance, len(shape)), Layout(chance, len(shape))
    if not (can_be_cut(whole, source) and can_be_cut(whole, target)):
        return
    stored = torch.full(shape, torch.nan)
    for rank in range(source.size):
        with rank_of(rank, source.size):
            described = describe({"w": source.of(whole)})
            for i, piece in enumerate(described.pieces):
                assert (piece.name, piece.shape) == ("w", shape)
                into(stored, piece.box)[...] = values(described.places.memory(i, piece))
    assert torch.equal(stored, whole)
    for rank in range(target.size):
        with rank_of(rank, target.size):
            expected, held = target.of(whole), target.of(torch.full_like(whole, -1))
            restoration = prepare({"w": held}, holding({"w": stored}))
            assert not restoration.differences
            for i, piece in enumerate(restoration.pieces):
                host_array(restoration.places.memory(i, piece)).view("float32")[...] = into(stored, piece.box).numpy()
            restoration.finish()
            assert torch.equal(held.to_local(), expected.to_local())


def into(whole: torch.Tensor, box: fs.Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def values(memory: Memory) -> torch.Tensor:
    return torch.from_numpy(host_array(memory).copy()).view(torch.float32)


def holding(tensors: dict[str, torch.Tensor], **objects: object) -> StoredState:
    """A checkpoint of these tensors."""
    own = {name: TensorRef(name, "tensor") for name in tensors if "." not in name}
    result = {name: TensorSpec(dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return StoredState(tensors=result, objects={**own, **objects})


def trained() -> dict[str, object]:
    """A model whose weight is sharded over four ranks, and its optimizer, stepped once; on rank 3.

    On that one always: torch remembers results of operators with the mesh, and so the rank, that they first came with.
    """
    mesh = mesh_of((4,))
    model = nn.Linear(6, 10, bias=False)
    model.weight = nn.Parameter(sharded(torch.randn(10, 6), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = sharded(torch.ones(10, 6), mesh, [Shard(0)])
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_module_and_its_slots_are_shards_of_the_whole() -> None:
    with rank_of(3, 4):
        described = describe(trained())
    pieces = {piece.name: piece for piece in described.pieces}
    for name in ("model.weight", "optimizer.state.model.weight.exp_avg", "optimizer.state.model.weight.exp_avg_sq"):
        assert pieces[name].shape == (10, 6)
        assert pieces[name].box == fs.Box((9, 0), (1, 6))
    assert all(lazy for piece, lazy in zip(described.pieces, described.lazy, strict=True) if piece.name in pieces)
    assert described.objects["optimizer"]["state"] == {}  # type: ignore[index]  # the names say all


def test_slots_that_are_not_there_yet_are_made_as_the_parameter_lies() -> None:
    with rank_of(3, 4):
        state = trained()
        described = describe(state)
        objects = dict(described.objects)
        actual = {name: torch.zeros(piece.shape) for name, piece in ((p.name, p) for p in described.pieces)}
        optimizer = state["optimizer"]
        assert isinstance(optimizer, torch.optim.Adam)
        optimizer.state.clear()
        restoration = prepare(state, holding(actual, **objects))
        assert not restoration.differences
        restoration.finish()
        slots = next(iter(optimizer.state.values()))
        assert isinstance(slots["exp_avg"], DTensor)
        assert slots["exp_avg"].placements == (Shard(0),)
        assert tuple(slots["exp_avg"].to_local().shape) == (1, 6)


def test_a_rank_that_holds_nothing_describes_nothing() -> None:
    with rank_of(3, 4):
        assert len(describe({"w": sharded(torch.ones(2, 3), mesh_of((4,)), [Shard(0)])}).pieces) == 0
    with rank_of(3, 4):
        mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
        outside = DTensor.from_local(torch.ones(0, 3), mesh, [Shard(0)], run_check=False)
        assert len(describe({"w": outside}).pieces) == 0


def test_a_tensor_without_elements_is_held_all_the_same() -> None:
    """Else it would be missing for whoever loads it as a plain tensor."""
    for rank in range(3):
        with rank_of(rank, 3):
            pieces = describe({"w": sharded(torch.ones(0, 4), mesh_of((3,)), [Shard(1)])}).pieces
            assert [(piece.name, piece.shape, piece.bytes) for piece in pieces] == [("w", (0, 4), 0)]


def test_sums_that_are_still_to_be_made_are_refused() -> None:
    with rank_of(0, 2):
        partial = DTensor.from_local(torch.ones(3), mesh_of((2,)), [Partial()], run_check=False)
        with pytest.raises(fs.UnsupportedStateError, match="neither Shard nor Replicate"):
            describe({"w": partial})


def test_a_local_tensor_that_is_not_what_it_is_said_to_be_is_refused() -> None:
    with rank_of(0, 2):
        wrong = DTensor.from_local(
            torch.ones(4, 3), mesh_of((2,)), [Shard(0)], run_check=False, shape=torch.Size((6, 3)), stride=(3, 1)
        )
        with pytest.raises(fs.UnsupportedStateError, match="does not match its placements") as caught:
            describe({"w": wrong})
        assert "(3, 3)" in str(caught.value)


def test_what_every_rank_keeps_for_itself_has_no_shards() -> None:
    with rank_of(0, 2):
        part = sharded(torch.ones(4), mesh_of((2,)), [Shard(0)])
        with pytest.raises(fs.UnsupportedStateError, match="remove PerRank"):
            describe({"w": fs.PerRank({"x": part})})
