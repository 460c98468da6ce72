"""Encoded chunks: the chunk table determines which bytes are read, and which chunks are refused.

The codec is imaginary: nothing makes such checkpoints yet. Chunks that are stored raw, but elsewhere, are read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import flowstone as fs
from flowstone.config import CHUNK_BYTES, MIB
from flowstone.format.index import Index
from flowstone.node_reads.assign_readers import assign_readers
from flowstone.plan.read import plan_reads
from flowstone.store.local import LocalStore
from flowstone.table.box import Box
from flowstone.table.chunks import CODEC_RAW, Chunks, StoredChunks
from flowstone.table.pieces import Piece

CODEC = 9
LONG, SHORT = 3 * MIB + 5, 700  # elements of four bytes


@pytest.fixture
def checkpoint(tmp_path: Path) -> fs.Checkpoint:
    state = {"m": {"long": torch.arange(LONG, dtype=torch.int32), "short": torch.ones(SHORT, dtype=torch.int32)}}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
    return fs.open(tmp_path / "run")


def store_elsewhere(checkpoint: fs.Checkpoint, length: NDArray[np.uint32], codec: int) -> StoredChunks:
    """Change the opened checkpoint's table: all chunks in a second segment, the last one first, with gaps."""
    chunks = checkpoint.index.chunks
    buffer = length[::-1].astype(np.uint64) + np.uint64(77)
    offset = (np.cumsum(buffer) - buffer)[::-1]
    count = len(length)
    stored = StoredChunks(np.ones(count, np.uint32), offset, length, np.full(count, codec, np.uint8))
    chunks = Chunks(chunks.segment, chunks.offset, chunks.length, chunks.digest, stored)
    checkpoint.__dict__["index"] = Index(checkpoint.index.pieces, checkpoint.index.aliases, chunks)
    first = checkpoint.manifest.segments[0]
    second = msgspec.structs.replace(first, id=1, name="second.safetensors")
    directory = Path(checkpoint.path)
    (directory / second.name).write_bytes((directory / first.name).read_bytes())
    checkpoint.__dict__["manifest"] = msgspec.structs.replace(checkpoint.manifest, segments=[first, second])
    return stored


def encoded(checkpoint: fs.Checkpoint) -> StoredChunks:
    """With chunks a tenth as long, and the one of `short` longer than it is."""
    length = checkpoint.index.chunks.stored_lengths() // 10 + 1000
    return store_elsewhere(checkpoint, length, CODEC)


def wanted_of(index: Index) -> list[Piece]:
    """A part of the long one, in chunks 2 to 4, and all of the short one."""
    box = Box((CHUNK_BYTES // 2,), (CHUNK_BYTES // 2 + 1,))
    row = index.rows()
    shapes = index.tensors.shapes[row["m.long"]], index.tensors.shapes[row["m.short"]]
    dtype = index.tensors.dtypes[row["m.long"]]
    return [Piece("m.long", dtype, shapes[0], box), Piece("m.short", dtype, shapes[1], Box.whole(shapes[1]))]


def test_a_read_plan_places_logical_chunks_and_counts_stored_bytes(checkpoint: fs.Checkpoint) -> None:
    expected = wanted_of(checkpoint.index)
    rows = [checkpoint.index.rows()[piece.name] for piece in expected]
    before = plan_reads(checkpoint.index, expected, rows)
    stored = encoded(checkpoint)
    after = plan_reads(checkpoint.index, expected, rows)
    for name in ("piece", "target", "first", "last"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), "what is wanted is the same"
    assert (before.common, before.bytes) == (after.common, 3 * MIB + 4 * SHORT)
    first = checkpoint.index.chunks.first
    long, short = (checkpoint.index.first_piece[row] for row in rows)
    assert after.bytes == int(stored.length[first[long] + 2 : first[long] + 5].sum() + stored.length[first[short]])


def test_readers_are_assigned_by_what_is_stored_and_where(checkpoint: fs.Checkpoint) -> None:
    index, rows = checkpoint.index, checkpoint.index.rows()
    long, short = (int(index.first_piece[rows[name]]) for name in ("m.long", "m.short"))
    expected = [np.array([(long, 0, 13), (short, 0, 1)], np.int64)] * 2
    before = assign_readers(expected, 0, index.chunks, half_bytes=16 * MIB)
    stored = encoded(checkpoint)
    chunks = checkpoint.index.chunks
    after = assign_readers(expected, 0, chunks, half_bytes=16 * MIB)
    assert before.bytes == 4 * (LONG + SHORT)
    assert after.bytes == int(stored.length.sum())
    for actual, table in ((before, index.chunks), (after, chunks)):
        _, offset = table.stored_locations(actual.piece, actual.first)
        starts = offset[actual.first == 0]
        assert (np.diff(starts) > 0).all(), "in the order in which they lie"
        runs = zip(actual.piece.tolist(), actual.first.tolist(), actual.last.tolist(), strict=True)
        assert sorted(runs) == sorted([(long, 0, 8), (long, 8, 13), (short, 0, 1)])
    _, offset = chunks.stored_locations(after.piece, after.first)
    assert before.piece[0] != after.piece[0], "the last chunk lies first"
    by_reader = [after.piece[after.reader == reader] for reader in range(2)]
    assert all(len(item) for item in by_reader), "both read"


def test_an_explanation_tells_what_is_stored_of_which_segment(checkpoint: fs.Checkpoint) -> None:
    target = {"m": {"long": torch.zeros(LONG, dtype=torch.int32), "short": torch.zeros(SHORT, dtype=torch.int32)}}
    before = fs.explain(checkpoint, target)
    assert [(row.segment, row.bytes) for row in before.sources] == [("rank-00000.safetensors", 4 * (LONG + SHORT))]
    stored = encoded(checkpoint)
    after = fs.explain(checkpoint, target)
    assert after.read_bytes == int(stored.length.sum())
    assert [(source.segment, source.bytes) for source in after.sources] == [("second.safetensors", after.read_bytes)]
    assert after.bytes == before.bytes == 4 * (LONG + SHORT)


def test_an_unknown_codec_is_refused_by_name_before_a_byte_moves(
    checkpoint: fs.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = encoded(checkpoint)
    monkeypatch.setattr(LocalStore, "read_extents", lambda *_, **__: pytest.fail("bytes were read"))
    with pytest.raises(fs.UnsupportedFormatError, match=f"'m.long' is stored with codec {CODEC}, which this version"):
        checkpoint.read("m.long")
    first = checkpoint.index.chunks.first[checkpoint.index.first_piece[checkpoint.index.rows()["m.long"]]]
    stored.codec[:] = CODEC_RAW
    stored.codec[first + 12] = CODEC
    with pytest.raises(fs.UnsupportedFormatError, match=r"'m\.long' is stored with codec"):
        checkpoint.read("m.long", box=Box((LONG - 1,), (1,)))


@pytest.mark.parametrize("box", [Box((0,), (LONG,)), Box((CHUNK_BYTES // 2 - 3,), (MIB,)), Box((LONG - 2,), (2,))])
def test_raw_chunks_are_read_from_wherever_they_are_stored(checkpoint: fs.Checkpoint, box: Box) -> None:
    chunks = checkpoint.index.chunks
    lengths = chunks.stored_lengths()
    segment = Path(checkpoint.path) / "rank-00000.safetensors"
    data = segment.read_bytes()
    _, begins = chunks.stored_locations(*chunks.locate(np.arange(len(lengths))))
    moved = store_elsewhere(checkpoint, lengths, CODEC_RAW)
    second = bytearray(int((moved.offset + lengths).max()))
    for old, new, length in zip(begins.tolist(), moved.offset.tolist(), lengths.tolist(), strict=True):
        second[new : new + length] = data[old : old + length]
    (segment.parent / "second.safetensors").write_bytes(second)
    segment.write_bytes(bytes(len(data)))  # nothing is read there
    tensor = checkpoint.read("m.long", box=box)
    assert torch.equal(torch.as_tensor(tensor), torch.arange(LONG, dtype=torch.int32)[box.offset[0] : box.end[0]])
    second[0] ^= 1  # the last chunk of the last piece lies first
    (segment.parent / "second.safetensors").write_bytes(second)
    last = checkpoint.index.tensors.names[-1]
    with pytest.raises(fs.DamagedError, match="stored bytes do not match their digests") as caught:
        checkpoint.read(last)
    assert "bytes 0.." in str(caught.value.facts["damaged"])
    assert "second.safetensors" in str(caught.value.facts["damaged"])
