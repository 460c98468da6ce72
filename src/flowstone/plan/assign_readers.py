"""Assign readers: which rank of a node reads what several of them want, when, and where in its ring it puts that.

Each byte is read once where ranks want the same chunks of the same piece (as ByteCheckpoint has it for replicas,
arXiv 2407.20143). Every rank computes the same assignment from what all of them want.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.table.chunks import Chunks, distinct

_RUN_CHUNKS = 8  # that one rank reads for others as one
_ALIGNED_BYTES = 64


class ReaderAssignment(msgspec.Struct, frozen=True, eq=False):
    """What one rank reads for several, as columns of runs in the order of reading.

    piece, first, last  chunks [first, last) of a piece of the index
    batch     in which it is read for others
    reader    position among the ranks
    position  in a half of the reader's ring, in bytes
    wants     of the asking rank: its row, and the run, of each run that it takes
    alone     its rows that no other rank wants
    batches   how many there are
    bytes     of all runs, as they are stored: so they lie in a ring, too, where each rank verifies what it takes
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
    """Assign a reader to what several ranks want of `chunks`.

    wanted      of each rank its rows: piece, first and last chunk, an array of (rows, 3)
    half_bytes  of a half of a ring; a run of chunks fits in
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
    begin = np.cumsum(runs) - runs  # of each shared key, its first run
    of = np.repeat(np.arange(len(shared)), runs)
    piece = keys[shared, 0][of]
    first = keys[shared, 1][of] + (np.arange(len(of)) - begin[of]) * _RUN_CHUNKS
    last = np.minimum(first + _RUN_CHUNKS, keys[shared, 2][of])
    length = chunks.stored_bytes(piece, first, last)
    batch, reader, position = _ring_positions(length.tolist(), len(wanted), half_bytes)
    number = np.full(len(keys), -1, np.int64)  # of a key among those shared
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
    """Batch, reader and position of each run. A reader's runs of a batch follow each other, and are equally many bytes
    for all readers.
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
