"""Segment headers: the reserved space is enough for the worst case, and the parser is strict."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowstone.config import BLOCK_BYTES
from flowstone.errors import DamagedError
from flowstone.format.segment import PAD_PREFIX, encode_header, entry_name, entry_text, is_reserved, parse_header
from flowstone.plan.write import data_offsets, plan_writes
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
PIECES = st.lists(
    st.tuples(NAMES, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 200), max_size=3)),
    max_size=8, unique_by=lambda case: case[0],
).map(lambda cases: [Piece(n, DTYPES[kind], tuple(shape), Box.whole(shape)) for n, kind, shape in cases])


@example([Piece("__metadata__", DTYPES["bfloat16"], (), Box((), ()))], 0)
@given(PIECES, st.integers(0, BLOCK_BYTES - 1))
def test_a_header_says_where_each_piece_lies_and_fits_its_room(pieces: list[Piece], phase: int) -> None:
    plan = plan_writes([piece for piece in pieces if not is_reserved(piece.name)])
    offsets = data_offsets(plan, np.full(len(plan.pieces), phase, np.uint64))
    (segment,) = plan.segments
    order = sorted(segment.pieces, key=lambda p: (int(offsets[p]), int(plan.length[p])))
    rows = [(plan.text[p], int(offsets[p]), int(plan.length[p])) for p in order]
    header = encode_header(rows, header_bytes=segment.header_bytes, file_bytes=segment.bytes)
    assert len(header) == segment.header_bytes
    entries, metadata, start = parse_header(header, path="rank")
    assert (start, metadata["flowstone"]) == (segment.header_bytes, "1")
    for position, piece in enumerate(plan.pieces):
        entry = entries.pop(piece.name)
        assert entry.begin + start == int(offsets[position])
        assert entry.end - entry.begin == piece.bytes
        stored = (*piece.shape, piece.dtype.item_bytes) if piece.dtype.as_bytes else piece.shape
        assert (entry.dtype, entry.shape) == (piece.dtype.stored, stored)
    assert all(name.startswith(PAD_PREFIX) for name in entries)


def test_a_part_is_named_by_its_box() -> None:
    assert entry_name("w", Box((0, 0), (4, 2)), (4, 2)) == "w"
    assert entry_name("w", Box((2, 0), (2, 2)), (4, 2)) == "w[2:4,0:2]"
    assert entry_name("scalar", Box((), ()), ()) == "scalar"


def test_a_dtype_that_safetensors_lacks_gets_its_bytes_as_a_dimension() -> None:
    assert entry_text("w", DTYPES["complex128"], (3,)) == '"w":{"dtype":"U8","shape":[3,16],"data_offsets":['


def raw(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def one(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}", raw(b"{"), raw(b"[]"), raw(b"\xff\xfe"),
        raw(b"[" * 100_000), raw({"w": 5}), raw({"w": {}}), raw(one(dtype=3)), raw(one(shape="4")),
        raw(one(shape=[-4])), raw(one(shape=[4.0])), raw(one(shape=[True])), raw(one(data_offsets=[0])),
        raw(one(data_offsets=[0, 4, 8])), raw(one(data_offsets=[4, 0])), raw(one(data_offsets=[1, 4])),
        raw(one() | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}),
        raw(one() | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]}}),
    ],
)
def test_a_header_that_is_none_is_refused_by_file(data: bytes) -> None:
    with pytest.raises(DamagedError, match="rank-7 has no valid safetensors header") as caught:
        parse_header(data, path="rank-7")
    assert caught.value.facts["next"] == "restore the file from a copy"


@given(st.binary(max_size=60))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    for candidate in (data, raw(data)):
        try:
            entries, _, _ = parse_header(candidate, path="rank")
        except DamagedError:
            continue
        assert all(entry.begin <= entry.end for entry in entries.values())
