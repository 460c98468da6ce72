"""What of a checkpoint's segments is copied: every stored chunk that the index refers to, once, with its digest."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.format.codec import CAST
from flowstone.format.index import Index
from flowstone.table.chunks import CODEC_XOR


class Runs(msgspec.Struct, frozen=True, eq=False):
    """Stored chunks of one segment, as columns, by ascending offset. Disjoint."""

    offset: NDArray[np.uint64]
    length: NDArray[np.uint64]
    digest: NDArray[np.uint64]

    def slice(self, begin: int, end: int) -> Runs:
        return Runs(self.offset[begin:end], self.length[begin:end], self.digest[begin:end])

    def has(self, other: Runs) -> bool:
        """Whether every chunk of the other one is among these."""
        mine = set(zip(self.offset.tolist(), self.length.tolist(), self.digest.tolist(), strict=True))
        return mine.issuperset(zip(other.offset.tolist(), other.length.tolist(), other.digest.tolist(), strict=True))


def runs_of(index: Index, segments: int) -> list[Runs]:
    """For each segment, by its number. Of an earlier checkpoint's file: the chunks that this one refers to."""
    chunks = index.chunks
    piece, chunk = chunks.locate(np.arange(int(chunks.first[-1])))
    segment, offset = chunks.stored_at(piece, chunk)
    lengths: NDArray[np.uint32] = chunks.stored_lengths()
    stored = chunks.codecs() != CAST.id
    columns = [(segment[stored], offset[stored], lengths[stored], chunks.digest[stored])]
    if chunks.stored is not None and chunks.stored.bases is not None:
        bases, near = chunks.stored.bases, chunks.stored.codec == CODEC_XOR
        columns.append((bases.segment[near], bases.offset[near], bases.length[near], bases.digest[near]))
    of, at, length, digest = (
        np.concatenate([column[number].astype(np.uint64) for column in columns]) for number in range(4)
    )
    some = length > 0
    of, at, length, digest = of[some], at[some], length[some], digest[some]
    order = np.lexsort((at, of))
    of, at, length, digest = of[order], at[order], length[order], digest[order]
    is_new = np.ones(len(of), np.bool_)
    is_new[1:] = (of[1:] != of[:-1]) | (at[1:] != at[:-1])  # several chunks may be stored once
    of, at, length, digest = of[is_new], at[is_new], length[is_new], digest[is_new]
    cuts = np.searchsorted(of, np.arange(segments + 1, dtype=np.uint64))
    return [
        Runs(at[begin:end], length[begin:end], digest[begin:end])
        for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    ]
