"""A checkpoint of ours as a source: the pieces of any number of ranks, with the digests that vouch for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.config import CHUNK_BYTES
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import Source, SourceFile, check_source, source_file
from flowstone.convert.sources.stored_chunks import ChunkData
from flowstone.convert.sources.stored_files import StoredFile
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.table.box import Box
from flowstone.table.pieces import Alias
from flowstone.table.stored import DigestedPiece, DigestedRun, SourceTensor, StoredBox


def read_flowstone(checkpoint: Checkpoint) -> Source:
    """What a checkpoint holds; index, objects and the segments' headers are verified.

    raises  DamagedError, StorageError
    """
    checkpoint.check()
    index = checkpoint.index
    chunks, held = index.chunks, index.tensors
    if chunks.codecs().any():
        return _by_chunks(checkpoint)
    boxes = _Boxes(index)
    tensors = tuple(
        SourceTensor(
            name, held.dtypes[row], tuple(held.shapes[row]),
            tuple(chain.from_iterable(map(boxes.of, index.pieces_of(row)))), _pieces(index, row),
        )
        for row, name in enumerate(held.names)
    )
    files = tuple(_file(checkpoint, row.name, row.bytes) for row in checkpoint.manifest.segments)
    return _source(checkpoint, files, tensors, chunks.digest)


def _file(checkpoint: Checkpoint, name: str, length: int) -> SourceFile:
    """One of its files; where it lies in no directory, its bytes are asked of its store."""
    directory = Path(checkpoint.path)
    if directory.is_dir() and not checkpoint.is_spread:
        return source_file(directory / name)
    changed = int.from_bytes(checkpoint.manifest.id.encode())  # files of a checkpoint never change
    return SourceFile(f"{checkpoint.path}/{name}", length, changed, StoredFile(checkpoint, name), is_shared=False)


def _by_chunks(checkpoint: Checkpoint) -> Source:
    """The same, where chunks are encoded: all data as one file, which verifies itself."""
    index, data = checkpoint.index, ChunkData(checkpoint)
    begins, held = data.begins.tolist(), index.tensors
    tensors = tuple(
        SourceTensor(name, held.dtypes[row], tuple(held.shapes[row]), tuple(
            StoredBox(index.pieces.box(at), 0, begins[at]) for at in index.pieces_of(row)
        ), _pieces(index, row))
        for row, name in enumerate(held.names)
    )
    like = _file(checkpoint, MANIFEST_NAME, 0)
    file = SourceFile(checkpoint.path, begins[-1], like.changed_ns, data, like.is_shared)
    return _source(checkpoint, (file,), tensors, index.chunks.identities())


def _pieces(index: Index, row: int) -> tuple[DigestedPiece, ...]:
    """What a tensor was saved in. Equal digests mean equal chunks, encoded or not: lengths tell these apart."""
    return tuple(DigestedPiece(index.pieces.box(at), int(index.chunks.first[at])) for at in index.pieces_of(row))


def _source(
    checkpoint: Checkpoint, files: tuple[SourceFile, ...], tensors: tuple[SourceTensor, ...],
    digests: NDArray[np.uint64],
) -> Source:
    index, objects = checkpoint.index, checkpoint.contents
    return check_source(Source(
        "flowstone", checkpoint.path, files, tensors,
        tuple(Alias(name, index.tensors.names[row]) for name, row in index.aliases),
        dict(objects.replicated), dict(objects.per_rank), digests=digests, step=checkpoint.step,
    ))


class _Boxes:
    """The boxes in files that stored pieces are: one for each, or some for each run of chunks if these lie apart."""

    def __init__(self, index: Index) -> None:
        self._index = index
        segment, offset = index.chunks.extents()
        self._segments, self._offsets = segment.tolist(), offset.tolist()
        self._firsts, self._lengths = index.chunks.first.tolist(), index.chunks.length.tolist()

    def of(self, at: int) -> Iterator[StoredBox]:
        """Of the piece with that number."""
        box, segment, offset, length = (
            self._index.pieces.box(at), self._segments[at], self._offsets[at], self._lengths[at]
        )
        if segment >= 0 or not length:
            run = DigestedRun(offset, length, self._firsts[at])
            yield StoredBox(box, max(segment, 0), offset, None, run)
            return
        item = length // box.elements
        for segment, offset, begin, end in self._runs(at):
            run = DigestedRun(offset, end - begin, self._firsts[at] + begin // CHUNK_BYTES)
            for part in linear_boxes(box.shape, begin // item, end // item):
                place = tuple(o + inner for o, inner in zip(box.offset, part.offset, strict=True))
                yield StoredBox(Box(place, part.shape), segment, offset, None, run)
                offset += part.elements * item

    def _runs(self, at: int) -> Iterator[tuple[int, int, int, int]]:
        """Runs of chunks in a file: the segment, the offset there, and bytes [begin, end) of the piece."""
        count = self._firsts[at + 1] - self._firsts[at]
        segment, offset = self._index.chunks.stored_at(np.full(count, at), np.arange(count))
        follows = (segment[1:] == segment[:-1]) & (offset[1:] == offset[:-1] + CHUNK_BYTES)
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), count]
        for first, last in pairwise(cuts):
            end = min(last * CHUNK_BYTES, self._lengths[at])
            yield int(segment[first]), int(offset[first]), first * CHUNK_BYTES, end
