"""Assign readers: which rank of a node reads chunks that several of its ranks need, when, and where in its ring buffer.

Each byte is read once if ranks need the same chunks of the same piece (ByteCheckpoint does so for replicas,
arXiv 2407.20143). Every rank computes the same assignment from the needs of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.table.chunks import Chunks, distinct

_RUN_CHUNKS = 8  # that one rank reads for others in one run
_ALIGNED_BYTES = 64


class ReaderAssignment(msgspec.Struct, frozen=True, eq=False):
    """The shared reads of a node, as columns over runs, in the order of reading.

    piece, first, last  chunks [first, last) of a piece of the index
    batch     number of the batch in which the run is read
    reader    position of the reading rank among the ranks
    position  in a half of the reader's ring buffer, in bytes
    wants     for each run that the asking rank needs: its row, and the run
    alone     rows of the asking rank that no other rank needs
    batches   number of batches
    bytes     of all runs, in stored form: a ring buffer holds that, and each rank verifies what it takes
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    batch: NDArray[np.int64]
    reader: NDArray[np.int64]
    position: NDArray[np.int64]
    wants: tuple[NDArray[np.int64], NDArray[np.int64]]
    alone: NDArray[np.int64]
    batches: int
    bytes: int


def assign_readers(
    wanted: Sequence[NDArray[np.int64]], me: int, chunks: Chunks, *, half_bytes: int
) -> ReaderAssignment:
    """Assign a reader to each run of `chunks` that several ranks need.

    wanted      for each rank its rows: piece, first and last chunk, an array of (rows, 3)
    half_bytes  size of half a ring buffer; must hold a run of chunks
    """
    assert half_bytes >= _RUN_CHUNKS * CHUNK_BYTES, "a run fits into half a ring"
    rows = np.concatenate(wanted)
    owner = np.repeat(np.arange(len(wanted)), [len(one) for one in wanted])
    keys, key = np.unique(rows, axis=0, return_inverse=True)
    key = key.reshape(-1)
    holders = np.bincount(distinct(key * len(wanted) + owner) // len(wanted), minlength=len(keys))
    shared = np.flatnonzero(holders > 1)
    segment, offset = chunks.stored_at(keys[shared, 0], keys[shared, 1])
    shared = shared[np.lexsort((offset, segment))]
    runs = -(-(keys[shared, 2] - keys[shared, 1]) // _RUN_CHUNKS)
    begin = np.cumsum(runs) - runs  # first run of each shared key
    of = np.repeat(np.arange(len(shared)), runs)
    piece = keys[shared, 0][of]
    first = keys[shared, 1][of] + (np.arange(len(of)) - begin[of]) * _RUN_CHUNKS
    last = np.minimum(first + _RUN_CHUNKS, keys[shared, 2][of])
    length = chunks.stored_bytes(piece, first, last)
    batch, reader, position = _ring_positions(length.tolist(), len(wanted), half_bytes)
    number = np.full(len(keys), -1, np.int64)  # number of each key among the shared ones
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
    """Batch, reader and position of each run. In a batch, a reader's runs follow each other, and all readers have about
    equally many bytes.
    """
    left = sum(length)
    batch, reader, position = 0, 0, 0
    share = min(half_bytes, -(-left // readers))
    found = np.zeros((3, len(length)), np.int64)
    for at, n in enumerate(length):
        if position and (position + n > half_bytes or position >= share):
            reader, position = reader + 1, 0
            if reader == readers:
                batch, reader = batch + 1, 0
                share = min(half_bytes, -(-left // readers))
        found[:, at] = batch, reader, position
        position += -(-n // _ALIGNED_BYTES) * _ALIGNED_BYTES
        left -= n
    return found[0], found[1], found[2]
