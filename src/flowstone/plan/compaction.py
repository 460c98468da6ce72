"""Which chunks of earlier files a save writes again, although it could refer to them, so that those files can go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.config import COMPACT_BELOW, COMPACTED_BYTES_MAX, REFERRED_FILES_MAX


def to_write_again(
    segment: NDArray[np.uint32], length: NDArray[np.uint32], file_bytes: NDArray[np.int64], *,
    bytes_max: int = COMPACTED_BYTES_MAX, files_max: int = REFERRED_FILES_MAX,
) -> NDArray[np.bool_]:
    """For each chunk that a save may refer to, whether it is written again instead.

    segment, length  of each chunk: the file that it is in, and its bytes there
    file_bytes       of each file, as long as it is
    bytes_max        written again by one save at most; later ones go on

    Those are chunks in files of which less than COMPACT_BELOW is used, and in the least used of more than `files_max`
    files; the least used files first.
    """
    used = np.bincount(segment, length, len(file_bytes))
    is_used = used > 0
    sparse = is_used & (used < COMPACT_BELOW * file_bytes)
    order = np.argsort(used, kind="stable")
    order = order[is_used[order]]
    sparse[order[: max(0, len(order) - files_max)]] = True
    rank = np.empty(len(used), np.int64)
    rank[np.argsort(used, kind="stable")] = np.arange(len(used))
    chosen = np.flatnonzero(sparse[segment])
    chosen = chosen[np.argsort(rank[segment[chosen]], kind="stable")]
    again = np.zeros(len(segment), np.bool_)
    again[chosen[np.cumsum(length[chosen], dtype=np.int64) <= bytes_max]] = True
    return again
