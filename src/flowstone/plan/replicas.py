"""Replicas: pieces that several ranks hold, and how ranks compare them with short messages.

Each rank computes one number for all pieces that it shares with the same other ranks, of samples of each; and a second
one of those that its devices have digested whole, with one that tells which these are. Only if two such numbers differ
does it send a digest for each tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.pieces import Layout

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
    share    share of them that one save samples, by turns; None: all, which costs nothing in host memory
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
        turn = mixed(self.key ^ np.uint64(step)).astype(np.float64) / float(1 << 64)
        return np.flatnonzero(turn < self.share)

    def folded(
        self, at: NDArray[np.int64], digests: NDArray[np.uint16],
        whole: tuple[NDArray[np.int64], NDArray[np.uint64]] | None,
    ) -> NDArray[np.uint64]:
        """Three numbers for each set, in rows: of samples; which of its pieces were digested whole, 0 for none; and of
        these digests.

        digests  of samples of the rows at these positions
        whole    positions in the layout of what was digested, compared or not, and the digests
        """
        each = np.zeros((3, len(self.rows)), np.uint64)
        each[0, at] = mixed(self.key[at] + (digests.astype(np.uint64) + np.uint64(1)) * _MIX[2])
        if whole is not None and len(whole[0]):
            order = np.argsort(whole[0])
            place = order[np.minimum(np.searchsorted(whole[0][order], self.rows), len(order) - 1)]
            found = whole[0][place] == self.rows
            each[1] = np.where(found, mixed(self.key), np.uint64(0))
            each[2] = np.where(found, mixed(self.key ^ mixed(whole[1][place])), np.uint64(0))
        return np.add.reduceat(each, self.starts, 1) if len(self.starts) else each


def differing(sets: Sequence[NDArray[np.int32]], folded: Sequence[NDArray[np.uint64] | None]) -> bool:
    """Whether two ranks have different numbers for the same set, or for the same pieces of it.

    folded  of each rank: see Compared.folded. Ranks with None are left out
    """
    ranks = [rank for rank, one in enumerate(folded) if one is not None]
    if not ranks:
        return False
    number = np.concatenate([sets[rank] for rank in ranks])
    sampled, which, value = np.concatenate([one for one in folded if one is not None], 1)
    order = np.argsort(number, kind="stable")
    of, sampled = number[order], sampled[order]
    if ((of[1:] == of[:-1]) & (sampled[1:] != sampled[:-1])).any():
        return True
    order = np.lexsort((which, number))
    of, which, value = number[order], which[order], value[order]
    return bool(((of[1:] == of[:-1]) & (which[1:] == which[:-1]) & (value[1:] != value[:-1])).any())


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits: each bit of the result depends on all bits of the number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
