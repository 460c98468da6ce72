"""Assign readers: for chunks that several ranks of a node need, which rank reads them, when, and into which part of its
ring buffer.

If several ranks need the same chunk, it is read once (ByteCheckpoint does so for replicas, arXiv 2407.20143). Every
rank computes the same assignment from the plans of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.table.chunks import Chunks, distinct

_RUN_CHUNKS = 8  # length of a run: the successive chunks that one rank reads for others
_ALIGNED_BYTES = 64


class ReaderAssignment(msgspec.Struct, frozen=True, eq=False):
    """The shared reads of a node. A run is a few successive chunks that one rank reads. The attributes up to `position`
    are arrays with one element for each run, in the order of reading.

    piece, first, last  the run has the chunks [first, last) of this piece of the index
    batch     number of the batch in which the run is read
    reader    number of the rank that reads it, among the ranks of the node
    position  where the run is put, in bytes from the beginning of one half of the reader's ring buffer
    needed    for each run that this rank needs: the row of its read plan, and the number of the run
    unshared  rows of this rank's read plan that no other rank needs
    batches   number of batches
    bytes     stored length of all runs; ring buffers hold stored bytes, and each rank verifies the bytes that it copies
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    batch: NDArray[np.int64]
    reader: NDArray[np.int64]
    position: NDArray[np.int64]
    needed: tuple[NDArray[np.int64], NDArray[np.int64]]
    unshared: NDArray[np.int64]
    batches: int
    bytes: int


def assign_readers(
    rank_rows: Sequence[NDArray[np.int64]], me: int, chunks: Chunks, *, half_bytes: int
) -> ReaderAssignment:
    """Assign a reader to each run of `chunks` that several ranks need.

    rank_rows   for each rank an array (rows, 3) of its plan's rows: piece, first and last chunk
    half_bytes  size of half a ring buffer; must hold a run of chunks
    """
    assert half_bytes >= _RUN_CHUNKS * CHUNK_BYTES, "a run must fit in half a ring buffer"
    rows = np.concatenate(rank_rows)
    owner = np.repeat(np.arange(len(rank_rows)), [len(needs) for needs in rank_rows])
    keys, key = np.unique(rows, axis=0, return_inverse=True)
    key = key.reshape(-1)
    holders = np.bincount(distinct(key * len(rank_rows) + owner) // len(rank_rows), minlength=len(keys))
    shared = np.flatnonzero(holders > 1)
    segment, offset = chunks.stored_locations(keys[shared, 0], keys[shared, 1])
    shared = shared[np.lexsort((offset, segment))]
    runs = -(-(keys[shared, 2] - keys[shared, 1]) // _RUN_CHUNKS)
    begin = np.cumsum(runs) - runs  # for each shared key, the number of its first run
    of = np.repeat(np.arange(len(shared)), runs)
    piece = keys[shared, 0][of]
    first = keys[shared, 1][of] + (np.arange(len(of)) - begin[of]) * _RUN_CHUNKS
    last = np.minimum(first + _RUN_CHUNKS, keys[shared, 2][of])
    length = chunks.stored_bytes(piece, first, last)
    batch, reader, position = _ring_positions(length.tolist(), len(rank_rows), half_bytes)
    number = np.full(len(keys), -1, np.int64)  # for each key, its number among the shared keys; -1: it is not shared
    number[shared] = np.arange(len(shared))
    mine = number[key[owner == me]]
    taking = np.flatnonzero(mine >= 0)
    count = runs[mine[taking]]
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    wants = (np.repeat(taking, count), np.repeat(begin[mine[taking]], count) + within)
    return ReaderAssignment(
        piece, first, last, batch, reader, position, wants, np.flatnonzero(mine < 0),
        int(batch[-1]) + 1 if len(batch) else 0, int(length.sum()),
    )


def _ring_positions(
    length: Sequence[int], readers: int, half_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each run: its batch, its reader, and its position in the reader's ring buffer. In a batch, a reader's runs
    are consecutive, and all readers read about the same number of bytes.
    """
    left = sum(length)
    batch, reader, position = 0, 0, 0
    share = min(half_bytes, -(-left // readers))
    assigned = np.zeros((3, len(length)), np.int64)
    for i, run_bytes in enumerate(length):
        if position and (position + run_bytes > half_bytes or position >= share):
            reader, position = reader + 1, 0
            if reader == readers:
                batch, reader = batch + 1, 0
                share = min(half_bytes, -(-left // readers))
        assigned[:, i] = batch, reader, position
        position += -(-run_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        left -= run_bytes
    return assigned[0], assigned[1], assigned[2]
