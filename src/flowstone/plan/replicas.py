"""Replicas: pieces that several ranks hold, and how ranks compare them with short messages.

Each rank computes one number for all pieces that it shares with the same other ranks. Only if two such numbers
differ does it send a digest for each tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.pieces import Layout

LINE_BYTES = 64  # of a sample; a device cannot gather fewer
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)  # odd, of XXH64

class ReplicaSets(msgspec.Struct, frozen=True, eq=False):
    """Which pieces of a job several ranks hold. Pieces held by the same ranks form one set.

    number  for each rank: of each of its pieces the set, in the rank's own numbering from 0; -1: only this rank holds
            it, or each rank has its own (buffers). Ranks with equal numbering share one array
    sets    for each rank: of each of its sets, the number in the whole job
    """

    number: Sequence[NDArray[np.int32]]
    sets: Sequence[NDArray[np.int32]]


class Compared(msgspec.Struct, frozen=True, eq=False):
    """The replicas that one rank compares with others at every save, in the order of its sets.

    rows     positions in its layout
    starts   first position of each set
    key      of each: equal on all ranks for the same box of the same tensor
    length   of each, in bytes
    share    share of them that one save compares, by turns; None: all, which costs nothing in host memory
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    key: NDArray[np.uint64]
    length: NDArray[np.uint64]
    share: float | None

    @classmethod
    def of(cls, layout: Layout, number: NDArray[np.int64], share: float | None) -> Compared:
        """The pieces of a layout with a `number` that is not -1; see ReplicaSets."""
        rows = np.argsort(number, kind="stable")
        rows = rows[np.searchsorted(number[rows], 0) :]
        pieces = layout.pieces.take(np.sort(rows).tolist())
        order = np.argsort(np.argsort(rows))
        keys = [hashlib.blake2b(f"{piece.name} {piece.box}".encode(), digest_size=8).digest() for piece in pieces]
        key = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64)[order]
        length = pieces.lengths()[order]
        starts = np.flatnonzero(np.diff(number[rows], prepend=-1))
        return cls(rows, starts, key, length, share)

    def looked_at(self, step: int) -> NDArray[np.int64]:
        """Which replicas a save of `step` samples: positions in `rows`, the same on all ranks that hold them."""
        if self.share is None:
            return np.arange(len(self.rows))
        turn = _mixed(self.key ^ np.uint64(step)).astype(np.float64) / float(1 << 64)
        return np.flatnonzero((turn < self.share) & (self.length >= LINE_BYTES))

    def folded(self, at: NDArray[np.int64], digests: NDArray[np.uint16]) -> NDArray[np.uint64]:
        """One number for each set. `digests`: of the rows at these positions."""
        each = np.zeros(len(self.rows), np.uint64)
        each[at] = _mixed(self.key[at] + (digests.astype(np.uint64) + np.uint64(1)) * _MIX[2])
        return np.add.reduceat(each, self.starts) if len(self.starts) else np.zeros(0, np.uint64)


def differing(sets: Sequence[NDArray[np.int32]], folded: Sequence[NDArray[np.uint64] | None]) -> bool:
    """Whether two ranks have different numbers for the same set. Ranks with None are left out."""
    ranks = [rank for rank, one in enumerate(folded) if one is not None]
    if not ranks:
        return False
    number = np.concatenate([sets[rank] for rank in ranks])
    value = np.concatenate([one for one in folded if one is not None])
    order = np.argsort(number, kind="stable")
    number, value = number[order], value[order]
    return bool(((number[1:] == number[:-1]) & (value[1:] != value[:-1])).any())


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits: each bit of the result depends on all bits of the number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
