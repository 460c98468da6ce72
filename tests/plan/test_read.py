"""Read plans: the chunks that contain a box, and the boxes that fill another, compared with numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.config import CHUNK_BYTES
from flowstone.errors import CoverageError
from flowstone.format.index import Index
from flowstone.plan.read import chunk_runs, plan_reads
from flowstone.plan.write import data_offsets, plan_writes
from flowstone.table.box import Box
from flowstone.table.chunks import Chunks
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece, Pieces
from indexes import index_of

ITEM_BYTES = 16  # few elements to a chunk keep the brute-force reference small
PER_CHUNK = CHUNK_BYTES // ITEM_BYTES


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape of up to several chunks, and a box of it."""
    ndim = draw(st.integers(0, 4))
    shape, available_bytes = [], 4 * PER_CHUNK
    for _ in range(ndim):
        shape.append(draw(st.integers(0, min(available_bytes, 70_000))))
        available_bytes = max(1, available_bytes // max(1, shape[-1]))
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return tuple(shape), Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


@settings(deadline=None)
@given(shapes_and_boxes())
def test_chunk_runs_are_the_chunks_that_hold_a_wanted_element(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    held = np.unique(numbers[tuple(map(slice, box.offset, box.end))] // PER_CHUNK).tolist()
    runs = chunk_runs(shape, box, ITEM_BYTES)
    assert [chunk for first, last in runs for chunk in range(first, last)] == held
    assert all(first < last for first, last in runs)
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs)), "neighbouring runs are one"


def test_a_narrow_column_skips_the_chunks_between_its_rows() -> None:
    assert chunk_runs((4, 3 * CHUNK_BYTES), Box((0, 0), (4, 1)), 1) == ((0, 1), (3, 4), (6, 7), (9, 10))


def test_an_element_across_a_chunk_border_needs_both_chunks() -> None:
    assert chunk_runs((CHUNK_BYTES,), Box((CHUNK_BYTES // 3,), (1,)), 3) == ((0, 2),)


def stored(shape: tuple[int, ...], boxes: list[Box]) -> Index:
    """The index of one float32 tensor `w`, stored in boxes."""
    kind = DTYPES["float32"]
    plan = plan_writes([Piece("w", kind, shape, box) for box in boxes])
    return index_of(plan, data_offsets(plan, np.zeros(len(boxes), np.uint64)), np.zeros(plan.chunks, np.uint64))


@st.composite
def tilings(draw: st.DrawFn, box: Box, cuts: int = 4) -> list[Box]:
    """Disjoint boxes that fill `box`, made by cutting it again and again."""
    wide = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not cuts or not wide or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(wide))
    position = draw(st.integers(1, box.shape[dim] - 1))
    low = Box(box.offset, (*box.shape[:dim], position, *box.shape[dim + 1 :]))
    offset = (*box.offset[:dim], box.offset[dim] + position, *box.offset[dim + 1 :])
    high = Box(offset, (*box.shape[:dim], box.shape[dim] - position, *box.shape[dim + 1 :]))
    return draw(tilings(low, cuts - 1)) + draw(tilings(high, cuts - 1))


@st.composite
def resharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes = draw(tilings(Box.whole(shape)).flatmap(st.permutations))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
    return shape, boxes, box


@given(resharded())
def test_copies_fill_the_wanted_box_as_slicing_would(case: tuple[tuple[int, ...], list[Box], Box]) -> None:
    shape, boxes, expected = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    index = stored(shape, boxes)
    plan = plan_reads(index, [Piece("w", DTYPES["float32"], shape, expected)], [0])
    target, times = np.full(expected.shape, -1), np.zeros(expected.shape, int)
    for row, piece in enumerate(plan.piece.tolist()):
        box = index.pieces.box(piece)
        common = plan.common.get(row, expected)
        extent = whole[tuple(map(slice, box.offset, box.end))]
        inner, outer = common.within(box), common.within(expected)
        position = tuple(map(slice, outer.offset, outer.end))
        target[position] = extent[tuple(map(slice, inner.offset, inner.end))]
        times[position] += 1
        assert (plan.target[row], plan.first[row], plan.last[row]) == (0, 0, 1)
    assert np.array_equal(target, whole[tuple(map(slice, expected.offset, expected.end))])
    assert (times == 1).all()
    assert plan.bytes == sum(int(index.chunks.length[piece]) for piece in plan.piece)


def test_a_region_that_nobody_stored_is_named() -> None:
    index = stored((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))])
    first = Chunks(*(getattr(index.chunks, name)[:1] for name in ("segment", "offset", "length", "digest")))
    pieces = index.pieces
    half = Index(
        Pieces(pieces.tensors, pieces.parts[:1], pieces.boxes[:4], rows=pieces.tensor[:1]), index.aliases, first
    )
    with pytest.raises(CoverageError) as caught:
        plan_reads(half, [Piece("w", DTYPES["float32"], (4, 4), Box((1, 1), (3, 2)))], [0])
    assert caught.value.message == "cannot load 'w': the checkpoint does not contain the elements of [2:4,1:3]"
    assert caught.value.facts["wanted"] == "box [1:4,1:3] of shape (4, 4)"
    assert "flowstone verify" in str(caught.value.facts["next"])


def plainly(index: Index, expected: list[Piece], rows: list[int]) -> list[tuple[int, int, int, int, Box | None]]:
    """The rows of a read plan, by loops over records: (stored piece, wanted one, first chunk, last, region)."""
    actual = []
    for position, (piece, row) in enumerate(zip(expected, rows, strict=True)):
        for number in index.pieces_of(row):
            box = index.pieces.box(number)
            region = box.intersect(piece.box)
            if region is not None:
                item_bytes = index.tensors.dtypes[row].item_bytes
                for first, last in chunk_runs(box.shape, region.within(box), item_bytes):
                    actual.append((number, position, first, last, None if box == region == piece.box else region))
    return actual


@st.composite
def many(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Tensors of few shapes, stored and wanted in boxes, some of them alike."""
    shapes = draw(st.lists(st.sampled_from([(), (6,), (6, 4), (3, 700_000)]), min_size=1, max_size=6))
    stored, expected = [], []
    cuts = {shape: draw(st.lists(tilings(Box.whole(shape)), min_size=1, max_size=2)) for shape in sorted(set(shapes))}
    for number, shape in enumerate(shapes):
        kind = DTYPES[draw(st.sampled_from(["float32", "uint8"]))]
        boxes = draw(st.sampled_from(cuts[shape]).flatmap(st.permutations))
        stored += [Piece(f"t{number}", kind, shape, box) for box in boxes]
        box = draw(st.sampled_from([Box.whole(shape), *cuts[shape][0], *cuts[shape][-1]]))
        expected.append(Piece(f"t{number}", kind, shape, box))
    return stored, draw(st.permutations(expected))


@settings(deadline=None)
@given(many())
def test_a_plan_of_many_tensors_reads_what_loops_over_records_would(case: tuple[list[Piece], list[Piece]]) -> None:
    stored, expected = case
    written = plan_writes(stored)
    index = index_of(
        written, data_offsets(written, np.zeros(len(stored), np.uint64)), np.zeros(written.chunks, np.uint64)
    )
    rows = [index.rows()[piece.name] for piece in expected]
    plan = plan_reads(index, expected, rows)
    reported = set()
    columns = (plan.piece.tolist(), plan.target.tolist(), plan.first.tolist(), plan.last.tolist())
    for row, (piece, target, first, last) in enumerate(zip(*columns, strict=True)):
        common = plan.common.get(row)
        is_all = common == index.pieces.box(piece) == expected[target].box
        reported.add((piece, target, first, last, None if is_all else common))
    assert reported == set(plainly(index, expected, rows))
    assert len(plan.piece) == len(reported)


def test_an_overlap_in_a_forged_index_does_not_pass_for_what_is_missing() -> None:
    """As many elements as are wanted, but not each of them."""
    index = stored((6,), [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (2,))])
    forged = Index(replace(index.pieces, boxes=np.array([0, 2, 0, 2, 4, 2])), index.aliases, index.chunks)
    with pytest.raises(CoverageError, match=r"does not contain the elements of \[2:4\]"):
        plan_reads(forged, [Piece("w", DTYPES["float32"], (6,), Box((0,), (6,)))], [0])
