"""A checkpoint of ours as a source: the pieces of any number of ranks, with the digests that vouch for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowstone.checkpoint import Checkpoint
from flowstone.convert.source import Source, check_source, source_file
from flowstone.errors import ArgumentError, UnsupportedFormatError
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
    if chunks.codecs().any():
        raise UnsupportedFormatError(
            f"{checkpoint.path} is stored with a codec, which conversion does not decode",
            next="load it, and save it without one",
        )
    extents = chunks.extents()
    apart = np.flatnonzero((extents[0] < 0) & (chunks.length > 0))
    if len(apart):
        name = held.names[int(index.pieces.tensor[apart[0]])]
        raise UnsupportedFormatError(
            f"{checkpoint.path} has tensors of which only a part has changed since an earlier checkpoint",
            found=f"{name} and {len(apart) - 1} others", next="load it, and save it into another store",
        )
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
    objects = checkpoint.contents
    return check_source(Source(
        "flowstone", checkpoint.path, tuple(source_file(directory / row.name) for row in checkpoint.manifest.segments),
        tensors, tuple(Alias(name, held.names[row]) for name, row in index.aliases),
        dict(objects.replicated), dict(objects.per_rank), digests=chunks.digest, step=checkpoint.step,
    ))
