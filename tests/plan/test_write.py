"""Write plans: slots, phases, packing, sizes, the index of the written pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, PACKED_BELOW_BYTES
from flowstone.errors import CollisionError, CoverageError
from flowstone.plan.write import Writer, data_offsets, plan_writes
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias, Piece
from indexes import index_of


def whole(name: str, shape: tuple[int, ...], kind: str = "float32") -> Piece:
    return Piece(name, DTYPES[kind], shape, Box.whole(shape))


SIZES = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(0, 3 * CHUNK_BYTES))
KINDS = st.sampled_from(["uint8", "int16", "float32", "float64", "complex128"])
MANY = st.lists(st.tuples(SIZES, KINDS), max_size=12).map(
    lambda cases: [whole(f"t{i}", (n // DTYPES[kind].item_bytes,), kind) for i, (n, kind) in enumerate(cases)]
)


@given(MANY, st.data())
def test_extents_stay_in_their_slots_whatever_the_phases(pieces: list[Piece], data: st.DataObject) -> None:
    plan = plan_writes(pieces)
    phases = np.array([data.draw(st.integers(0, BLOCK_BYTES - 1)) for _ in pieces], np.uint64)
    offsets = data_offsets(plan, phases)
    for segment in plan.segments:
        assert segment.bytes % BLOCK_BYTES == 0
        assert segment.header_bytes % BLOCK_BYTES == 0
        index = segment.header_bytes
        for position in segment.pieces:
            begin, length = int(offsets[position]), int(plan.length[position])
            assert begin >= index, "an extent begins before the one in front of it ends"
            index = begin + length
            if length >= PACKED_BELOW_BYTES:
                assert int(plan.slot[position]) % BLOCK_BYTES == 0
                assert begin % BLOCK_BYTES == int(phases[position])
            else:
                assert begin == int(plan.slot[position])
        assert index <= segment.bytes
    assert sorted(p for segment in plan.segments for p in segment.pieces) == list(range(len(pieces)))


@given(MANY)
def test_small_elements_lie_aligned_to_their_size(pieces: list[Piece]) -> None:
    plan = plan_writes(pieces)
    for piece, slot in zip(pieces, plan.slot, strict=True):
        assert int(slot) % min(piece.dtype.item_bytes, 8) == 0


@given(MANY)
def test_file_size_depends_on_the_plan_alone(pieces: list[Piece]) -> None:
    writes, other = plan_writes(pieces), plan_writes(list(pieces))
    assert writes.segments == other.segments
    assert writes.file_bytes == other.file_bytes


def test_stored_size_of_a_realistic_state_is_within_one_percent() -> None:
    pieces = []
    for layer in range(24):
        for name, shape in (("wq", (1024, 1024)), ("w1", (4096, 1024)), ("norm", (1024,)), ("bias", (4096,))):
            path = f"model.layers.{layer}.{name}"
            pieces.append(whole(path, shape, "bfloat16"))
            pieces += [whole(f"opt.state.{path}.{slot}", shape) for slot in ("exp_avg", "exp_avg_sq", "master")]
            pieces.append(whole(f"opt.state.{path}.step", ()))
    plan = plan_writes(pieces)
    assert plan.bytes <= plan.file_bytes <= plan.bytes * 1.01


def test_pieces_of_64_kib_are_slotted_and_smaller_ones_packed() -> None:
    pieces = [whole("a", (PACKED_BELOW_BYTES - 1,), "uint8"), whole("b", (PACKED_BELOW_BYTES,), "uint8")]
    assert plan_writes(pieces).slotted.tolist() == [False, True]


def test_a_header_that_would_grow_too_long_rolls_over() -> None:
    pieces = [whole(f"tensor.{i}", (4,)) for i in range(300)]
    plan = plan_writes(pieces, writer=Writer(3), header_bytes_max=2 * BLOCK_BYTES)
    names = [segment.name for segment in plan.segments]
    assert names[:3] == ["rank-00003.safetensors", "rank-00003.0001.safetensors", "rank-00003.0002.safetensors"]
    assert all(segment.header_bytes <= 2 * BLOCK_BYTES for segment in plan.segments)
    assert len(plan_writes(pieces).segments) == 1


def test_an_empty_state_has_one_segment_without_pieces() -> None:
    plan = plan_writes([])
    assert [(s.name, s.header_bytes, s.bytes, s.pieces) for s in plan.segments] == [
        ("rank-00000.safetensors", BLOCK_BYTES, BLOCK_BYTES, ())
    ]


def test_the_index_groups_pieces_by_tensor_and_keeps_their_digests() -> None:
    a, b = DTYPES["uint8"], DTYPES["float32"]
    mib = CHUNK_BYTES
    pieces = [
        Piece("x", a, (4 * mib,), Box((0,), (mib + 1,))),  # chunks 0, 1
        Piece("y", b, (2,), Box((0,), (2,))),  # chunk 2
        Piece("none", b, (0,), Box((0,), (0,))),
        Piece("x", a, (4 * mib,), Box((mib + 1,), (3 * mib - 1,))),  # chunks 3, 4, 5
    ]
    plan = plan_writes(pieces)
    offsets = data_offsets(plan, np.zeros(4, np.uint64))
    index = index_of(plan, offsets, np.arange(100, 106, dtype=np.uint64), [Alias("tied", "y")])
    assert (index.tensors.names, index.aliases) == (("x", "y", "none"), (("tied", 1),))
    assert index.chunks.digest.tolist() == [100, 101, 103, 104, 105, 102]
    assert index.chunks.stored_lengths().tolist() == [mib, 1, mib, mib, mib - 1, 8]
    assert index.pieces.tensor.tolist() == [0, 0, 1, 2]
    assert index.chunks.first.tolist() == [0, 2, 5, 6, 6]
    assert [index.pieces.box(p) for p in range(4)] == [pieces[i].box for i in (0, 3, 1, 2)]


def test_shards_that_disagree_about_their_tensor_are_refused() -> None:
    pieces = [Piece("w", DTYPES["float32"], (4,), Box((0,), (2,))), Piece("w", DTYPES["int8"], (4,), Box((2,), (2,)))]
    with pytest.raises(CollisionError, match="two shards of 'w' describe different tensors") as caught:
        plan_writes(pieces)
    assert (caught.value.facts["expected"], caught.value.facts["found"]) == ("float32 (4,)", "int8 (4,)")


def test_a_missing_shard_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"cannot save 'w': no shard holds \[2:4\]"):
        plan_writes([Piece("w", DTYPES["float32"], (4,), Box((0,), (2,)))])


def test_a_tensor_whose_name_is_anothers_entry_is_refused() -> None:
    parts = [Piece("w", DTYPES["float32"], (4,), Box((position,), (2,))) for position in (0, 2)]
    with pytest.raises(CollisionError, match="would both be stored under the name"):
        plan_writes([*parts, whole("w[0:2]", (2,))])


@pytest.mark.parametrize("name", ["__metadata__", "__pad__.0"])
def test_a_tensor_whose_name_a_segment_needs_itself_is_refused(name: str) -> None:
    with pytest.raises(CollisionError, match="the name '__"):
        plan_writes([whole(name, (2,))])
