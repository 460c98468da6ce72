"""Early watch: every write into pieces of which no plan says yet where they are captured.

Only what the system can watch (`native/extent_pages.h`): contiguous memory of the host, of this process alone. A plan's
own watch (`capture.py`) may begin meanwhile over the same memory: neither hides a write from the other. So a change is
detected whenever it comes, if the plan's begins before this one is read for the last time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, Watch
from flowstone.table.pieces import Places


class EarlyWatch:
    """Records writes into the host memory of some pieces, from its construction until `release`."""

    def __init__(self, places: Places, pieces: NDArray[np.int64], lengths: NDArray[np.uint64], watch: Watch) -> None:
        """`lengths`: of all pieces of `places`, in bytes. `watch`: see EngineOptions; of "samples", none is watched."""
        self._pieces = pieces[:0] if watch == "samples" else pieces[places.host_runs[pieces]]
        self._rows: _native.WriteExtents | None = None
        if len(self._pieces):
            self._rows = _rows(places.address[self._pieces], lengths[self._pieces])
            self._rows.watch(watch)

    def changed(self) -> list[int]:
        """The pieces that were written, or whose memory has gone away, since then. They stay watched."""
        return [] if self._rows is None else [int(self._pieces[row]) for row in self._rows.changed_rows()]

    def release(self) -> None:
        """Watch them no more."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.unwatch()


def _rows(address: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> _native.WriteExtents:
    """Rows of one file, each at the phase that it has in memory: others are not watched exactly."""
    block, count = np.uint64(BLOCK_BYTES), len(lengths)
    phase = address % block
    rooms = (phase + lengths + block - np.uint64(1)) // block * block
    chunks = (lengths + np.uint64(CHUNK_BYTES - 1)) // np.uint64(CHUNK_BYTES)
    return _native.WriteExtents(
        file=np.zeros(count, np.uint32), offset=np.cumsum(rooms) - rooms + phase, length=lengths, address=address,
        chunk=np.cumsum(chunks) - chunks, layout=np.full(count, -1, np.int64), layouts=[], chunks=int(chunks.sum()),
        lazy=np.ones(count, np.bool_),
    )
