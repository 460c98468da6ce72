"""Early watch: detects every write into pieces of a save that has no plan yet (which rank writes which pieces).

The watch covers memory that the system can watch (`native/watch/extent_pages.h`): contiguous host memory, private to
this process. The watch of the capture (`capture.py`) may begin over the same memory; neither of the two hides a write
from the other. If the capture's watch begins before this one is read for the last time, every change is detected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone._native import WriteExtents
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, Watch
from flowstone.table.pieces import Places


class EarlyWatch:
    """Records writes into the host memory of some pieces, from its construction until `release`."""

    def __init__(self, places: Places, pieces: NDArray[np.int64], lengths: NDArray[np.uint64], watch: Watch) -> None:
        """`lengths`: lengths of all pieces of `places`, in bytes. `watch`: see EngineOptions; with "samples" nothing is
        watched.
        """
        self._pieces = pieces[:0] if watch == "samples" else pieces[places.host_runs[pieces]]
        self._rows: WriteExtents | None = None
        if len(self._pieces):
            self._rows = _rows(places.address[self._pieces], lengths[self._pieces])
            self._rows.watch(watch)

    def changed(self) -> list[int]:
        """The pieces that were written, or whose memory was freed, since construction. They stay watched."""
        return [] if self._rows is None else [int(self._pieces[row]) for row in self._rows.changed_rows()]

    def release(self) -> None:
        """End the watch."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.unwatch()


def _rows(address: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> WriteExtents:
    """The table of watched memory for the engine, as if the memory were written into a file. Each range gets a file
    offset that equals its address within a page, as only such ranges are watched exactly.
    """
    block, count = np.uint64(BLOCK_BYTES), len(lengths)
    phase = address % block
    rooms = (phase + lengths + block - np.uint64(1)) // block * block
    chunks = (lengths + np.uint64(CHUNK_BYTES - 1)) // np.uint64(CHUNK_BYTES)
    rows = WriteExtents(
        file=np.zeros(count, np.uint32), offset=np.cumsum(rooms) - rooms + phase, length=lengths, address=address,
        chunk=np.cumsum(chunks) - chunks, layout=np.full(count, -1, np.int64), layouts=[], chunks=int(chunks.sum()),
    )
    rows.mark_lazy(np.ones(count, np.bool_))
    return rows
