"""A process's memory for a run, and the pattern that identifies every block of every tensor."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES
from flowstone_study.placing import slots
from flowstone_study.records import Cell

_WORDS = BLOCK_BYTES // 8
_TILE_BLOCKS = 256  # 1 MiB of noise, copied block by block: incompressible, and fast to make
_SEED = 20_251_230


class Run:
    """Anonymous memory, mapped when created, touched when filled, unmapped when dropped. Aligned to a page.

    huge_pages  ask for transparent huge pages before the first touch; a kernel without them ignores it
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool) -> None:
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # safe: a hint; a kernel built without huge pages returns EINVAL
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._words: NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64)

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self._map)

    def fill(self, cell: Cell, rank: int) -> None:
        """Give every block its pattern: noise, marked at both ends with tensor and position."""
        blocks = self._words.reshape(-1, _WORDS)
        tile = np.random.default_rng(_SEED).integers(0, 2**64, (_TILE_BLOCKS, _WORDS), dtype=np.uint64)
        for first in range(0, len(blocks), _TILE_BLOCKS):
            rows = blocks[first : first + _TILE_BLOCKS]
            rows[:] = tile[: len(rows)]
        blocks[:, 0], blocks[:, -1] = _marks(cell, rank)

    def spoil(self) -> None:
        """Touch every block and erase its marks, so that only a read restores them."""
        blocks = self._words.reshape(-1, _WORDS)
        blocks[:, 0] = blocks[:, -1] = 0

    def is_filled(self, cell: Cell, rank: int) -> bool:
        """Whether every block has the marks of its tensor and position."""
        blocks = self._words.reshape(-1, _WORDS)
        tensor, place = _marks(cell, rank)
        return bool((blocks[:, 0] == tensor).all() and (blocks[:, -1] == place).all())


def _marks(cell: Cell, rank: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """For each block of the run: (1 + rank and number of its tensor, 1 + its number within the tensor)."""
    counts = np.array([slot.room_bytes // BLOCK_BYTES for slot in slots(cell)])
    tensor = np.repeat(np.arange(len(counts)), counts) | (rank + 1) << 32
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return tensor.astype(np.uint64), place.astype(np.uint64)
