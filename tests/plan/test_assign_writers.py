"""Which rank writes what: every element once, by a rank that holds it, and balanced over the ranks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.errors import CollisionError, CoverageError
from flowstone.plan import assign_writers as sharing
from flowstone.plan.assign_writers import WriterAssignment, assign_writers, check_replicas
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Pieces, TensorColumns

F32 = DTYPES["float32"]


def held(pieces: Sequence[tuple[str, tuple[int, ...], Box | None]]) -> Pieces:
    """What a rank holds: (name, global shape, box, or None for all of it)."""
    names = TensorColumns(tuple(p[0] for p in pieces), (F32,) * len(pieces), tuple(p[1] for p in pieces))
    parts = [index for index, p in enumerate(pieces) if p[2] is not None]
    boxes = [n for p in pieces if p[2] is not None for n in (*p[2].offset, *p[2].shape)]
    return Pieces(names, np.array(parts, np.int64), np.array(boxes, np.int64))


def boxes(pieces: Pieces) -> list[tuple[str, Box]]:
    """The pieces of a rank, as records."""
    boxes = list(zip(pieces.names, map(Box.whole, pieces.shapes), strict=True))
    kinds = np.arange(len(pieces.parts)) if pieces.kinds is None else pieces.kinds
    numbers, index = pieces.boxes.tolist(), 0
    for kind in range(int(kinds.max(initial=-1)) + 1):
        for part in pieces.parts[kinds == kind].tolist():
            name, n = boxes[part][0], len(pieces.shapes[part])
            boxes[part] = name, Box(tuple(numbers[index : index + n]), tuple(numbers[index + n : index + 2 * n]))
        index += 2 * n
    return boxes


def check(ranks: Sequence[Pieces], assignment: WriterAssignment) -> None:
    """Every element of every tensor is written once, by a rank that holds it."""
    counts: dict[str, np.ndarray] = {}
    sums = []
    for rank, writes in zip(ranks, assignment.writes, strict=True):
        pieces, shapes = boxes(rank), dict(zip(rank.names, rank.shapes, strict=True))
        assert writes.tolist() == sorted(set(writes.tolist()))
        sums.append(sum(4 * pieces[write][1].elements for write in writes.tolist()))
        for write in writes.tolist():
            name, box = pieces[write]
            shape = shapes[name]
            count = counts.setdefault(name, np.zeros(shape, int))
            count[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    for rank in ranks:
        for name, shape in zip(rank.names, rank.shapes, strict=True):
            if math.prod(shape):
                assert (counts[name] == 1).all(), name
    assert assignment.bytes.tolist() == sums


@st.composite
def jobs(draw: st.DrawFn) -> list[Pieces]:
    """Tensors cut in random ways, each part on one rank or more."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    ranks: list[list[tuple[str, tuple[int, ...], Box | None]]] = [[] for _ in range(draw(st.integers(1, 7)))]
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(chance.randint(0, 7) for _ in range(chance.randint(0, 3)))
        for box in _cut(Box.whole(shape), chance, chance.randint(0, 4)):
            for rank in chance.sample(range(len(ranks)), chance.randint(1, len(ranks))):
                ranks[rank].append((f"t{number}", shape, None if box == Box.whole(shape) else box))
    return [held(pieces) for pieces in ranks]


def _cut(box: Box, chance: random.Random, times: int) -> list[Box]:
    longest = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not times or not longest:
        return [box]
    dim = chance.choice(longest)
    position = chance.randint(1, box.shape[dim] - 1)
    low, high = list(box.shape), list(box.shape)
    low[dim], high[dim] = position, box.shape[dim] - position
    offset = list(box.offset)
    offset[dim] += position
    halves = (Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high)))
    return [part for half in halves for part in _cut(half, chance, times - 1)]


@settings(deadline=None)
@given(jobs(), st.booleans())
def test_every_element_is_written_once(ranks: list[Pieces], alike: bool) -> None:
    nodes = [rank // 2 for rank in range(len(ranks))]
    if alike:  # all keys of pieces are equal: who is whose replica is then found out the slow way
        with mock.patch.object(sharing, "_MIX", np.zeros(2, np.uint64)):
            check(ranks, assign_writers(ranks, nodes))
    else:
        check(ranks, assign_writers(ranks, nodes))


@settings(deadline=None)
@given(jobs(), st.randoms())
def test_ranks_that_have_begun_keep_what_they_write(ranks: list[Pieces], chance: random.Random) -> None:
    before = assign_writers(ranks)
    begun = [rank for rank in range(len(ranks)) if chance.random() < 0.5]
    assigned = assign_writers(ranks, begun={rank: before.writes[rank] for rank in begun})
    check(ranks, assigned)
    for rank in begun:
        assert assigned.writes[rank].tolist() == before.writes[rank].tolist()


def test_what_nobody_can_write_any_more_is_told() -> None:
    both = [held([("w", (4,), None)])] * 2
    with pytest.raises(CoverageError, match="'w': all ranks that hold it began to write with a plan that lacks it"):
        assign_writers(both, begun={0: np.zeros(0, np.int64), 1: np.zeros(0, np.int64)})
    with pytest.raises(CoverageError, match="two ranks are writing the same elements of 'w'"):
        assign_writers(both, begun={0: np.array([0]), 1: np.array([0])})


def test_replicas_are_spread_by_bytes() -> None:
    chance = random.Random(1)
    pieces = [(f"layer{i}", (chance.randint(1, 100_000),), None) for i in range(300)]
    assigned = assign_writers([held(pieces)] * 8)
    largest = max(4 * shape[0] for _, shape, _ in pieces)
    assert assigned.bytes.max() - assigned.bytes.min() <= largest
    assert assigned.bytes.sum() == sum(4 * shape[0] for _, shape, _ in pieces)


def test_what_one_rank_alone_holds_counts_before_replicas_are_spread() -> None:
    common = [(f"common{i}", (1000,), None) for i in range(30)]
    ranks = [held([*common, ("own", (10_000,), None)]), held(common), held(common)]
    plan = assign_writers(ranks)
    check(ranks, plan)
    assert plan.bytes.tolist() == [4 * 14_000, 4 * 13_000, 4 * 13_000] or max(plan.bytes) - min(plan.bytes) <= 4000


def test_no_node_writes_more_than_its_part() -> None:
    pieces = [(f"layer{i}", (1000,), None) for i in range(120)]
    nodes = [0, 0, 0, 0, 1, 1]  # four ranks on one node, two on the other
    assigned = assign_writers([held(pieces)] * 6, nodes)
    by_node = np.bincount(nodes, assigned.bytes)
    assert by_node[0] == by_node[1]


def test_hybrid_sharding_spreads_each_group_of_replicas() -> None:
    """Two replicas of a tensor in four shards, on eight ranks."""
    shapes = [(f"w{i}", (64, 8)) for i in range(50)]
    ranks = [
        held([(name, shape, Box((16 * (rank % 4), 0), (16, 8))) for name, shape in shapes]) for rank in range(8)
    ]
    assigned = assign_writers(ranks)
    check(ranks, assigned)
    assert assigned.bytes.max() == assigned.bytes.min()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([Box((0, 0), (4, 4)), Box((3, 0), (5, 4))], "overlap"),
        ([Box((0, 0), (4, 4)), Box((5, 0), (3, 4))], r"no shard holds \[4:5,0:4\]"),
        ([Box((0, 0), (8, 3))], r"no shard holds \[0:8,3:4\]"),
        ([Box((0, 0), (8, 4)), Box((2, 2), (1, 1))], "overlap"),
    ],
)
def test_boxes_that_do_not_tile_are_refused_by_name(parts: list[Box], words: str) -> None:
    ranks = [held([("w", (8, 4), box)]) for box in parts]
    with pytest.raises(CoverageError, match=words):
        assign_writers(ranks)


def test_boxes_that_tile_without_lining_up_are_taken() -> None:
    """A pinwheel: no line cuts it in two."""
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    ranks = [held([("w", (3, 3), box)]) for box in pinwheel]
    check(ranks, assign_writers(ranks))


def test_ranks_that_disagree_on_a_tensor_are_told_which() -> None:
    ranks = [held([("w", (8, 4), None)]), held([("w", (4, 8), None)])]
    with pytest.raises(CollisionError, match="ranks describe 'w' differently") as caught:
        assign_writers(ranks)
    assert "(4, 8) on rank 1" in str(caught.value)


def test_a_grid_of_many_ranks_is_proved_quickly() -> None:
    """Tensor parallelism by FSDP: 16 x 64 boxes of each tensor, as columns, without a box in Python."""
    names = TensorColumns(tuple(f"w{i}" for i in range(40)), (F32,) * 40, ((4096, 512),) * 40)
    parts = np.arange(40)
    ranks = []
    for tp, dp in itertools.product(range(16), range(64)):
        ranks.append(Pieces(names, parts, np.tile(np.array([64 * dp, 32 * tp, 64, 32]), 40)))
    with mock.patch.object(sharing, "check_tiling", side_effect=AssertionError("the slow way")):
        assigned = assign_writers(ranks)
    assert set(assigned.bytes.tolist()) == {40 * 64 * 32 * 4}


def alike(chance: random.Random) -> list[Pieces]:
    """Many tensors of one shape, each cut in one of three ways, and replicas of some of them."""
    ways = [
        lambda rank: None,
        lambda rank: Box((2 * rank, 0), (2, 8)),
        lambda rank: Box((0, 4 * (rank % 2)), (8, 4)),
    ]
    chosen = [chance.choice(ways) for _ in range(60)]
    return [held([(f"w{index}", (8, 8), way(rank)) for index, way in enumerate(chosen)]) for rank in range(4)]


@pytest.mark.parametrize("seed", range(3))
def test_tensors_of_one_shape_may_be_cut_in_several_ways(seed: int) -> None:
    ranks = alike(random.Random(seed))
    assigned = assign_writers(ranks)
    check(ranks, assigned)
    assert assigned.bytes.max() - assigned.bytes.min() <= 4 * 64
    compact = [rank.compact() for rank in ranks]
    assert [of.tolist() for of in assign_writers(compact).writes] == [of.tolist() for of in assigned.writes]


@pytest.mark.parametrize("seed", range(3))
def test_of_tensors_cut_alike_some_may_have_been_begun(seed: int) -> None:
    ranks = alike(random.Random(seed))
    names = ranks[0].tensors  # the same on all ranks, as in a job
    ranks = [Pieces(names, rank.parts, rank.boxes).compact() for rank in ranks]
    before = assign_writers(ranks)
    for begun in ([1], [0, 3], [0, 1, 2]):
        kept = {rank: before.writes[rank] for rank in begun}
        after = assign_writers(ranks, begun=kept)
        for rank in begun:
            assert after.writes[rank].tolist() == before.writes[rank].tolist()
        plain = [Pieces(names, rank.parts, np.concatenate([_box(rank, kind) for kind in rank.kinds.tolist()]))
                 for rank in ranks if rank.kinds is not None]
        check(plain, after)


def _box(pieces: Pieces, kind: int) -> np.ndarray:
    return pieces.boxes[4 * kind : 4 * kind + 4]


def test_buffers_are_the_lowest_ranks_however_they_differ() -> None:
    """Those of a stage's module are of the first rank that has the stage; nothing else of that shape is."""
    shapes = ((64,), (64,), (64,))

    def rank(stage: int, sample: int) -> tuple[Pieces, np.ndarray]:
        names = tuple(f"{stage}.{name}" for name in ("weight", "mean", "variance"))
        none = np.zeros(0, np.int64)
        held = Pieces(TensorColumns(names, (F32,) * 3, shapes, frozenset({1, 2})), none, none)
        return held, np.array([7, sample, sample], np.uint16)

    ranks = [rank(stage, index) for index, stage in enumerate((0, 1, 0, 1, 1))]
    check_replicas([held for held, _ in ranks], [samples for _, samples in ranks])
    assigned = assign_writers([held for held, _ in ranks])
    check([held for held, _ in ranks], assigned)
    assert assigned.buffers == 4
    writes = [set(write.tolist()) - {0} for write in assigned.writes]
    assert writes == [{1, 2}, {1, 2}, set(), set(), set()]


def test_what_is_a_buffer_on_one_rank_alone_is_a_replica() -> None:
    none = np.zeros(0, np.int64)
    pieces = Pieces(TensorColumns(("w",), (F32,), ((64,),), frozenset({0})), none, none)
    other = Pieces(TensorColumns(("w",), (F32,), ((64,),)), none, none)
    with pytest.raises(CollisionError, match="'w' is not the same on rank 1"):
        check_replicas([pieces, other], [np.array([1], np.uint16), np.array([2], np.uint16)])
