"""Boxes: the rest of one without others, and sets that tile a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import CoverageError
from flowstone.plan.coverage import check_tiling, subtract, tiles, uncovered
from flowstone.table.box import Box

SIDE = 5


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    offset = tuple(draw(st.integers(0, SIDE)) for _ in range(ndim))
    return Box(offset, tuple(draw(st.integers(0, SIDE - o)) for o in offset))


PAIRS = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


def painted(ndim: int, *parts: Box) -> np.ndarray:
    """How often each element of a cube of SIDE is held."""
    grid = np.zeros((SIDE,) * ndim, int)
    for box in parts:
        grid[tuple(map(slice, box.offset, box.end))] += 1
    return grid


@given(PAIRS)
def test_subtract_leaves_each_other_element_once(pair: tuple[Box, Box]) -> None:
    box, hole = pair
    ndim = len(box.shape)
    expected = np.where(painted(ndim, hole) > 0, 0, painted(ndim, box))
    rest = subtract(box, hole)
    assert np.array_equal(painted(ndim, *rest), expected)
    assert len(rest) <= max(1, 2 * ndim)


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), st.lists(boxes(n), max_size=5))))
def test_uncovered_is_a_hole_or_none(case: tuple[Box, list[Box]]) -> None:
    box, parts = case
    ndim = len(box.shape)
    missing = (painted(ndim, box) > 0) & (painted(ndim, *parts) == 0)
    hole = uncovered(box, parts)
    assert (hole is None) == (not missing.any())
    if hole is not None:
        assert hole.elements
        assert missing[tuple(map(slice, hole.offset, hole.end))].all()


@given(PAIRS)
def test_intersect_is_what_both_hold(pair: tuple[Box, Box]) -> None:
    tensor, other = pair
    ndim = len(tensor.shape)
    both = painted(ndim, tensor) * painted(ndim, other)
    common = tensor.intersect(other)
    assert np.array_equal(painted(ndim) if common is None else painted(ndim, common), both)


def test_a_tiling_passes() -> None:
    check_tiling("w", (4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 1)), Box((2, 1), (2, 3))])
    check_tiling("scalar", (), [Box((), ())])
    check_tiling("empty", (0, 3), [Box((0, 0), (0, 3))])


def test_a_hole_is_named() -> None:
    with pytest.raises(CoverageError) as caught:
        check_tiling("w", (4, 4), [Box((0, 0), (2, 4)), Box((2, 1), (2, 3))])
    assert "cannot save 'w': no shard holds [2:4,0:1]" in str(caught.value)
    assert "shards that fill shape (4, 4)" in str(caught.value)
    assert "next" in caught.value.facts


def test_an_overlap_is_named() -> None:
    with pytest.raises(CoverageError, match=r"cannot save 'w': boxes \[0:2\] and \[1:3\] overlap"):
        check_tiling("w", (3,), [Box((0,), (2,)), Box((1,), (2,))])


def test_a_box_outside_is_named() -> None:
    with pytest.raises(CoverageError, match=r"cannot save 'w': box \[2:4\] lies outside the tensor") as caught:
        check_tiling("w", (3,), [Box((0,), (2,)), Box((2,), (2,))])
    assert caught.value.facts["expected"] == "a box inside shape (3,)"


def test_a_box_of_negative_or_uneven_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="is negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="differ in length"):
        Box((0, 0), (1,))


def test_a_cell_held_twice_does_not_stand_for_one_that_is_missing() -> None:
    offset = np.array([[0, 0], [0, 1], [1, 0], [0, 0]])
    assert not tiles(offset, np.ones((4, 2), np.int64), (2, 2))
    offset[3] = 1
    assert tiles(offset, np.ones((4, 2), np.int64), (2, 2))
