"""A Flowstone checkpoint as a source: the parts of tensors that all ranks have saved, with their digests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import SourceCheckpoint, SourceFile, check_source, source_file
from flowstone.convert.sources.stored_chunks import DecodedChunks
from flowstone.convert.sources.stored_files import StoredFile
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.reading.checkpoint import Checkpoint
from flowstone.table.box import Box
from flowstone.table.pieces import Alias
from flowstone.table.stored import DigestedPiece, DigestedRun, SourceTensor, StoredBox


def read_flowstone(checkpoint: Checkpoint) -> SourceCheckpoint:
    """Open a checkpoint as a source. Verifies its index, its objects, and the headers of its segments.

    raises  DamagedError, StorageError
    """
    checkpoint.check()
    index = checkpoint.index
    chunks, table = index.chunks, index.tensors
    if chunks.codecs().any():
        return _by_chunks(checkpoint)
    boxes = _PieceBoxes(index)
    tensors = tuple(
        SourceTensor(
            name, table.dtypes[row], tuple(table.shapes[row]),
            tuple(chain.from_iterable(map(boxes.of, index.pieces_of(row)))), _pieces(index, row),
        )
        for row, name in enumerate(table.names)
    )
    files = tuple(_file(checkpoint, row.name, row.bytes) for row in checkpoint.manifest.segments)
    return _source(checkpoint, files, tensors, chunks.digest)


def _file(checkpoint: Checkpoint, name: str, length: int) -> SourceFile:
    """A file of the checkpoint. If it is not in a directory, its bytes are read through the checkpoint's store."""
    directory = Path(checkpoint.path)
    if directory.is_dir() and not checkpoint.is_spread:
        return source_file(directory / name)
    # files of a checkpoint never change, so its id identifies them
    changed = int.from_bytes(checkpoint.manifest.id.encode())
    return SourceFile(f"{checkpoint.path}/{name}", length, changed, StoredFile(checkpoint, name), is_shared=False)


def _by_chunks(checkpoint: Checkpoint) -> SourceCheckpoint:
    """A checkpoint with encoded chunks as a source. All its chunks, decoded and verified, count as the bytes of one
    file.
    """
    index, data = checkpoint.index, DecodedChunks(checkpoint)
    begins, table = data.begins.tolist(), index.tensors
    tensors = tuple(
        SourceTensor(name, table.dtypes[row], tuple(table.shapes[row]), tuple(
            StoredBox(index.pieces.box(piece), 0, begins[piece]) for piece in index.pieces_of(row)
        ), _pieces(index, row))
        for row, name in enumerate(table.names)
    )
    like = _file(checkpoint, MANIFEST_NAME, 0)
    file = SourceFile(checkpoint.path, begins[-1], like.changed_ns, data, like.is_shared)
    return _source(checkpoint, (file,), tensors, index.chunks.identities())


def _pieces(index: Index, row: int) -> tuple[DigestedPiece, ...]:
    """The pieces of a tensor: the parts that ranks have saved. Their digests are of decoded chunks."""
    return tuple(DigestedPiece(index.pieces.box(n), int(index.chunks.first[n])) for n in index.pieces_of(row))


def _source(
    checkpoint: Checkpoint, files: tuple[SourceFile, ...], tensors: tuple[SourceTensor, ...],
    digests: NDArray[np.uint64],
) -> SourceCheckpoint:
    index, objects = checkpoint.index, checkpoint.contents
    return check_source(SourceCheckpoint(
        "flowstone", checkpoint.path, files, tensors,
        tuple(Alias(name, index.tensors.names[row]) for name, row in index.aliases),
        dict(objects.replicated), dict(objects.per_rank), digests=digests, step=checkpoint.step,
    ))


class _PieceBoxes:
    """Where the pieces (parts of tensors) are in files. A piece is one box; if its chunks are not stored one after the
    other, it is several boxes.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        segment, offset = index.chunks.extents()
        self._segments, self._offsets = segment.tolist(), offset.tolist()
        self._firsts, self._lengths = index.chunks.first.tolist(), index.chunks.length.tolist()

    def of(self, piece: int) -> Iterator[StoredBox]:
        """The boxes of piece number `piece`."""
        box, segment, offset, length = (
            self._index.pieces.box(piece), self._segments[piece], self._offsets[piece], self._lengths[piece]
        )
        if segment >= 0 or not length:
            run = DigestedRun(offset, length, self._firsts[piece])
            yield StoredBox(box, max(segment, 0), offset, None, run)
            return
        item = length // box.elements
        for segment, offset, begin, end in self._runs(piece):
            run = DigestedRun(offset, end - begin, self._firsts[piece] + begin // CHUNK_BYTES)
            for part in linear_boxes(box.shape, begin // item, end // item):
                place = tuple(o + inner for o, inner in zip(box.offset, part.offset, strict=True))
                yield StoredBox(Box(place, part.shape), segment, offset, None, run)
                offset += part.elements * item

    def _runs(self, piece: int) -> Iterator[tuple[int, int, int, int]]:
        """The ranges of a piece's chunks that are stored one after the other: (segment, offset in its file, begin in
        the piece, end in the piece).
        """
        count = self._firsts[piece + 1] - self._firsts[piece]
        segment, offset = self._index.chunks.stored_locations(np.full(count, piece), np.arange(count))
        follows = (segment[1:] == segment[:-1]) & (offset[1:] == offset[:-1] + CHUNK_BYTES)
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), count]
        for first, last in pairwise(cuts):
            end = min(last * CHUNK_BYTES, self._lengths[piece])
            yield int(segment[first]), int(offset[first]), first * CHUNK_BYTES, end
