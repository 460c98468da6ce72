"""A checkpoint's chunks, of which each may lie apart or be encoded, as one run of the bytes that they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.checkpoint import Checkpoint
from flowstone.config import CHUNK_BYTES
from flowstone.convert.source import open_plain
from flowstone.convert.sources.stored_files import Ranges
from flowstone.errors import DamagedError
from flowstone.format.codec import CAST, CAST_ELEMENTS, PLANES
from flowstone.format.derived import halves_of
from flowstone.store.os_errors import translated
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR


class ChunkData:
    """What all pieces of a checkpoint hold, in index order: verified, decoded. Any thread may read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._chunks = checkpoint, checkpoint.index.chunks
        length = self._chunks.length.astype(np.int64)
        self.begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])  # of each piece, then the end
        count = int(self._chunks.first[-1])
        self._piece, number = self._chunks.locate(np.arange(count))
        self._segment, self._offset = self._chunks.stored_at(self._piece, number)
        self._stored, self._codec = self._chunks.stored_lengths(), self._chunks.codecs()
        self._bytes = self._chunks.logical_bytes(self._piece, number, number + 1)
        self._begin = self.begins[self._piece] + number * CHUNK_BYTES
        is_near = Path(checkpoint.path).is_dir() and not checkpoint.is_spread  # a disk's answers are not waited for
        self._ranges = None if is_near else Ranges()

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes from `begin` on. Raises DamagedError, StorageError."""
        end = begin + len(into)
        first = int(np.searchsorted(self._begin, begin, side="right")) - 1
        last = int(np.searchsorted(self._begin, end))

        def put(chunk: int) -> None:
            at = int(self._begin[chunk])
            low, high = max(begin, at), min(end, at + int(self._bytes[chunk]))
            if low < high:
                into[low - begin : high - begin] = np.frombuffer(self._data(chunk), np.uint8)[low - at : high - at]

        for _ in map(put, range(first, last)) if self._ranges is None else self._ranges.each(put, range(first, last)):
            pass

    def _read(self, segment: int, offset: int, length: int, digest: int) -> bytes | None:
        """Stored bytes; None: they are not what was written."""
        name = self._checkpoint.manifest.segments[segment].name
        if self._ranges is not None:
            stored = self._checkpoint.stored_bytes(name, offset, length)
        else:  # a process on another machine has no open store, but sees the files
            path = Path(self._checkpoint.path)
            with translated(path, "read", name), open_plain(path / name) as file:
                file.seek(offset)
                stored = file.read(length)
        return stored if len(stored) == length and _native.xxh3_64(stored) == digest else None

    def _path(self, segment: int) -> str:
        return f"{self._checkpoint.path}/{self._checkpoint.manifest.segments[segment].name}"

    def _with_base(self, chunk: int, stored: bytes) -> bytes | None:
        """The data of a chunk with codec xor; None: it, or its base, is not what was written."""
        assert self._chunks.stored is not None, "a chunk with a codec"
        assert self._chunks.stored.bases is not None, "a chunk with a base"
        (segment,), (offset,), (length,), (codec,), (digest,), (data_digest,) = (
            column.tolist() for column in self._chunks.stored.bases.of(np.array([chunk])).columns()
        )
        bytes_, base = int(self._bytes[chunk]), self._read(segment, offset, length, digest)
        data = _native.decode_chunk(PLANES.id, stored, bytes_)
        if base is not None and codec != CODEC_RAW:
            base = _native.decode_chunk(codec, base, bytes_)
        if data is None or base is None:
            return None
        found = (np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)).tobytes()
        return found if _native.xxh3_64(found) == data_digest else None

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
                data = stored if codec == CODEC_RAW else _native.decode_chunk(codec, stored, int(self._bytes[chunk]))
            if data is not None:
                return data
        offset = int(self._offset[chunk])
        raise self._damage(path, chunk, f"bytes {offset}..{offset + int(self._stored[chunk])}")

    def _rounded(self, chunk: int) -> bytes:
        index, source = self._checkpoint.index, int(self._offset[chunk])
        element = CAST_ELEMENTS[index.tensors.dtypes[int(index.pieces.tensor[int(self._piece[chunk])])].name]
        halves = int(halves_of(self._bytes[chunk : chunk + 1])[0])
        parts = [_native.cast_numbers(self._data(at), element) for at in range(source, source + halves)]
        data = b"".join(part for part in parts if part is not None)
        if _native.xxh3_64(data) != int(self._chunks.digest[chunk]):
            raise self._damage(self._checkpoint.path, chunk, "rounded from another tensor")
        return data

    def _damage(self, path: str, chunk: int, place: str) -> DamagedError:
        index, piece = self._checkpoint.index, int(self._piece[chunk])
        name = index.tensors.names[int(index.pieces.tensor[piece])]
        number = chunk - int(self._chunks.first[piece])
        return DamagedError(
            f"{path} is damaged: {name!r}, chunk {number}, is not what was written", range=place,
            next="restore the file from a copy, or convert another step",
        )
