"""Replicas: pieces that several ranks hold, and how little these have to say to know that they hold the same.

Each rank makes one number of all that it holds together with the same other ranks; only where two of those differ is
it asked for what each tensor has come to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.pieces import Layout

LINE_BYTES = 64  # of a sample; a device cannot take fewer
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)  # odd, of XXH64

class ReplicaSets(msgspec.Struct, frozen=True, eq=False):
    """Which pieces of a job several ranks hold: those that the same ranks do are one set.

    number  for each rank: of each of its pieces the set, as the rank numbers its own from 0; -1: nobody else holds it,
            or each has its own (buffers). Ranks that number alike share one array
    sets    for each rank: of each of its sets, the number among all
    """

    number: Sequence[NDArray[np.int32]]
    sets: Sequence[NDArray[np.int32]]


class Compared(msgspec.Struct, frozen=True, eq=False):
    """What one rank compares with others at every save, in the order of its sets.

    rows     positions in its layout
    starts   where each set begins among them
    key      of each: equal on all ranks for one box of one tensor
    length   of each, in bytes
    share    of them, that is looked at in one save by turns; None: all, which costs nothing for what is on the host
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    key: NDArray[np.uint64]
    length: NDArray[np.uint64]
    share: float | None

    @classmethod
    def of(cls, layout: Layout, number: NDArray[np.int64], share: float | None) -> Compared:
        """What `number` says of the pieces of a layout; see ReplicaSets."""
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
        """Of which rows a save of `step` looks at a few bytes: positions in `rows`, the same on all that hold them."""
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
    """Whether two ranks have come to different numbers for one set. Those that have None are not asked."""
    ranks = [rank for rank, one in enumerate(folded) if one is not None]
    if not ranks:
        return False
    number = np.concatenate([sets[rank] for rank in ranks])
    value = np.concatenate([one for one in folded if one is not None])
    order = np.argsort(number, kind="stable")
    number, value = number[order], value[order]
    return bool(((number[1:] == number[:-1]) & (value[1:] != value[:-1])).any())


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on all of a number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
