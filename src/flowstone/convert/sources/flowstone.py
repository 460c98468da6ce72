"""A checkpoint of ours as a source: the pieces of any number of ranks, with the digests that vouch for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.convert.source import Source, SourceFile, check_source, source_file
from flowstone.convert.sources.stored_chunks import ChunkData
from flowstone.errors import ArgumentError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.table.pieces import Alias
from flowstone.table.stored import DigestedRun, SourceTensor, StoredBox


def read_flowstone(checkpoint: Checkpoint) -> Source:
    """What a checkpoint holds; index, objects and the segments' headers are verified.

    raises  DamagedError, StorageError; ArgumentError where it lies in no directory
    """
    checkpoint.check()
    directory = Path(checkpoint.path)
    if not directory.is_dir():
        raise ArgumentError(
            f"{checkpoint.path} is no directory, and only such checkpoints can be converted",
            next="copy the checkpoint into a directory first",
        )
    index = checkpoint.index
    chunks, held = index.chunks, index.tensors
    extents = chunks.extents()
    if chunks.codecs().any() or ((extents[0] < 0) & (chunks.length > 0)).any():
        return _by_chunks(checkpoint)
    segments, offsets, firsts = np.maximum(extents[0], 0).tolist(), extents[1].tolist(), chunks.first.tolist()
    lengths = chunks.length.tolist()
    tensors = tuple(
        SourceTensor(name, held.dtypes[row], tuple(held.shapes[row]), tuple(
            StoredBox(
                index.pieces.box(at), segments[at], offsets[at], None, DigestedRun(offsets[at], lengths[at], firsts[at])
            ) for at in index.pieces_of(row)
        ))
        for row, name in enumerate(held.names)
    )
    files = tuple(source_file(directory / row.name) for row in checkpoint.manifest.segments)
    return _source(checkpoint, files, tensors, chunks.digest)


def _by_chunks(checkpoint: Checkpoint) -> Source:
    """The same, where chunks are encoded, or those of one piece lie apart: all data as one file, which verifies itself.
    """
    index, data = checkpoint.index, ChunkData(checkpoint)
    begins, held = data.begins.tolist(), index.tensors
    tensors = tuple(
        SourceTensor(name, held.dtypes[row], tuple(held.shapes[row]), tuple(
            StoredBox(index.pieces.box(at), 0, begins[at]) for at in index.pieces_of(row)
        ))
        for row, name in enumerate(held.names)
    )
    changed_ns = source_file(Path(checkpoint.path) / MANIFEST_NAME).changed_ns
    return _source(checkpoint, (SourceFile(checkpoint.path, begins[-1], changed_ns, data),), tensors)


def _source(
    checkpoint: Checkpoint, files: tuple[SourceFile, ...], tensors: tuple[SourceTensor, ...],
    digests: NDArray[np.uint64] | None = None,
) -> Source:
    index, objects = checkpoint.index, checkpoint.contents
    return check_source(Source(
        "flowstone", checkpoint.path, files, tensors,
        tuple(Alias(name, index.tensors.names[row]) for name, row in index.aliases),
        dict(objects.replicated), dict(objects.per_rank), digests=digests, step=checkpoint.step,
    ))
