"""Replicas that are too long for one writer: several ranks write them in blocks of rows, each element once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_assign_writers import boxes, check, held, jobs

from bench.scaling.bound import least_largest, ownership
from flowstone.errors import CoverageError
from flowstone.format.segment import entry_name
from flowstone.plan.assign_writers import WriterAssignment, assign_writers
from flowstone.plan.layout_groups import Tensors, layout_groups
from flowstone.plan.split_replicas import ReplicaSplit, split_replicas
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Block, Memory, Piece, Pieces, Places, TensorColumns

KIB = 1024
NOTHING: Mapping[int, NDArray[np.int64]] = {}


def shared(
    ranks: Sequence[Pieces], kept: Mapping[int, NDArray[np.int64]] = NOTHING, before: WriterAssignment | None = None
) -> WriterAssignment:
    """As for large jobs, but that a few bytes are worth a cut."""
    split = before.split if before and kept else None
    return assign_writers(ranks, begun=kept, begun_split=split, worth_bytes=1, block_bytes_min=4)


def stacked(shape: tuple[int, ...], names: int) -> Pieces:
    return held([(f"w{number}", shape, None) for number in range(names)])


@settings(deadline=None)
@given(jobs())
def test_every_element_is_written_once(ranks: list[Pieces]) -> None:
    shared_bytes = shared(ranks)
    check(shared_bytes.layouts, shared_bytes)
    for layout, unsplit, blocks in zip(shared_bytes.layouts, ranks, shared_bytes.blocks, strict=False):
        pieces, whole = boxes(layout), boxes(unsplit)
        for index, (name, box) in enumerate(pieces):
            source, dim = int(blocks.source[index]), int(blocks.dim[index])
            block = Block(index, dim, int(blocks.start[index]), int(blocks.length[index]), 0)
            assert (name, box) == (whole[source][0], whole[source][1] if dim < 0 else block.of(whole[source][1]))


@settings(deadline=None)
@given(jobs(), st.randoms())
def test_ranks_that_have_begun_keep_their_blocks(ranks: list[Pieces], chance: random.Random) -> None:
    before = shared(ranks)
    begun = [rank for rank in range(len(ranks)) if chance.random() < 0.5]
    shared_bytes = shared(ranks, {rank: before.writes[rank] for rank in begun}, before)
    check(shared_bytes.layouts, shared_bytes)
    for rank in begun:
        assert shared_bytes.writes[rank].tolist() == before.writes[rank].tolist()
        assert boxes(shared_bytes.layouts[rank]) == boxes(before.layouts[rank])


def test_a_tensor_that_one_rank_holds_no_more_is_missed_in_blocks_too() -> None:
    before = shared([stacked((1000, 8), 5)] * 7)
    assert before.split is not None
    without = [stacked((1000, 8), 5)] * 6 + [stacked((1000, 8), 4)]
    with pytest.raises(CoverageError, match="'w4': all ranks that hold it began to write with a plan that lacks it"):
        shared(without, {rank: before.writes[rank] for rank in range(6)}, before)
    check((shared_bytes := shared(without)).layouts, shared_bytes)


def test_blocks_make_writers_even_where_replicas_are_few() -> None:
    """As under DDP: five tensors on seven ranks. Whole, one rank would write twice the mean and another nothing."""
    ranks = [stacked((100_003, 8), 5)] * 7
    assigned = assign_writers(ranks, worth_bytes=1, block_bytes_min=4 * KIB)
    bound = least_largest(ownership(ranks)[0], len(ranks))
    assert assigned.split is not None
    assert assigned.bytes.max() <= 1.02 * bound
    whole = assign_writers(ranks)
    assert whole.split is None, "3.2 MB are not worth it"
    assert whole.bytes.max() > 1.35 * bound
    check(assigned.layouts, assigned)


def test_no_more_is_cut_than_makes_writers_even() -> None:
    """Replicas of a twentieth of a rank's part: one in twenty of them is cut."""
    assigned = assign_writers([stacked((50_000, 2), 150)] * 8, worth_bytes=1, block_bytes_min=4 * KIB)
    assert assigned.split is not None
    assert 1 <= len(assigned.split.names) <= 150 // 15
    assert assigned.bytes.max() <= 1.01 * assigned.bytes.mean()


def test_even_writers_cut_nothing() -> None:
    assigned = assign_writers([stacked((1 << 20, 4), 8)] * 4, worth_bytes=1)
    assert assigned.split is None
    assert not assigned.blocks


def test_what_makes_no_writer_smaller_is_not_cut() -> None:
    """A node of two ranks writes as much as one of four, so each of the two twice as much, in blocks or whole."""
    assigned = assign_writers([stacked((4 << 20, 4), 120)] * 6, [0, 0, 0, 0, 1, 1])
    assert assigned.bytes.tolist() == [15 << 26] * 4 + [30 << 26] * 2
    assert assigned.split is None
    assert not assigned.blocks


def test_a_tensor_stays_whole_where_another_is_called_like_its_block() -> None:
    like = [("v", (100_003, 8), None), ("w", (20_003, 8), None), ("w[0:1429,0:8]", (2,), None)]
    ranks = [held(like)] * 7
    shared_bytes = shared(ranks)
    assert shared_bytes.split is not None
    assert shared_bytes.split.names == {"v"}
    for layout, writes in zip(shared_bytes.layouts, shared_bytes.writes, strict=True):
        pieces = boxes(layout)
        entries = [entry_name(*pieces[write], shape=layout.shapes[write]) for write in writes.tolist()]
        assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("seed", range(20))
def test_few_long_replicas_are_within_a_fiftieth_of_what_ownership_allows(seed: int) -> None:
    chance = random.Random(seed)
    ranks: list[list[tuple[str, tuple[int, ...], Box | None]]] = [[] for _ in range(chance.randint(2, 12))]
    for number in range(chance.randint(1, 9)):
        shape = chance.randint(2000, 90_000), chance.randint(1, 9)
        for rank in chance.sample(range(len(ranks)), chance.randint(1, len(ranks))):
            ranks[rank].append((f"w{number}", shape, None))
    assigned = assign_writers([held(pieces) for pieces in ranks], worth_bytes=1, block_bytes_min=64)
    bound = least_largest(ownership([held(pieces) for pieces in ranks])[0], len(ranks))
    assert bound <= assigned.bytes.max() <= 1.02 * bound


def test_tensors_of_one_box_and_several_types_are_cut_apart() -> None:
    """Blocks of as many bytes have other rows."""
    names = TensorColumns(("half", "full"), (DTYPES["bfloat16"], DTYPES["float32"]), ((97, 3), (97, 3)))
    both = Pieces(names, np.zeros(0, np.int64), np.zeros(0, np.int64))
    (entry, _), (blocks, _) = split_replicas([both] * 2, ReplicaSplit(frozenset({"half", "full"}), 0, 60))
    assert np.bincount(blocks.source).tolist() == [10, 20]
    for name in names.names:
        assert sum(box.elements for position, box in boxes(entry) if position == name) == 97 * 3


def test_a_tensor_without_rows_stays_whole() -> None:
    """A scalar, one entry, no entry; beside what is cut."""
    pieces = [("scalar", (), None), ("one", (1, 1), None), ("none", (3, 0), None), ("w", (50, 4), None)]
    (entry, _), (blocks, _) = split_replicas(
        [held(pieces)] * 2, ReplicaSplit(frozenset(name for name, _, _ in pieces), 0, 100)
    )
    assert boxes(entry)[:3] == [(name, Box.whole(shape)) for name, shape, _ in pieces[:3]]
    assert blocks.dim.tolist() == [-1] * 3 + [0] * 8


def test_replicas_are_compared_whole() -> None:
    ranks = [stacked((1000, 8), 2)] * 3
    before = assign_writers(ranks, worth_bytes=1, block_bytes_min=4)
    assert before.split is not None
    after = assign_writers(ranks, begun={0: before.writes[0]}, begun_split=before.split)
    for actual in (before.replicas, after.replicas):
        assert [number.tolist() for number in actual.number] == [[0, 0]] * 3
        assert [sets.tolist() for sets in actual.sets] == [[0]] * 3


def test_a_block_lies_where_its_rows_do() -> None:
    """Dense, strided, and behind a dimension of one entry."""
    dense = np.arange(60, dtype=np.float32).reshape(1, 10, 6)
    strided = np.arange(240, dtype=np.float32).reshape(2, 10, 12)[1:, :, ::2]
    for array in (dense, strided):
        piece = Piece("w", DTYPES["float32"], (4, 30, 6), Box((2, 20, 0), (1, 10, 6)))
        memory = Memory(array, array.ctypes.data, array.shape, array.strides, 4)
        block = Block(1, 1, 3, 5, 3 * 6 * 4)
        taken = Pieces.of([piece]).take([0, 0], [block])
        assert [piece.box for piece in taken] == [piece.box, Box((2, 23, 0), (1, 5, 6))]
        places = Places.of([memory]).take([0, 0], [block])
        assert places.address.tolist() == [memory.address, array[:, 3:].ctypes.data]
        assert places.memory(1, taken[1]).shape == (1, 5, 6)
        assert places.memory(1, taken[1]).strides_bytes[1:] == array.strides[1:]


def test_ranks_that_hold_the_same_blocks_share_them() -> None:
    """Many ranks, each with a block or more of its own to write: none has all boxes to itself."""
    ranks = [stacked((1000, 8), 2)] * 150
    shared_bytes = shared(ranks)
    assert shared_bytes.split is not None
    for column in ("names", "parts", "boxes", "kinds"):
        assert len({id(getattr(layout, column)) for layout in shared_bytes.layouts}) == 1, column
    (group,) = layout_groups(shared_bytes.layouts, Tensors.of(shared_bytes.layouts), 2)
    assert len(group.ranks) == 150
    assert len(group.boxes) == 1
    check(shared_bytes.layouts, shared_bytes)
