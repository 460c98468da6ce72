"""The chunk table: logical chunks follow from lengths, stored ones lie where the table says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES, MIB
from flowstone.errors import UnsupportedFormatError
from flowstone.table.chunks import CODEC_RAW, Chunks, StoredChunks, distinct, spread

LENGTHS = [3 * MIB + 17, 0, 5, MIB, 2 * MIB]


def chunks_of(lengths: list[int]) -> Chunks:
    """Pieces of these lengths, by turns in two segments."""
    count = len(lengths)
    first = sum(-(-n // CHUNK_BYTES) for n in lengths)
    return Chunks(
        np.arange(count, dtype=np.uint32) % 2, np.arange(count, dtype=np.uint64) * np.uint64(10 * MIB),
        np.array(lengths, np.uint64), np.arange(first, dtype=np.uint64),
    )


def encoded(chunks: Chunks, codec: int = 7) -> Chunks:
    """The same with every chunk a tenth as long, in one segment, the last chunk first."""
    length = chunks.stored_lengths() // 10 + 1
    offset = (np.cumsum(length[::-1], dtype=np.uint64) - length[::-1])[::-1] + np.uint64(4096)
    count = len(length)
    stored = StoredChunks(np.full(count, 2, np.uint32), offset, length, np.full(count, codec, np.uint8))
    return Chunks(chunks.segment, chunks.offset, chunks.length, chunks.digest, stored)


def rows(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def test_logical_chunks_follow_from_the_lengths() -> None:
    chunks = chunks_of(LENGTHS)
    assert chunks.first.tolist() == [0, 4, 4, 5, 6, 8]
    assert chunks.counts.tolist() == [4, 0, 1, 1, 2]
    assert chunks.stored_lengths().tolist() == [MIB, MIB, MIB, 17, 5, MIB, MIB, MIB]
    run = rows(0, 0, 1, 2), rows(0, 3, 0, 0), rows(4, 4, 0, 1)
    assert chunks.logical_bytes(*run).tolist() == [3 * MIB + 17, 17, 0, 5]


def test_without_a_codec_what_is_stored_is_what_is_logical() -> None:
    chunks = chunks_of(LENGTHS)
    run = rows(0, 4), rows(1, 0), rows(4, 2)
    assert chunks.stored_bytes(*run).tolist() == chunks.logical_bytes(*run).tolist()
    segment, offset = chunks.stored_locations(rows(0, 3), rows(2, 0))
    assert (segment.tolist(), offset.tolist()) == ([0, 1], [2 * MIB, 30 * MIB])
    assert set(chunks.codecs().tolist()) == {CODEC_RAW}
    assert chunks.bytes_by_segment(rows(0, 3, 4), rows(0, 0, 1), rows(2, 1, 2), 3).tolist() == [3 * MIB, MIB, 0]


def test_with_a_codec_the_stored_chunks_are_asked() -> None:
    chunks = encoded(chunks_of(LENGTHS))
    run = rows(0, 4), rows(1, 0), rows(4, 2)
    length = chunks.stored_lengths()
    assert chunks.logical_bytes(*run).tolist() == [2 * MIB + 17, 2 * MIB]
    assert chunks.stored_bytes(*run).tolist() == [int(length[1:4].sum()), int(length[6:8].sum())]
    segment, offset = chunks.stored_locations(rows(0, 4), rows(0, 1))
    assert segment.tolist() == [2, 2]
    assert offset.tolist() == [4096 + int(length[1:].sum()), 4096]
    assert chunks.bytes_by_segment(*run, 3).tolist() == [0, 0, int(length[1:4].sum() + length[6:8].sum())]


def test_an_unknown_codec_is_refused_by_name() -> None:
    chunks = encoded(chunks_of(LENGTHS))
    run = rows(2, 4), rows(0, 0), rows(1, 2)
    chunks.check_codecs(*run, ["w", "b"], rows(1, 0), (CODEC_RAW, 7))
    assert chunks.stored is not None
    chunks.stored.codec[:-1] = CODEC_RAW
    with pytest.raises(UnsupportedFormatError, match="'w' is stored with codec 7") as caught:
        chunks.check_codecs(*run, ["w", "b"], rows(1, 0), [CODEC_RAW])
    assert caught.value.facts["expected"] == "codec 0"
    chunks.check_codecs(rows(2), rows(0), rows(1), ["w", "b"], rows(1), [CODEC_RAW])


@pytest.mark.parametrize("seed", range(10))
def test_a_number_among_all_chunks_is_found_again(seed: int) -> None:
    chance = random.Random(seed)
    chunks = chunks_of([chance.choice([0, 1, MIB, MIB + 1, 5 * MIB]) for _ in range(20)])
    expected = [(piece, chunk) for piece, count in enumerate(chunks.counts.tolist()) for chunk in range(count)]
    pieces, numbers = chunks.locate(np.arange(int(chunks.first[-1])))
    assert list(zip(pieces.tolist(), numbers.tolist(), strict=True)) == expected
    assert spread(chunks.first[:-1], chunks.counts).tolist() == list(range(len(expected)))


def test_the_same_bytes_have_the_same_chunks() -> None:
    chunks = chunks_of([MIB + 1, MIB + 1, MIB + 2])
    chunks.digest[:] = [1, 2, 1, 2, 1, 2]
    assert chunks.same_bytes(range(1), range(1, 2))
    assert not chunks.same_bytes(range(1), range(2, 3)), "another length"
    with_codec = encoded(chunks)
    assert with_codec.same_bytes(range(1), range(1, 2))
    assert with_codec.stored is not None
    with_codec.stored.codec[0] = CODEC_RAW
    assert not with_codec.same_bytes(range(1), range(1, 2)), "another codec"


@pytest.mark.parametrize("seed", range(20))
def test_distinct_values_are_those_of_a_set(seed: int) -> None:
    chance = random.Random(seed)
    values = np.array([chance.randint(0, 9) for _ in range(chance.randint(0, 30))], np.uint64)
    assert distinct(values).tolist() == sorted(set(values.tolist()))
    assert distinct(values).dtype == np.uint64
