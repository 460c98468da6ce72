"""Replicas: pieces that several ranks hold, and how ranks compare them with short messages.

Pieces that are held by the same ranks form a set. For each set, each of its ranks computes three numbers: one from
samples of each piece, one from the list of pieces that devices have digested in full, and one from these digests. Only
if the numbers of two ranks differ, the ranks send a digest for each tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.pieces import Layout

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)  # odd constants, as in XXH64


class ReplicaSets(msgspec.Struct, frozen=True, eq=False):
    """The pieces that are held by several ranks of a job. Pieces held by the same ranks form one set.

    number  for each rank and each of its pieces: the set, in the rank's own numbering from 0; -1: only this rank holds
            the piece, or its values may differ (buffers). Ranks with equal numbering share one array
    sets    for each rank and each of its sets: the set's number in the job
    """

    number: Sequence[NDArray[np.int32]]
    sets: Sequence[NDArray[np.int32]]


class ReplicaComparison(msgspec.Struct, frozen=True, eq=False):
    """The replicas that one rank compares with other ranks at every save, in the order of its sets of replicas.

    rows     positions of the replicas in the rank's layout
    starts   index in `rows` of each set's first replica
    key      a number for each replica, which is equal on all ranks for the same box of the same tensor
    length   length of each replica, in bytes
    share    the share of the replicas, from 0 to 1, that one save samples; the next save samples others. None: all
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    key: NDArray[np.uint64]
    length: NDArray[np.uint64]
    share: float | None

    @classmethod
    def of(cls, layout: Layout, number: NDArray[np.int64], share: float | None) -> ReplicaComparison:
        """The replicas of a layout. `number`: for each piece the number of its set, or -1 if it is no replica; see
        ReplicaSets.
        """
        rows = np.argsort(number, kind="stable")
        rows = rows[np.searchsorted(number[rows], 0) :]
        pieces = layout.pieces.take(np.sort(rows).tolist())
        order = np.argsort(np.argsort(rows))
        keys = [hashlib.blake2b(f"{piece.name} {piece.box}".encode(), digest_size=8).digest() for piece in pieces]
        key = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64)[order]
        length = pieces.lengths()[order]
        starts = np.flatnonzero(np.diff(number[rows], prepend=-1))
        return cls(rows, starts, key, length, share)

    def sampled_rows(self, step: int) -> NDArray[np.int64]:
        """Which replicas a save of `step` samples, as positions in `rows`. All ranks that hold a replica make the same
        choice.
        """
        if self.share is None:
            return np.arange(len(self.rows))
        turn = mix_bits(self.key ^ np.uint64(step)).astype(np.float64) / float(1 << 64)
        return np.flatnonzero(turn < self.share)

    def fold(
        self, sampled_rows: NDArray[np.int64], digests: NDArray[np.uint16],
        whole: tuple[NDArray[np.int64], NDArray[np.uint64]] | None,
    ) -> NDArray[np.uint64]:
        """Three numbers for each set of replicas, as three rows. The first is computed from samples; the second from
        the list of pieces with full digests, 0 if there are none; the third from these digests.

        sampled_rows  positions in `rows` of the sampled replicas
        digests       digests of these samples
        whole         positions in the layout of all pieces with full digests, replicas or not, and these digests
        """
        each = np.zeros((3, len(self.rows)), np.uint64)
        each[0, sampled_rows] = mix_bits(self.key[sampled_rows] + (digests.astype(np.uint64) + np.uint64(1)) * _MIX[2])
        if whole is not None and len(whole[0]):
            order = np.argsort(whole[0])
            rank = order[np.minimum(np.searchsorted(whole[0][order], self.rows), len(order) - 1)]
            is_digested = whole[0][rank] == self.rows
            each[1] = np.where(is_digested, mix_bits(self.key), np.uint64(0))
            each[2] = np.where(is_digested, mix_bits(self.key ^ mix_bits(whole[1][rank])), np.uint64(0))
        return np.add.reduceat(each, self.starts, 1) if len(self.starts) else each


def differ(sets: Sequence[NDArray[np.int32]], folded: Sequence[NDArray[np.uint64] | None]) -> bool:
    """Whether replicas differ: whether two ranks have computed different numbers for the same set of replicas.

    sets    for each rank, the numbers of its sets in the job
    folded  for each rank, the result of ReplicaComparison.fold; None: the rank is not compared
    """
    ranks = [rank for rank, numbers in enumerate(folded) if numbers is not None]
    if not ranks:
        return False
    number = np.concatenate([sets[rank] for rank in ranks])
    sampled, which, value = np.concatenate([numbers for numbers in folded if numbers is not None], 1)
    order = np.argsort(number, kind="stable")
    of_set, sampled = number[order], sampled[order]
    if ((of_set[1:] == of_set[:-1]) & (sampled[1:] != sampled[:-1])).any():
        return True
    order = np.lexsort((which, number))
    of_set, which, value = number[order], which[order], value[order]
    return bool(((of_set[1:] == of_set[:-1]) & (which[1:] == which[:-1]) & (value[1:] != value[:-1])).any())


def mix_bits(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number, so that each bit of the result depends on all bits of the number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX[1]
    return numbers ^ (numbers >> np.uint64(31))
