"""Which rank logs the gradients of a parameter: each parameter is logged by one of the ranks that hold it.

Parameters are told apart by keys: equal on all ranks that hold the same box of the same parameter, in the optimizer of
the same number. Replicas have equal gradients, so one copy replays them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

_ALL = (1 << 64) - 1


class Owners(msgspec.Struct, frozen=True, eq=False):
    """For each parameter of one rank, in the order of its optimizers.

    rank     the one that logs it
    holders  how many ranks hold it
    """

    rank: NDArray[np.int32]
    holders: NDArray[np.int32]


def share_out(keys: Sequence[NDArray[np.uint64]], lengths: Sequence[NDArray[np.uint64]]) -> list[Owners]:
    """The owners of each rank's parameters, so that every rank logs about as many bytes.

    keys, lengths  for each rank: of each of its parameters the key, and the length of its gradient in bytes
    """
    holders: dict[int, list[int]] = {}
    length: dict[int, int] = {}
    for rank, (own, sizes) in enumerate(zip(keys, lengths, strict=True)):
        for key, size in zip(own.tolist(), sizes.tolist(), strict=True):
            holders.setdefault(key, []).append(rank)
            length[key] = size
    load, owner = [0] * len(keys), dict[int, int]()
    # What one rank alone holds comes first, then the largest: what is left evens out the loads.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -length[key], key)):
        owner[key] = min(holders[key], key=load.__getitem__)
        load[owner[key]] += length[key]
    return [
        Owners(
            np.array([owner[key] for key in own.tolist()], np.int32),
            np.array([len(holders[key]) for key in own.tolist()], np.int32),
        )
        for own in keys
    ]


def claim(keys: NDArray[np.uint64], owners: Owners, rank: int, acts: Sequence[Sequence[int]]) -> int:
    """A number of a step, of which the sum over all ranks is 0 modulo 2^64 if, for each parameter that several hold,
    all of them had a gradient in the same acts, or none had.

    acts  for each step of an optimizer, in order, the positions of the parameters that had a gradient
    """
    found = 0
    for turn, present in enumerate(acts):
        at = np.array(present, np.int64)
        at = at[owners.holders[at] > 1]
        weight = np.where(owners.rank[at] == rank, 1 - owners.holders[at].astype(np.int64), 1).astype(np.uint64)
        found += (2 * turn + 1) * int((keys[at] * weight).sum(dtype=np.uint64))
    return found & _ALL
