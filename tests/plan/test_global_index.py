"""The global index of several ranks and its parts, compared with plain loops over records."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_assign_writers import boxes, jobs

from flowstone.config import CHUNK_BYTES
from flowstone.format.index import Index, decode_index
from flowstone.format.manifest import SegmentRow
from flowstone.plan.assign_writers import assign_writers
from flowstone.plan.coverage import tiles, uncovered
from flowstone.plan.global_index import global_index
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias, Pieces, TensorColumns

U8 = DTYPES["uint8"]


def decoded(held: Sequence[Pieces], writes: Sequence[np.ndarray], aliases: Sequence[Alias] = ()) -> Index:
    """The index of what ranks write, each piece one behind the other, through its file."""
    segment = np.repeat(np.arange(len(held), dtype=np.uint32), list(map(len, writes)))
    frame, order, chunk_order = global_index(held, writes, aliases, segment)
    offsets, segments = [], []
    for rank, (item, of) in enumerate(zip(held, writes, strict=True)):
        index = 4096
        pieces = boxes(item) if item.kinds is None else []
        for position in of.tolist():
            offsets.append(index)
            index += pieces[position][1].elements * item.dtypes[position].item_bytes
        segments.append(SegmentRow(rank, None, f"r{rank}", index, 4096, "0" * 16))
    digests = np.arange(len(chunk_order), dtype=np.uint64)
    file = frame.fill(np.array(offsets, np.uint64)[order], digests[chunk_order])
    return decode_index(file, segments=segments, path="index")


@settings(deadline=None)
@given(jobs())
def test_every_piece_is_listed_as_a_loop_would(held: list[Pieces]) -> None:
    writes = assign_writers(held).writes
    index = decoded(held, writes)
    expected: dict[str, list[tuple[int, Box]]] = {}
    for rank, (item, of) in enumerate(zip(held, writes, strict=True)):
        pieces = boxes(item)
        for position in of.tolist():
            expected.setdefault(pieces[position][0], []).append((rank, pieces[position][1]))
    assert set(index.tensors.names) == {name for pieces in held for name in pieces.names}
    for row, name in enumerate(index.tensors.names):
        actual = [(int(index.chunks.segment[piece]), index.pieces.box(piece)) for piece in index.pieces_of(row)]
        assert actual == expected[name]
        length = [int(index.chunks.length[piece]) for piece in index.pieces_of(row)]
        assert length == [4 * box.elements for _, box in expected[name]]
    # A digest is its number among the chunks of all ranks, one after the other; no piece has more than one.
    lengths = [boxes(entry)[index][1].elements for entry, of in zip(held, writes, strict=True) for index in of.tolist()]
    ranks = np.repeat(np.arange(len(held)), list(map(len, writes)))[np.flatnonzero(lengths)]
    chunks = np.searchsorted(index.chunks.first, np.arange(len(index.chunks.digest)), side="right") - 1
    assert index.chunks.segment[chunks].tolist() == ranks[index.chunks.digest.astype(int)].tolist()
    assert sorted(index.chunks.digest.tolist()) == list(range(len(ranks)))


def test_chunks_keep_their_digests_when_pieces_are_put_in_order() -> None:
    """Pieces of two, one and no chunks, from two ranks that hold them in different orders."""
    sizes = {"a": CHUNK_BYTES + 5, "b": 7, "c": 0}
    half = {"a": (0, CHUNK_BYTES + 5), "b": (0, 4), "c": (0, 0)}

    def rank(names: str, rest: bool) -> Pieces:
        parts = [index for index, name in enumerate(names) if name == "b"]
        box = [4, 3] if rest else list(half["b"])
        shapes = tuple((sizes[name],) for name in names)
        return Pieces(TensorColumns(tuple(names), (U8,) * len(names), shapes), np.array(parts), np.array(box))

    held = [rank("ba", rest=False), rank("cb", rest=True)]
    index = decoded(held, [np.array([0, 1]), np.array([0, 1])], [Alias("tied", "a")])
    assert index.tensors.names == ("b", "a", "c")
    assert index.aliases == (("tied", 1),)
    # Chunks before: b's first box 0, a 1 and 2, c none, b's second box 3.
    assert index.chunks.digest.tolist() == [0, 3, 1, 2]
    assert index.chunks.stored_lengths().tolist() == [4, 3, CHUNK_BYTES, 5]


@settings(deadline=None)
@given(jobs())
def test_compact_columns_are_shared_out_like_plain_ones(held: list[Pieces]) -> None:
    plain, assigned = assign_writers(held), assign_writers([pieces.compact() for pieces in held])
    assert [of.tolist() for of in assigned.writes] == [of.tolist() for of in plain.writes]
    assert assigned.bytes.tolist() == plain.bytes.tolist()


def test_compact_columns_name_each_box_once() -> None:
    names = TensorColumns(tuple("abcde"), (U8,) * 5, ((8, 2), (8, 2), (4,), (8, 2), (8,)))
    held = Pieces(
        names, np.array([0, 1, 2, 3, 4]), np.array([2, 0, 4, 2, 2, 0, 4, 2, 1, 2, 0, 0, 2, 2, 1, 2])
    ).compact()
    assert held.kinds is not None
    assert held.kinds.tolist() == [0, 0, 1, 2, 3], "boxes of tensors of different shapes stay apart"
    assert held.boxes.tolist() == [2, 0, 4, 2, 1, 2, 0, 0, 2, 2, 1, 2]


def test_a_tensor_may_occur_twice_on_a_rank() -> None:
    """As a DTensor does whose local part is two regions."""
    names = TensorColumns(("w", "w", "v", "v"), (U8,) * 4, ((8,),) * 4)
    held = [Pieces(names, np.arange(4), np.array([position, 2, position + 4, 2] * 2)) for position in (0, 2)]
    assigned = assign_writers(held)
    assert [of.tolist() for of in assigned.writes] == [[0, 1, 2, 3]] * 2
    index = decoded(held, assigned.writes)
    assert [str(index.pieces.box(piece)) for piece in range(8)] == ["[0:2]", "[4:6]", "[2:4]", "[6:8]"] * 2


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_boxes_tile_where_painting_says_so(chance: random.Random) -> None:
    shape = tuple(chance.randint(0, 4) for _ in range(chance.randint(0, 3)))
    edges = [sorted({0, side, *(chance.randint(0, side) for _ in range(2))}) for side in shape]
    cells: list[tuple[list[int], list[int]]] = [([], [])]
    for of in edges:
        spans = list(pairwise(of)) or [(0, 0)]
        cells = [([*o, a], [*n, b - a]) for o, n in cells for a, b in spans]
    chance.shuffle(cells)
    if chance.random() < 0.5:  # spoil it
        cells = [cell for cell in cells if chance.random() < 0.9] + chance.sample(cells, chance.randint(0, 1))
    grid = np.zeros(shape, int)
    for offset, sides in cells:
        grid[tuple(slice(o, o + n) for o, n in zip(offset, sides, strict=True))] += 1
    offset = np.array([o for o, _ in cells], np.int64).reshape(len(cells), len(shape))
    sides = np.array([n for _, n in cells], np.int64).reshape(len(cells), len(shape))
    if tiles(offset, sides, shape):
        assert (grid == 1).all()
    elif (grid == 1).all():
        boxes = [Box(tuple(o), tuple(n)) for o, n in cells]
        assert uncovered(Box.whole(shape), boxes) is None
        assert grid.size == 0 or not _is_regular(offset, sides), "a grid is seen to be one"


def _is_regular(offset: np.ndarray, sides: np.ndarray) -> bool:
    return all(len(np.unique(offset[:, dim])) <= 1 for dim in range(offset.shape[1])) and bool(sides.all())


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_many_layouts_are_shares_of_each(seed: int) -> None:
    """Whether a tensor is alone in its class, or one of a thousand, its pieces are written once."""
    chance = random.Random(seed)
    shapes = [(chance.choice([4, 8]), 4) for _ in range(200)]
    names = TensorColumns(tuple(f"w{i}" for i in range(200)), (U8,) * 200, tuple(shapes))
    ranks = []
    for rank in range(8):
        part = [index for index in range(200) if shapes[index][0] == 8 or seed % 2]
        numbers = [n for index in part for n in (rank % 4 * shapes[index][0] // 4, 0, shapes[index][0] // 4, 4)]
        ranks.append(Pieces(names, np.array(part, np.int64), np.array(numbers, np.int64)).compact())
    assigned = assign_writers(ranks)
    times = np.zeros((4, 200), int)
    for rank, of in enumerate(assigned.writes):
        for position in of.tolist():
            times[rank % 4 if position in ranks[rank].parts else slice(None), position] += 1
    assert (times == 1).all()
    assert assigned.bytes.max() - assigned.bytes.min() <= 32
