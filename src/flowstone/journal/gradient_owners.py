"""Which rank logs the gradients of a parameter: one of the ranks that hold the parameter.

Parameters are identified by keys, which are equal on all ranks that hold the same box of the same parameter in the same
optimizer. Replicas have equal gradients, so one copy is enough for the replay on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

_ALL = (1 << 64) - 1


class ParameterOwners(msgspec.Struct, frozen=True, eq=False):
    """Which ranks log the gradients of the parameters that one rank holds. The two arrays have an entry for each of
    these parameters, in the order of the optimizers that have them.

    rank     the number of the rank that logs the parameter's gradients (its owner)
    holders  how many ranks hold the parameter
    """

    rank: NDArray[np.int32]
    holders: NDArray[np.int32]


def assign_owners(keys: Sequence[NDArray[np.uint64]], lengths: Sequence[NDArray[np.uint64]]) -> list[ParameterOwners]:
    """Choose the owners of each rank's parameters so that all ranks log about the same number of bytes.

    keys, lengths  for each rank and each of its parameters: the key, and the length of the gradient in bytes
    """
    holders: dict[int, list[int]] = {}
    length: dict[int, int] = {}
    for rank, (own, sizes) in enumerate(zip(keys, lengths, strict=True)):
        for key, size in zip(own.tolist(), sizes.tolist(), strict=True):
            holders.setdefault(key, []).append(rank)
            length[key] = size
    load, owner = [0] * len(keys), dict[int, int]()
    # First the parameters that only one rank holds, then the others, the largest first: the small ones at the end even
    # out the loads.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -length[key], key)):
        owner[key] = min(holders[key], key=load.__getitem__)
        load[owner[key]] += length[key]
    return [
        ParameterOwners(
            np.array([owner[key] for key in own.tolist()], np.int32),
            np.array([len(holders[key]) for key in own.tolist()], np.int32),
        )
        for own in keys
    ]


def agreement_term(keys: NDArray[np.uint64], owners: ParameterOwners, rank: int, steps: Sequence[Sequence[int]]) -> int:
    """A number by which the ranks compare which parameters had gradients in a step. The sum of all ranks' numbers is 0
    modulo 2^64 if, for each parameter that several ranks hold and each optimizer step, either all of these ranks had a
    gradient or none had.

    steps  for each step of an optimizer, in order, the positions of the parameters that had a gradient
    """
    number = 0
    for turn, present in enumerate(steps):
        shared = np.array(present, np.int64)
        shared = shared[owners.holders[shared] > 1]
        weight = np.where(owners.rank[shared] == rank, 1 - owners.holders[shared].astype(np.int64), 1).astype(np.uint64)
        number += (2 * turn + 1) * int((keys[shared] * weight).sum(dtype=np.uint64))
    return number & _ALL
