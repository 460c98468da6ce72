"""Chunks: how the bytes of pieces are cut, and where each chunk is stored.

A *logical chunk* is CHUNK_BYTES of a piece's bytes in row-major order, the last one shorter: which bytes it is follows
from the piece's length alone. The *stored chunk* is what a segment holds of it: bytes in an encoding, with a digest
over them as they are stored. Without a codec both are the same, and the chunks of a piece lie one behind the other in
its extent. That is computed, and takes no room: `StoredChunks` is there only where something differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.errors import UnsupportedFormatError

CODEC_RAW = 0
"""The codec id of chunks that are stored as they are."""

U64 = NDArray[np.uint64]
Rows = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)


class StoredChunks(msgspec.Struct, frozen=True, eq=False):
    """Where chunks are stored, and how, as columns with an entry for each chunk, in piece order.

    segment         id of the segment
    offset, length  in bytes, in that segment
    codec           how the bytes are encoded
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of pieces, as columns: first those with an entry for each piece, then those for each chunk.

    segment, offset  of the piece's extent, in which its chunks lie one behind the other, unless `stored` differs
    length           of the piece, in bytes
    digest           of the bytes of each chunk as they are stored
    stored           where the chunks lie; None: each raw, at its place in its piece's extent
    first            the number of each piece's first chunk, and of all chunks

    Methods take runs of chunks: chunks [first, last) of each of `pieces`, numbered from 0 in each piece.
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: U64
    digest: U64
    stored: StoredChunks | None = None
    first: Rows = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", first_chunks(self.length))

    @classmethod
    def to_come(cls, segment: NDArray[np.uint32], length: U64) -> Chunks:
        """What is known of chunks before they are written: no offsets, no digests."""
        found = cls(segment, np.zeros(len(length), np.uint64), length, np.zeros(0, np.uint64))
        object.__setattr__(found, "digest", np.zeros(int(found.first[-1]), np.uint64))
        return found

    @property
    def one_each(self) -> bool:
        """Whether every piece has one chunk, as where thousands of ranks split every tensor."""
        return len(self.first) == int(self.first[-1]) + 1 and bool(self.length.all())

    @property
    def counts(self) -> Rows:
        """How many chunks each piece has."""
        return np.diff(self.first)

    def logical_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """Of each run: the bytes of the pieces that it is."""
        length = self.length[pieces].astype(np.int64)
        return np.minimum(last * CHUNK_BYTES, length) - np.minimum(first * CHUNK_BYTES, length)

    def stored_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """Of each run: the bytes to read for it."""
        if self.stored is None:
            return self.logical_bytes(pieces, first, last)
        ends = np.zeros(len(self.stored.length) + 1, np.int64)
        np.cumsum(self.stored.length, out=ends[1:])
        begin = self.first[pieces]
        found: Rows = ends[begin + last] - ends[begin + first]
        return found

    def stored_at(self, pieces: Rows, chunks: Rows) -> tuple[NDArray[np.uint32], Rows]:
        """Of chunk number `chunks` of each of `pieces`: the segment, and the offset there, in bytes."""
        if self.stored is None:
            return self.segment[pieces], self.offset[pieces].astype(np.int64) + chunks * CHUNK_BYTES
        numbers = self.first[pieces] + chunks
        return self.stored.segment[numbers], self.stored.offset[numbers].astype(np.int64)

    def bytes_by_segment(self, pieces: Rows, first: Rows, last: Rows, segments: int) -> Rows:
        """Of each of `segments`: the bytes to read from it for all runs."""
        if self.stored is None:
            segment, length = self.segment[pieces], self.logical_bytes(pieces, first, last)
        else:
            numbers = spread(self.first[pieces] + first, last - first)
            segment, length = self.stored.segment[numbers], self.stored.length[numbers].astype(np.int64)
        return np.bincount(segment.astype(np.int64), length, segments).astype(np.int64)

    def stored_lengths(self) -> NDArray[np.uint32]:
        """The bytes of each chunk as it is stored."""
        if self.stored is not None:
            return self.stored.length
        if self.one_each:
            return self.length.astype(np.uint32)
        found = np.full(int(self.first[-1]), CHUNK_BYTES, np.uint32)
        some = self.length > 0
        found[self.first[1:][some] - 1] = (self.length[some] - 1) % CHUNK_BYTES + 1
        return found

    def codecs(self) -> NDArray[np.uint8]:
        """The codec id of each chunk."""
        return np.full(int(self.first[-1]), CODEC_RAW, np.uint8) if self.stored is None else self.stored.codec

    def locate(self, numbers: Rows) -> tuple[Rows, Rows]:
        """Of chunks by their number among all: the piece, and the number in that piece."""
        pieces = np.searchsorted(self.first, numbers, side="right") - 1
        return pieces, numbers - self.first[pieces]

    def same_bytes(self, one: range, other: range) -> bool:
        """Whether two runs of pieces are known to have the same chunks."""
        a, b = (slice(int(self.first[run.start]), int(self.first[run.stop])) for run in (one, other))
        if len(one) != len(other) or not np.array_equal(self.digest[a], self.digest[b]):
            return False
        if self.stored is None:
            return np.array_equal(self.length[one.start : one.stop], self.length[other.start : other.stop])
        columns = self.stored.length, self.stored.codec
        return all(np.array_equal(column[a], column[b]) for column in columns)

    def check_codecs(
        self, pieces: Rows, first: Rows, last: Rows, names: Sequence[str], tensor: Rows, known: Collection[int]
    ) -> None:
        """Raise UnsupportedFormatError for the first chunk that none of the `known` codecs decodes.

        names, tensor  of tensors, and which of these each of `pieces` is of
        """
        if self.stored is None:
            return
        counts = last - first
        codec = self.stored.codec[spread(self.first[pieces] + first, counts)]
        strange = np.flatnonzero(~np.isin(codec, list(known)))
        if len(strange):
            run = int(np.searchsorted(np.cumsum(counts), strange[0], side="right"))
            number = int(codec[strange[0]])
            raise UnsupportedFormatError(
                f"{names[int(tensor[run])]!r} is stored with codec {number}, which this version cannot decode",
                expected=f"codec {', '.join(map(str, sorted(known)))}", found=f"codec {number}",
                next="read it with the version of Flowstone that wrote it, or a later one",
            )


def first_chunks(length: U64) -> Rows:
    """The number of the first chunk of each piece of these lengths in bytes, and of all chunks."""
    first = np.zeros(len(length) + 1, np.int64)
    # Unsigned: the -(-a // b) idiom would wrap. So may this one, near 2^64: what is decoded is compared with its boxes.
    counts = length + np.uint64(CHUNK_BYTES - 1)
    counts //= np.uint64(CHUNK_BYTES)
    np.cumsum(counts.view(np.int64), out=first[1:])
    return first


def spread(begin: Rows, counts: Rows) -> Rows:
    """Consecutive numbers: `counts` of them from each `begin` on, one run behind the other."""
    return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def distinct(values: NDArray[_Number]) -> NDArray[_Number]:
    """Each of the values once, ascending.

    numpy's unique imports masked arrays when it is asked for no more, in each process' first load.
    """
    ordered = np.sort(values, axis=None)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]
