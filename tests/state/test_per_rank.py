"""Values of each rank's own, and shards that are joined again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import Checkpoint, load, save

from flowstone.errors import UnsupportedStateError
from flowstone.state import PerRank, Shard, describe, prepare
from flowstone.state.records import StoredState
from flowstone.table.box import Box
from strategies import assert_same


def test_values_of_a_rank_come_back_to_it() -> None:
    checkpoint = Checkpoint()
    for rank in range(2):
        save(
            {"p": PerRank({"n": rank, "t": torch.full((2,), rank), "l": [bytes([rank]) * 70_000]})},
            rank=rank,
            into=checkpoint,
        )
    for rank in range(4):
        holder = PerRank({"n": -1, "t": torch.zeros(2, dtype=torch.int64), "l": [b""]})
        inner = holder.value
        load(checkpoint, {"p": holder}, rank=rank)
        assert holder.value is inner
        assert_same(inner, {"n": rank % 2, "t": torch.full((2,), rank % 2), "l": [bytes([rank % 2]) * 70_000]})


def test_a_scalar_of_a_rank_is_replaced_in_its_holder() -> None:
    holder = PerRank(None)
    load(save({"p": PerRank(5)}), {"p": holder})
    assert holder.value == 5


def test_per_rank_below_the_top_is_refused() -> None:
    for nest in ({"a": PerRank(1)}, [PerRank(1)], PerRank(PerRank(1)), PerRank([PerRank(1)])):
        with pytest.raises(UnsupportedStateError, match="at the top of the state"):
            describe({"s": nest})


def test_shards_of_all_ranks_make_the_whole() -> None:
    whole = torch.arange(24.0).view(4, 6)
    checkpoint = Checkpoint()
    for rank, offset in enumerate([(0, 0), (0, 3), (2, 0), (2, 3)]):
        part = whole[offset[0] : offset[0] + 2, offset[1] : offset[1] + 3]
        save(
            {"w": Shard(part, (4, 6), offset), "n": {"a": Shard(part.numpy(), [4, 6], offset)}},
            rank=rank,
            into=checkpoint,
        )
    target = {"w": torch.zeros(4, 6), "n": {"a": np.zeros((4, 6), np.float32)}}
    load(checkpoint, target)
    assert torch.equal(target["w"], whole)
    assert np.array_equal(target["n"]["a"], whole.numpy())  # type: ignore[index]
    part = torch.zeros(3, 2)
    load(checkpoint, {"w": Shard(part, (4, 6), (1, 4))})
    assert torch.equal(part, whole[1:4, 4:6])


def test_a_shard_knows_its_box() -> None:
    piece = describe({"w": Shard(torch.zeros(2, 0), (4, 6), (2, 6))}).pieces[0]
    assert piece.shape == (4, 6)
    assert piece.box == Box((2, 6), (2, 0))


@pytest.mark.parametrize(
    ("shape", "offset"), [((4,), (0,)), ((4, 6), (0,)), ((4, 6), (3, 0)), ((4, 6), (-1, 0)), ((1, 6), (0, 0))]
)
def test_a_shard_outside_its_tensor_is_refused(shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedStateError, match="shard"):
        Shard(torch.zeros(2, 3), shape, offset)


def test_a_shard_of_a_ranks_own_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="PerRank"):
        describe({"s": PerRank([Shard(torch.zeros(2), (4,), (0,))])})


def test_the_same_memory_as_two_boxes_is_two_pieces() -> None:
    part = torch.ones(2)
    described = describe({"a": Shard(part, (4,), (0,)), "b": Shard(part, (4,), (2,)), "c": part})
    assert [piece.name for piece in described.pieces] == ["a", "b", "c"]
    assert described.aliases == ()


def test_a_read_only_state_cannot_take_a_new_scalar() -> None:
    from types import MappingProxyType

    with pytest.raises(UnsupportedStateError, match="read-only"):
        prepare(MappingProxyType({"n": 1}), StoredState({}, {"n": 2}))
    prepare(MappingProxyType({"l": [1]}), StoredState({}, {"n": 2}))
