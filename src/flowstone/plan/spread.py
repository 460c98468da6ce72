"""Spread a rank's pieces over the paths of a store, according to each path's share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.config import PathShare


def spread_pieces(
    length: NDArray[np.uint64], slotted: NDArray[np.bool_], late: NDArray[np.bool_], shares: Sequence[PathShare]
) -> NDArray[np.int64]:
    """For each piece, the number of the path that gets it. The first path gets all small pieces, those not `slotted`.

    length   length of each piece, in bytes
    slotted  for each piece, whether it is large enough to be aligned in the file
    late     for each piece, whether it is captured after `save` has returned. Late pieces, and all
             other pieces, are spread evenly, each group separately
    shares   the share of each path; at least one path

    Each piece, the largest first, goes to the path with the lowest load in relation to its weight (the greedy rule of
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). Equal arguments give equal results.
    """
    path = np.full(len(length), shares[0].path, np.int64)
    load = {share.path: 0 for share in shares}
    load[shares[0].path] = int(length[~slotted].sum())
    weight = {share.path: share.weight for share in shares}
    for some in (slotted & ~late, slotted & late):
        numbers = np.flatnonzero(some)
        numbers = numbers[np.argsort(-length[numbers].astype(np.int64), kind="stable")]
        queue = [(load[path_id] / weight[path_id], number, path_id) for number, path_id in enumerate(load)]
        heapq.heapify(queue)
        for piece, bytes_ in zip(numbers.tolist(), length[numbers].tolist(), strict=True):
            _, number, path_id = queue[0]
            path[piece] = path_id
            load[path_id] += bytes_
            heapq.heapreplace(queue, (load[path_id] / weight[path_id], number, path_id))
    return path
