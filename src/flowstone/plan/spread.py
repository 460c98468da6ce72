"""Spread a rank's pieces over the paths of a store, by the share that each path is to get."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.config import Share


def spread_pieces(
    length: NDArray[np.uint64], slotted: NDArray[np.bool_], late: NDArray[np.bool_], shares: Sequence[Share]
) -> NDArray[np.int64]:
    """The path of each piece: numbers of `shares`, the first of which gets all that has no slot.

    length, slotted, late  columns of the pieces; what is captured early is spread evenly by itself, and so is the rest
    shares                 one at least

    The largest pieces first, each to the path that has the least for its weight (the greedy rule of R. L. Graham,
    "Bounds on multiprocessing timing anomalies", 1969). Equal pieces and shares give the same paths. Pure.
    """
    path = np.full(len(length), shares[0].path, np.int64)
    load = {share.path: 0 for share in shares}
    load[shares[0].path] = int(length[~slotted].sum())
    weight = {share.path: share.weight for share in shares}
    for some in (slotted & ~late, slotted & late):
        numbers = np.flatnonzero(some)
        numbers = numbers[np.argsort(-length[numbers].astype(np.int64), kind="stable")]
        queue = [(load[at] / weight[at], number, at) for number, at in enumerate(load)]
        heapq.heapify(queue)
        for piece, bytes_ in zip(numbers.tolist(), length[numbers].tolist(), strict=True):
            _, number, at = queue[0]
            path[piece] = at
            load[at] += bytes_
            heapq.heapreplace(queue, (load[at] / weight[at], number, at))
    return path
