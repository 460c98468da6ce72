"""Chunks: how the bytes of pieces are divided, and where each chunk is stored.

A *logical chunk* is CHUNK_BYTES of a piece's bytes in row-major order, the last one may be shorter: its range follows
from the piece's length alone. The *stored chunk* is its encoded form in a segment, with a digest over the stored bytes.
Without a codec both are equal, and the chunks of a piece are consecutive in its extent. That case is computed and takes
no memory: `StoredChunks` exists only if something differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.errors import UnsupportedFormatError

CODEC_RAW = 0
"""The codec id of chunks that are stored unencoded."""

CODEC_XOR = 2
"""The codec id of chunks that are decoded with the data of another one, their base."""

U64 = NDArray[np.uint64]
Rows = NDArray[np.int64]
BaseColumns: TypeAlias = tuple[
    U64, U64, NDArray[np.uint32], U64, NDArray[np.uint32], NDArray[np.uint8], U64
]
_Number = TypeVar("_Number", bound=np.generic)


class ChunkBases(msgspec.Struct, frozen=True, eq=False):
    """What chunks with codec xor are decoded with, as columns with one entry per chunk; 0 for all others.

    segment, offset, length, codec  of the base, as stored
    digest                          of its stored bytes
    data                            of the data that results
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    digest: U64
    data: U64

    def columns(self) -> tuple[NDArray[np.unsignedinteger], ...]:
        return self.segment, self.offset, self.length, self.codec, self.digest, self.data

    def of(self, chunks: Rows) -> ChunkBases:
        """Those of these chunks."""
        return ChunkBases.by_columns(column[chunks] for column in self.columns())

    @classmethod
    def by_columns(cls, columns: Iterable[NDArray[np.unsignedinteger]]) -> ChunkBases:
        """From columns of the right types, in the order of the fields."""
        return cls(*columns)

    @classmethod
    def none(cls, chunks: int) -> ChunkBases:
        """For so many chunks, all without a base. The columns may be filled in."""
        kinds = np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64
        return cls.by_columns(np.zeros(chunks, kind) for kind in kinds)

    def fill(self, chunks: NDArray[np.bool_], other: ChunkBases) -> None:
        """Take these chunks' entries from another table of as many."""
        for mine, theirs in zip(self.columns(), other.columns(), strict=True):
            mine[chunks] = theirs[chunks]


class StoredChunks(msgspec.Struct, frozen=True, eq=False):
    """Where and how chunks are stored, as columns with one entry per chunk, in piece order.

    segment         id of the segment
    offset, length  in bytes, in that segment
    codec           codec id of each chunk
    bases           of those with codec xor; None: there are none
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    bases: ChunkBases | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of pieces, as columns: first those with one entry per piece, then those with one per chunk.

    segment, offset  of the piece's extent, in which its chunks are consecutive, unless `stored` says otherwise
    length           of the piece, in bytes
    digest           of each chunk's stored bytes
    stored           where the chunks are; None: each raw, at its place in its piece's extent
    first            number of each piece's first chunk, and last the total number of chunks

    Methods take runs of chunks: chunks [first, last) of each of `pieces`, numbered from 0 within each piece.
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
        """Chunks before they are written: without offsets and digests."""
        found = cls(segment, np.zeros(len(length), np.uint64), length, np.zeros(0, np.uint64))
        object.__setattr__(found, "digest", np.zeros(int(found.first[-1]), np.uint64))
        return found

    @property
    def one_each(self) -> bool:
        """Whether every piece has exactly one chunk, as when thousands of ranks split every tensor."""
        return len(self.first) == int(self.first[-1]) + 1 and bool(self.length.all())

    @property
    def counts(self) -> Rows:
        """The number of chunks of each piece."""
        return np.diff(self.first)

    def logical_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """For each run: its length in bytes of the piece."""
        length = self.length[pieces].astype(np.int64)
        return np.minimum(last * CHUNK_BYTES, length) - np.minimum(first * CHUNK_BYTES, length)

    def stored_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """For each run: the bytes to read for it."""
        if self.stored is None:
            return self.logical_bytes(pieces, first, last)
        ends = np.zeros(len(self.stored.length) + 1, np.int64)
        np.cumsum(self.stored.length, out=ends[1:])
        begin = self.first[pieces]
        found: Rows = ends[begin + last] - ends[begin + first]
        return found

    def stored_at(self, pieces: Rows, chunks: Rows) -> tuple[NDArray[np.uint32], Rows]:
        """For chunk number `chunks` of each of `pieces`: the segment, and the offset there, in bytes."""
        if self.stored is None:
            return self.segment[pieces], self.offset[pieces].astype(np.int64) + chunks * CHUNK_BYTES
        numbers = self.first[pieces] + chunks
        return self.stored.segment[numbers], self.stored.offset[numbers].astype(np.int64)

    def extents(self) -> tuple[NDArray[np.int64], Rows]:
        """For each piece the segment and the offset of its extent; segment -1: it has none, or its chunks lie apart, or
        nothing is stored of them.
        """
        if self.stored is None:
            return self.segment.astype(np.int64), self.offset.astype(np.int64)
        segment, offset = self.stored.segment.astype(np.int64), self.stored.offset.astype(np.int64)
        follows = (segment[1:] == segment[:-1]) & (offset[1:] == offset[:-1] + self.stored.length[:-1])
        breaks = run_starts(np.append(np.zeros(min(1, len(segment)), np.int64), ~follows))
        some = self.first[1:] > self.first[:-1]
        begin, end = self.first[:-1][some], self.first[1:][some]
        whole = (breaks[end] == breaks[begin + 1]) & (self.stored.length[begin] > 0)
        found, at = np.full(len(some), -1, np.int64), np.zeros(len(some), np.int64)
        found[some], at[some] = np.where(whole, segment[begin], -1), offset[begin]
        return found, at

    def bytes_by_segment(self, pieces: Rows, first: Rows, last: Rows, segments: int) -> Rows:
        """For each of `segments`: the bytes to read from it for all runs."""
        if self.stored is None:
            segment, length = self.segment[pieces], self.logical_bytes(pieces, first, last)
        else:
            numbers = spread(self.first[pieces] + first, last - first)
            segment, length = self.stored.segment[numbers], self.stored.length[numbers].astype(np.int64)
        return np.bincount(segment.astype(np.int64), length, segments).astype(np.int64)

    def stored_lengths(self) -> NDArray[np.uint32]:
        """The stored length of each chunk, in bytes."""
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

    def identities(self) -> U64:
        """For each chunk a digest that it shares with equal chunks alone, if stored as long: of its stored bytes, or of
        its data where those say nothing without the base.
        """
        if self.stored is None or self.stored.bases is None:
            return self.digest
        return np.where(self.stored.codec == CODEC_XOR, self.stored.bases.data, self.digest)

    def bases_of(self, numbers: Rows, *, first_file: int = 0) -> BaseColumns | None:
        """What those of the chunks are decoded with that have a base, for _native.ReadExtents, whose digests are those
        of these chunks; None: none has one. `first_file`: added to segments' numbers.
        """
        if self.stored is None or self.stored.bases is None:
            return None
        at = np.flatnonzero(self.stored.codec[numbers] == CODEC_XOR)
        if not len(at):
            return None
        bases = self.stored.bases.of(numbers[at])
        segment = bases.segment + np.uint32(first_file)
        return at.astype(np.uint64), bases.data, segment, bases.offset, bases.length, bases.codec, bases.digest

    def locate(self, numbers: Rows) -> tuple[Rows, Rows]:
        """For chunks by their number in the whole table: the piece, and the number within that piece."""
        pieces = np.searchsorted(self.first, numbers, side="right") - 1
        return pieces, numbers - self.first[pieces]

    def same_bytes(self, one: range, other: range) -> bool:
        """Whether two runs of pieces are known to have equal chunks."""
        a, b = (slice(int(self.first[run.start]), int(self.first[run.stop])) for run in (one, other))
        known = self.identities()
        if len(one) != len(other) or not np.array_equal(known[a], known[b]):
            return False
        if self.stored is None:
            return np.array_equal(self.length[one.start : one.stop], self.length[other.start : other.stop])
        columns = self.stored.length, self.stored.codec
        return all(np.array_equal(column[a], column[b]) for column in columns)

    def check_codecs(
        self, pieces: Rows, first: Rows, last: Rows, names: Sequence[str], tensor: Rows, known: Collection[int]
    ) -> None:
        """Raise UnsupportedFormatError for the first chunk whose codec is not in `known`.

        names, tensor  names of tensors, and for each of `pieces` its tensor's position there
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
    """The number of the first chunk of each piece, from the pieces' lengths in bytes; last, the total number of chunks.
    """
    first = np.zeros(len(length) + 1, np.int64)
    # Unsigned: the -(-a // b) idiom would wrap. This may wrap too, near 2^64, but decoded lengths are checked
    # elsewhere.
    counts = length + np.uint64(CHUNK_BYTES - 1)
    counts //= np.uint64(CHUNK_BYTES)
    np.cumsum(counts.view(np.int64), out=first[1:])
    return first


def run_starts(counts: Rows) -> Rows:
    """Where each run of `counts` numbers begins in their concatenation, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spread(begin: Rows, counts: Rows) -> Rows:
    """Concatenated ranges: `counts` consecutive numbers from each `begin`."""
    return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def distinct(values: NDArray[_Number]) -> NDArray[_Number]:
    """The distinct values, ascending.

    A plain np.unique imports masked arrays, which would slow down each process's first load.
    """
    ordered = np.sort(values, axis=None)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]
