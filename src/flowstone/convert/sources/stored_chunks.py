"""The chunks of a checkpoint as one sequence of decoded bytes. The chunks may be stored in any order, and encoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowstone._native import cast_numbers, decode_chunk, xxh3_64
from flowstone.config import CHUNK_BYTES
from flowstone.convert.source import open_plain
from flowstone.convert.sources.stored_files import RangeThreads
from flowstone.errors import DamagedError
from flowstone.format.codec import CAST, CAST_ELEMENTS, PLANES
from flowstone.format.derived import source_chunk_counts
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.os_errors import translated
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR


class DecodedChunks:
    """The content of all pieces (parts of tensors) of a checkpoint, in the order of its index, verified and decoded.
    Can be read on any thread.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._chunks = checkpoint, checkpoint.index.chunks
        length = self._chunks.length.astype(np.int64)
        # where each piece begins; the last entry is the end of the last piece
        self.begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        count = int(self._chunks.first[-1])
        self._piece, number = self._chunks.locate(np.arange(count))
        self._segment, self._offset = self._chunks.stored_locations(self._piece, number)
        self._stored, self._codec = self._chunks.stored_lengths(), self._chunks.codecs()
        self._bytes = self._chunks.logical_bytes(self._piece, number, number + 1)
        self._begin = self.begins[self._piece] + number * CHUNK_BYTES
        # a disk is fast enough without further threads
        is_near = Path(checkpoint.path).is_dir() and not checkpoint.is_spread
        self._ranges = None if is_near else RangeThreads()

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes from offset `begin` on. Raises DamagedError, StorageError."""
        end = begin + len(into)
        first = int(np.searchsorted(self._begin, begin, side="right")) - 1
        last = int(np.searchsorted(self._begin, end))

        def put(chunk: int) -> None:
            start = int(self._begin[chunk])
            low, high = max(begin, start), min(end, start + int(self._bytes[chunk]))
            if low < high:
                data = np.frombuffer(self._data(chunk), np.uint8)
                into[low - begin : high - begin] = data[low - start : high - start]

        for _ in map(put, range(first, last)) if self._ranges is None else self._ranges.map(put, range(first, last)):
            pass

    def _read(self, segment: int, offset: int, length: int, digest: int) -> bytes | None:
        """Read the stored bytes of a chunk. None if they do not match their digest."""
        name = self._checkpoint.manifest.segments[segment].name
        if self._ranges is not None:
            stored = self._checkpoint.stored_bytes(name, offset, length)
        else:  # a process on another machine has no open store, but can read the files
            path = Path(self._checkpoint.path)
            with translated(path, "read", name), open_plain(path / name) as file:
                file.seek(offset)
                stored = file.read(length)
        return stored if len(stored) == length and xxh3_64(stored) == digest else None

    def _path(self, segment: int) -> str:
        return f"{self._checkpoint.path}/{self._checkpoint.manifest.segments[segment].name}"

    def _with_base(self, chunk: int, stored: bytes) -> bytes | None:
        """Decode a chunk with the codec xor, whose stored bytes are the difference from an earlier chunk (its base).
        None if the chunk or its base does not match its digest.
        """
        assert self._chunks.stored is not None, "a chunk with a codec"
        assert self._chunks.stored.bases is not None, "a chunk with a base"
        (segment,), (offset,), (length,), (codec,), (digest,), (data_digest,) = (
            column.tolist() for column in self._chunks.stored.bases.take(np.array([chunk])).columns()
        )
        bytes_, base = int(self._bytes[chunk]), self._read(segment, offset, length, digest)
        data = decode_chunk(PLANES.id, stored, bytes_)
        if base is not None and codec != CODEC_RAW:
            base = decode_chunk(codec, base, bytes_)
        if data is None or base is None:
            return None
        content = (np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)).tobytes()
        return content if xxh3_64(content) == data_digest else None

    def _data(self, chunk: int) -> bytes:
        if self._codec[chunk] == CAST.id:
            return self._rounded(chunk)
        path, codec = self._path(int(self._segment[chunk])), int(self._codec[chunk])
        columns = self._segment, self._offset, self._stored, self._chunks.digest
        stored = self._read(*(int(column[chunk]) for column in columns))
        if stored is not None:
            if codec == CODEC_XOR:
                data = self._with_base(chunk, stored)
            else:
                data = stored if codec == CODEC_RAW else decode_chunk(codec, stored, int(self._bytes[chunk]))
            if data is not None:
                return data
        offset = int(self._offset[chunk])
        raise self._damage(path, chunk, f"bytes {offset}..{offset + int(self._stored[chunk])}")

    def _rounded(self, chunk: int) -> bytes:
        index, source = self._checkpoint.index, int(self._offset[chunk])
        element = CAST_ELEMENTS[index.tensors.dtypes[int(index.pieces.tensor[int(self._piece[chunk])])].name]
        halves = int(source_chunk_counts(self._bytes[chunk : chunk + 1])[0])
        parts = [cast_numbers(self._data(part), element) for part in range(source, source + halves)]
        data = b"".join(part for part in parts if part is not None)
        if xxh3_64(data) != int(self._chunks.digest[chunk]):
            raise self._damage(self._checkpoint.path, chunk, "computed from the chunks of another tensor")
        return data

    def _damage(self, path: str, chunk: int, place: str) -> DamagedError:
        index, piece = self._checkpoint.index, int(self._piece[chunk])
        name = index.tensors.names[int(index.pieces.tensor[piece])]
        number = chunk - int(self._chunks.first[piece])
        return DamagedError(
            f"{path} is damaged: {name!r}, chunk {number}, does not match its digest", range=place,
            next="restore the file from a copy, or convert another step",
        )
