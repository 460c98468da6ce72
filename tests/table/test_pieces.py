"""Pieces as columns equal records: of one rank, with a tensor for each piece; and of all, with several for a tensor."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowstone.format.index import decode_index, index_template
from flowstone.format.manifest import SegmentRow
from flowstone.table.box import Box
from flowstone.table.chunks import Chunks
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece, Pieces, TensorColumns

KINDS = [DTYPES[name] for name in ("uint8", "float16", "float32", "int64")]


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, side)) for side in shape)
    return Box(offset, tuple(draw(st.integers(0, side - offset)) for side, offset in zip(shape, offset, strict=True)))


@st.composite
def listed(draw: st.DrawFn) -> tuple[Pieces, list[Piece]]:
    """Pieces of some tensors, grouped by tensor, and the same as records; some are whole."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5))
    tensors = TensorColumns(
        tuple(f"t{i}" for i in range(len(shapes))), tuple(draw(st.sampled_from(KINDS)) for _ in shapes), tuple(shapes)
    )
    rows = sorted(draw(st.lists(st.integers(0, len(shapes) - 1), max_size=9)))
    parts: dict[int, Box] = {}
    records = []
    for index, row in enumerate(rows):
        box = draw(st.one_of(st.just(Box.whole(shapes[row])), boxes_in(shapes[row])))
        if box != Box.whole(shapes[row]):
            parts[index] = box
        records.append(Piece(tensors.names[row], tensors.dtypes[row], shapes[row], box))
    numbers = [n for part in sorted(parts) for n in (*parts[part].offset, *parts[part].shape)]
    pieces = Pieces(
        tensors, np.array(sorted(parts), np.int64), np.array(numbers, np.int64), rows=np.array(rows, np.int64)
    )
    return pieces, records


def with_every_box(pieces: Pieces) -> Pieces:
    """The same with a box of its own for each, whole ones too, as an index lists them."""
    return Pieces(pieces.tensors, np.arange(len(pieces)), pieces.numbers(), rows=pieces.rows)


@given(listed())
def test_columns_in_which_a_tensor_has_several_pieces_say_what_records_do(case: tuple[Pieces, list[Piece]]) -> None:
    pieces, records = case
    numbers = [n for piece in records for n in (*piece.box.offset, *piece.box.shape)]
    for piece in (pieces, pieces.compact(), with_every_box(pieces)):
        assert list(piece) == records
        assert [piece.box(index) for index in range(len(piece))] == [piece.box for piece in records]
        assert (list(piece.names), list(piece.dtypes), list(piece.shapes)) == (
            [piece.name for piece in records], [piece.dtype for piece in records], [piece.shape for piece in records]
        )
        assert piece.lengths().tolist() == [piece.bytes for piece in records]
        assert piece.numbers().tolist() == numbers
    assert pieces == pieces.compact()


@given(listed(), st.data())
def test_what_is_taken_of_them_names_the_tensor_of_each(case: tuple[Pieces, list[Piece]], data: st.DataObject) -> None:
    pieces, records = case
    some = [index for index in range(len(records)) if data.draw(st.booleans())]
    for item in (pieces, pieces.compact(), with_every_box(pieces)):
        taken = item.take(some)
        assert list(taken) == [records[index] for index in some]
    assert Pieces.of(records).lengths().tolist() == pieces.lengths().tolist()
    assert Pieces.of(records).numbers().tolist() == pieces.numbers().tolist()


@given(listed())
def test_an_index_is_made_of_pieces_and_gives_them_back(case: tuple[Pieces, list[Piece]]) -> None:
    pieces, records = case
    length = pieces.lengths()
    chunks = Chunks.unwritten(np.zeros(len(pieces), np.uint32), length)
    offsets = 4096 + np.cumsum(length) - length
    digests = np.arange(len(chunks.digest), dtype=np.uint64)
    segments = [SegmentRow(0, None, "rank-00000.safetensors", 4096 + int(length.sum()), 4096, "0" * 16)]
    alike = pieces, pieces.compact(), with_every_box(pieces)
    files = {index_template(piece, [], chunks).fill(offsets, digests) for piece in alike}
    assert len(files) == 1, "how boxes are listed makes no difference on disk"
    index = decode_index(files.pop(), segments=segments, path="index")
    assert list(index.pieces) == records
    assert index.tensors == pieces.tensors
    assert index.tensors.lengths.tolist() == [
        Box.whole(shape).elements * dtype.item_bytes
        for shape, dtype in zip(pieces.tensors.shapes, pieces.tensors.dtypes, strict=True)
    ]
    assert index.pieces.parts.tolist() == list(range(len(records))), "each has a box"


def test_a_tensor_held_in_parts_may_have_more_elements_than_a_number_counts() -> None:
    shape = (1 << 40, 1 << 40)
    piece = Piece("w", DTYPES["uint8"], shape, Box((0, 0), (1, 7)))
    assert Pieces.of([piece, Piece("v", DTYPES["uint8"], (3,), Box.whole((3,)))]).lengths().tolist() == [7, 3]
