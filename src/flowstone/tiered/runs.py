"""Which bytes of a checkpoint's segments must be copied: the stored chunks that its index refers to, with their
digests.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.format.codec import CAST
from flowstone.format.index import Index
from flowstone.table.chunks import CODEC_XOR


class ChunkRuns(msgspec.Struct, frozen=True, eq=False):
    """Stored chunks of one segment, one array entry for each, by ascending offset. They do not overlap."""

    offset: NDArray[np.uint64]
    length: NDArray[np.uint64]
    digest: NDArray[np.uint64]

    def slice(self, begin: int, end: int) -> ChunkRuns:
        return ChunkRuns(self.offset[begin:end], self.length[begin:end], self.digest[begin:end])

    def has(self, other: ChunkRuns) -> bool:
        """Whether every chunk of `other` is among these chunks."""
        mine = set(zip(self.offset.tolist(), self.length.tolist(), self.digest.tolist(), strict=True))
        return mine.issuperset(zip(other.offset.tolist(), other.length.tolist(), other.digest.tolist(), strict=True))


def runs_of(index: Index, segments: int) -> list[ChunkRuns]:
    """For each segment, by number: the chunks that must be copied, which are all that the index refers to."""
    chunks = index.chunks
    piece, chunk = chunks.locate(np.arange(int(chunks.first[-1])))
    segment, offset = chunks.stored_locations(piece, chunk)
    lengths: NDArray[np.uint32] = chunks.stored_lengths()
    stored = chunks.codecs() != CAST.id
    columns = [(segment[stored], offset[stored], lengths[stored], chunks.digest[stored])]
    if chunks.stored is not None and chunks.stored.bases is not None:
        bases, near = chunks.stored.bases, chunks.stored.codec == CODEC_XOR
        columns.append((bases.segment[near], bases.offset[near], bases.length[near], bases.digest[near]))
    segments_, offsets, length, digest = (
        np.concatenate([column[number].astype(np.uint64) for column in columns]) for number in range(4)
    )
    some = length > 0
    segments_, offsets, length, digest = segments_[some], offsets[some], length[some], digest[some]
    order = np.lexsort((offsets, segments_))
    segments_, offsets, length, digest = segments_[order], offsets[order], length[order], digest[order]
    is_new = np.ones(len(segments_), np.bool_)
    # chunks with equal bytes may be stored once
    is_new[1:] = (segments_[1:] != segments_[:-1]) | (offsets[1:] != offsets[:-1])
    segments_, offsets, length, digest = segments_[is_new], offsets[is_new], length[is_new], digest[is_new]
    cuts = np.searchsorted(segments_, np.arange(segments + 1, dtype=np.uint64))
    return [
        ChunkRuns(offsets[begin:end], length[begin:end], digest[begin:end])
        for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    ]
