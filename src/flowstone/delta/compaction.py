"""Compaction: which chunks of earlier files a save writes again instead of referring to them, so that retention can
delete these files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.config import COMPACT_BELOW, COMPACTED_BYTES_MAX, REFERRED_FILES_MAX


def chunks_to_rewrite(
    segment: NDArray[np.uint32], length: NDArray[np.uint32], file_bytes: NDArray[np.int64], *,
    bytes_max: int = COMPACTED_BYTES_MAX, files_max: int = REFERRED_FILES_MAX,
) -> NDArray[np.bool_]:
    """For each chunk that a save may refer to, whether it is written again instead.

    segment, length  for each chunk: the file that contains it, and its stored length in bytes
    file_bytes       length of each file
    bytes_max        limit of the bytes that one save writes again; later saves continue

    A chunk is written again if less than COMPACT_BELOW of its file is used. If there are more than `files_max` files,
    the chunks of the least used files are written again, too. Chunks of the least used files come first.
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
