"""Boxes of shards: compared with torch's own splitting, and with the flat order of elements."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from flowstone.table.box import Box
from flowstone.torch.shards import DimensionSplit, boxes_of, flat_boxes, runs_of

LENGTHS = st.integers(0, 40)
SPLITS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3)  # (parts, factor)


def by_torch(length: int, splits: list[tuple[int, int]], coordinate: tuple[int, ...]) -> list[int] | None:
    """The indices that torch's placements leave to one rank; None where torch itself cannot cut so few into so many."""
    held = torch.arange(length)
    for (parts, factor), mine in zip(splits, coordinate, strict=True):
        placement = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
        if factor > 1 and len(torch.chunk(held, factor)) < factor:
            return None
        held = placement._split_tensor(held, parts, with_padding=False)[0][mine]
    return held.tolist()


@given(length=LENGTHS, splits=SPLITS)
def test_runs_are_what_torch_leaves_to_each_rank(length: int, splits: list[tuple[int, int]]) -> None:
    every: list[int] = []
    for coordinate in itertools.product(*(range(parts) for parts, _ in splits)):
        ours = tuple(
            DimensionSplit(parts, mine, factor) for (parts, factor), mine in zip(splits, coordinate, strict=True)
        )
        held = [i for begin, stop in runs_of(length, ours) for i in range(begin, stop)]
        expected = by_torch(length, splits, coordinate)
        assert expected is None or held == expected
        every += held
    assert sorted(every) == list(range(length)), "every element is held exactly once"


FEW_SPLITS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=2)


@given(st.lists(st.tuples(st.integers(0, 7), FEW_SPLITS), max_size=2))
def test_boxes_are_where_the_local_tensor_has_them(dims: list[tuple[int, list[tuple[int, int]]]]) -> None:
    shape = tuple(length for length, _ in dims)
    whole = np.arange(math.prod(shape)).reshape(shape)
    seen = np.zeros(shape, int)
    per_dim = [list(itertools.product(*(range(parts) for parts, _ in splits))) for _, splits in dims]
    for coordinate in itertools.product(*per_dim):
        splits = [
            tuple(DimensionSplit(parts, mine, factor) for (parts, factor), mine in zip(of, position, strict=True))
            for (_, of), position in zip(dims, coordinate, strict=True)
        ]
        held = [
            [i for begin, stop in runs_of(n, of) for i in range(begin, stop)]
            for n, of in zip(shape, splits, strict=True)
        ]
        local = whole[np.ix_(*held)] if shape else whole
        filled = np.full(local.shape, -1)
        for box, inside in boxes_of(shape, splits):
            filled[_slices(inside)] = whole[_slices(box)]
            seen[_slices(box)] += 1
        assert np.array_equal(filled, local)
    assert (seen == 1).all()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_few_dense_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(begin, total))
    whole = np.arange(total).reshape(shape)
    actual = list(flat_boxes(shape, begin, stop))
    assert len(actual) <= max(1, 2 * len(shape) - 1)
    flat = [value for box, _ in actual for value in whole[_slices(box)].reshape(-1).tolist()]
    assert flat == list(range(begin, stop))
    assert [offset for _, offset in actual] == [flat.index(int(whole[box.offset])) for box, _ in actual]


def test_a_range_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="do not lie"):
        list(flat_boxes((2, 3), 4, 7))
    with pytest.raises(ValueError, match="do not lie"):
        list(flat_boxes((2, 3), 3, 2))


def test_fsdp_over_tensor_parallelism() -> None:
    """The example of torch's own documentation: rank (1, 0) of a 2 x 2 mesh has rows 2 and 3, not 4 and 5."""
    actual = boxes_of((8, 8), [(DimensionSplit(2, 1, factor=2), DimensionSplit(2, 0)), ()])
    assert [box for box, _ in actual] == [Box((2, 0), (2, 8))]


def test_a_strided_shard_alone_is_several_boxes() -> None:
    boxes = list(boxes_of((8,), [(DimensionSplit(2, 1, factor=2),)]))
    assert [(box.offset, box.shape, inside.offset) for box, inside in boxes] == [((2,), (2,), (0,)), ((6,), (2,), (2,))]
