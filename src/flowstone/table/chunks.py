"""Chunks: how the bytes of pieces are divided, and where each chunk is stored.

A *logical chunk* is CHUNK_BYTES of a piece's bytes in row-major order; the last one may be shorter. The *stored chunk*
is its encoded form in a segment file, with a digest of the stored bytes. Without a codec both are equal, and the chunks
of a piece follow each other in one range of the segment file, the piece's *extent*. In that case the positions of
chunks are computed. If some chunk is encoded, or stored elsewhere, `StoredChunks` lists the positions of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.errors import UnsupportedFormatError

CODEC_RAW = 0
"""The codec id of chunks that are stored unencoded."""

CODEC_XOR = 2
"""The codec id of chunks that are stored as the difference to another chunk, their base."""

U64 = NDArray[np.uint64]
Rows = NDArray[np.int64]
BaseColumns: TypeAlias = tuple[
    U64, U64, NDArray[np.uint32], U64, NDArray[np.uint32], NDArray[np.uint8], U64
]
_Number = TypeVar("_Number", bound=np.generic)


class ChunkBases(msgspec.Struct, frozen=True, eq=False):
    """For chunks that are stored as a difference to another chunk, their base (codec xor): where the base is. Each
    attribute is an array with one entry for each chunk; 0 for chunks without a base.

    segment, offset, length, codec  where and how the base is stored
    digest                          digest of the base's stored bytes
    data                            digest of the decoded chunk
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    digest: U64
    data: U64

    def columns(self) -> tuple[NDArray[np.unsignedinteger], ...]:
        return self.segment, self.offset, self.length, self.codec, self.digest, self.data

    def take(self, chunks: Rows) -> ChunkBases:
        """The table for only the chunks with these numbers."""
        return ChunkBases.by_columns(column[chunks] for column in self.columns())

    @classmethod
    def by_columns(cls, columns: Iterable[NDArray[np.unsignedinteger]]) -> ChunkBases:
        """Make the table from one array for each attribute, in the order of the attributes and with their dtypes."""
        return cls(*columns)

    @classmethod
    def empty(cls, chunks: int) -> ChunkBases:
        """A table for `chunks` chunks, all without a base. Its arrays are writable."""
        kinds = np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64
        return cls.by_columns(np.zeros(chunks, kind) for kind in kinds)

    def fill(self, chunks: NDArray[np.bool_], other: ChunkBases) -> None:
        """Copy the entries of these chunks from another table of the same length."""
        for mine, theirs in zip(self.columns(), other.columns(), strict=True):
            mine[chunks] = theirs[chunks]


class StoredChunks(msgspec.Struct, frozen=True, eq=False):
    """Where and how chunks are stored: arrays with one entry for each chunk, in the order of the pieces.

    segment         number of the segment file
    offset, length  where the chunk is in that file, in bytes
    codec           id of the chunk's codec
    bases           for chunks that are stored as differences (codec xor), the chunks from which they differ; None:
                    there are none
    """

    segment: NDArray[np.uint32]
    offset: U64
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    bases: ChunkBases | None = None


class Chunks:
    """The chunks of pieces. `digest` has one entry for each chunk; the other arrays have one for each piece.

    segment, offset  the file, and the offset in it, of the piece's extent: the range with all its chunks in order;
                     unused if `stored` is set
    length           length of the piece, in bytes
    digest           digest of the chunk's stored bytes
    stored           where each chunk is stored; None: all are raw, and in order in their pieces' extents
    first            number of the piece's first chunk; one more entry at the end is the total number of chunks

    Arguments of methods are runs of chunks: chunks [first, last) of each of `pieces`, numbered from 0 in each piece.
    """

    def __init__(
        self, segment: NDArray[np.uint32], offset: U64, length: U64, digest: U64, stored: StoredChunks | None = None
    ) -> None:
        self.segment, self.offset, self.length, self.digest, self.stored = segment, offset, length, digest, stored
        self.first = first_chunks(length)

    @classmethod
    def unwritten(cls, segment: NDArray[np.uint32], length: U64) -> Chunks:
        """Chunks that are not written yet: their offsets and digests are 0."""
        count = int(first_chunks(length)[-1])
        return cls(segment, np.zeros(len(length), np.uint64), length, np.zeros(count, np.uint64))

    @property
    def has_one_chunk_each(self) -> bool:
        """Whether every piece has exactly one chunk, for example because thousands of ranks each hold a small part."""
        return len(self.first) == int(self.first[-1]) + 1 and bool(self.length.all())

    @property
    def counts(self) -> Rows:
        """The number of chunks of each piece."""
        return np.diff(self.first)

    def logical_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """For each run of chunks, its length before encoding, in bytes."""
        length = self.length[pieces].astype(np.int64)
        return np.minimum(last * CHUNK_BYTES, length) - np.minimum(first * CHUNK_BYTES, length)

    def stored_bytes(self, pieces: Rows, first: Rows, last: Rows) -> Rows:
        """For each run of chunks, how many stored bytes must be read."""
        if self.stored is None:
            return self.logical_bytes(pieces, first, last)
        ends = np.zeros(len(self.stored.length) + 1, np.int64)
        np.cumsum(self.stored.length, out=ends[1:])
        begin = self.first[pieces]
        result: Rows = ends[begin + last] - ends[begin + first]
        return result

    def stored_locations(self, pieces: Rows, chunks: Rows) -> tuple[NDArray[np.uint32], Rows]:
        """For chunk `chunks[i]` of piece `pieces[i]`: its segment, and its offset there, in bytes."""
        if self.stored is None:
            return self.segment[pieces], self.offset[pieces].astype(np.int64) + chunks * CHUNK_BYTES
        numbers = self.first[pieces] + chunks
        return self.stored.segment[numbers], self.stored.offset[numbers].astype(np.int64)

    def extents(self) -> tuple[NDArray[np.int64], Rows]:
        """The range of a segment file in which each piece's chunks lie one directly after the other, in order.

        Returns, for each piece, the number of the segment file, and the offset at which the range begins. Segment -1:
        there is no such range, because the piece is empty, its chunks are not adjacent in one file, or no bytes are
        stored for them.
        """
        if self.stored is None:
            return self.segment.astype(np.int64), self.offset.astype(np.int64)
        segment, offset = self.stored.segment.astype(np.int64), self.stored.offset.astype(np.int64)
        follows = (segment[1:] == segment[:-1]) & (offset[1:] == offset[:-1] + self.stored.length[:-1])
        breaks = run_starts(np.append(np.zeros(min(1, len(segment)), np.int64), ~follows))
        some = self.first[1:] > self.first[:-1]
        begin, end = self.first[:-1][some], self.first[1:][some]
        whole = (breaks[end] == breaks[begin + 1]) & (self.stored.length[begin] > 0)
        segments, offsets = np.full(len(some), -1, np.int64), np.zeros(len(some), np.int64)
        segments[some], offsets[some] = np.where(whole, segment[begin], -1), offset[begin]
        return segments, offsets

    def bytes_by_segment(self, pieces: Rows, first: Rows, last: Rows, segments: int) -> Rows:
        """For each segment file, how many bytes of it must be read for these runs of chunks."""
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
        if self.has_one_chunk_each:
            return self.length.astype(np.uint32)
        lengths = np.full(int(self.first[-1]), CHUNK_BYTES, np.uint32)
        some = self.length > 0
        lengths[self.first[1:][some] - 1] = (self.length[some] - 1) % CHUNK_BYTES + 1
        return lengths

    def codecs(self) -> NDArray[np.uint8]:
        """The codec id of each chunk."""
        return np.full(int(self.first[-1]), CODEC_RAW, np.uint8) if self.stored is None else self.stored.codec

    def identities(self) -> U64:
        """For each chunk a digest that identifies its content: of its data if it is stored as a difference, otherwise
        of its stored bytes.
        """
        if self.stored is None or self.stored.bases is None:
            return self.digest
        return np.where(self.stored.codec == CODEC_XOR, self.stored.bases.data, self.digest)

    def bases_of(self, numbers: Rows, *, first_file: int = 0) -> BaseColumns | None:
        """The bases of the chunks `numbers`, as arrays for _native.ReadExtents; None: none of them is stored as a
        difference. `first_file` is added to segment numbers.
        """
        if self.stored is None or self.stored.bases is None:
            return None
        with_base = np.flatnonzero(self.stored.codec[numbers] == CODEC_XOR)
        if not len(with_base):
            return None
        bases = self.stored.bases.take(numbers[with_base])
        segment = bases.segment + np.uint32(first_file)
        return with_base.astype(np.uint64), bases.data, segment, bases.offset, bases.length, bases.codec, bases.digest

    def locate(self, numbers: Rows) -> tuple[Rows, Rows]:
        """For the chunks with these numbers in the table, their piece, and their number in that piece."""
        pieces = np.searchsorted(self.first, numbers, side="right") - 1
        return pieces, numbers - self.first[pieces]

    def same_bytes(self, first_run: range, second_run: range) -> bool:
        """Whether two runs of pieces are known to have equal chunks."""
        a, b = (slice(int(self.first[run.start]), int(self.first[run.stop])) for run in (first_run, second_run))
        identities = self.identities()
        if len(first_run) != len(second_run) or not np.array_equal(identities[a], identities[b]):
            return False
        if self.stored is None:
            first, second = (self.length[run.start : run.stop] for run in (first_run, second_run))
            return np.array_equal(first, second)
        columns = self.stored.length, self.stored.codec
        return all(np.array_equal(column[a], column[b]) for column in columns)

    def check_codecs(
        self, pieces: Rows, first: Rows, last: Rows, names: Sequence[str], tensor: Rows, codecs: Collection[int]
    ) -> None:
        """Raise UnsupportedFormatError for the first chunk whose codec is not in `codecs`.

        names, tensor  names of tensors, and for each of `pieces` the position of its tensor's name
        """
        if self.stored is None:
            return
        counts = last - first
        codec = self.stored.codec[spread(self.first[pieces] + first, counts)]
        unknown = np.flatnonzero(~np.isin(codec, list(codecs)))
        if len(unknown):
            run = int(np.searchsorted(np.cumsum(counts), unknown[0], side="right"))
            number = int(codec[unknown[0]])
            raise UnsupportedFormatError(
                f"{names[int(tensor[run])]!r} is stored with codec {number}, which this version cannot decode",
                expected=f"codec {', '.join(map(str, sorted(codecs)))}", found=f"codec {number}",
                next="read it with the version of Flowstone that wrote it, or a later one",
            )


def first_chunks(length: U64) -> Rows:
    """The number of each piece's first chunk. One more entry at the end is the number of all chunks. `length`: length
    of each piece, in bytes.
    """
    first = np.zeros(len(length) + 1, np.int64)
    # The numbers are unsigned, so -(-a // b) would wrap. The sum may wrap, too, for lengths near 2^64, but decoded
    # lengths are checked elsewhere.
    counts = length + np.uint64(CHUNK_BYTES - 1)
    counts //= np.uint64(CHUNK_BYTES)
    np.cumsum(counts.view(np.int64), out=first[1:])
    return first


def run_starts(counts: Rows) -> Rows:
    """Where each run of `counts` numbers begins in the concatenation of all runs, and where the last run ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spread(begin: Rows, counts: Rows) -> Rows:
    """For each `begin`, as many consecutive numbers from it on as `counts` says; all in one array."""
    return np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def distinct(values: NDArray[_Number]) -> NDArray[_Number]:
    """The distinct values, ascending.

    A plain np.unique imports masked arrays, which would slow down each process's first load.
    """
    ordered = np.sort(values, axis=None)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]
