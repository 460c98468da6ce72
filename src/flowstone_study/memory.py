"""The memory of one process for a measurement, and the pattern by which every block of every tensor is identified."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES
from flowstone_study.placing import slots
from flowstone_study.records import Cell

_WORDS = BLOCK_BYTES // 8
_TILE_BLOCKS = 256  # 1 MiB of noise, which is copied block by block: it cannot be compressed, and is quick to make
_SEED = 20_251_230


class Run:
    """Anonymous memory that begins at a page. The constructor maps it, `fill` touches it first, and it is unmapped when
    this object is dropped.

    huge_pages  whether to request transparent huge pages before the memory is touched; a kernel without these ignores
                the request
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool) -> None:
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # only a hint; a kernel without huge pages returns EINVAL
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._words: NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64)

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self._map)

    def fill(self, cell: Cell, rank: int) -> None:
        """Write every block's pattern: noise, with the tensor's number and the block's position at both ends (the
        marks).
        """
        blocks = self._words.reshape(-1, _WORDS)
        tile = np.random.default_rng(_SEED).integers(0, 2**64, (_TILE_BLOCKS, _WORDS), dtype=np.uint64)
        for first in range(0, len(blocks), _TILE_BLOCKS):
            rows = blocks[first : first + _TILE_BLOCKS]
            rows[:] = tile[: len(rows)]
        blocks[:, 0], blocks[:, -1] = _marks(cell, rank)

    def erase_marks(self) -> None:
        """Erase the marks of every block, so that only a read can write them again."""
        blocks = self._words.reshape(-1, _WORDS)
        blocks[:, 0] = blocks[:, -1] = 0

    def is_filled(self, cell: Cell, rank: int) -> bool:
        """Whether every block has the marks of its tensor and its position."""
        blocks = self._words.reshape(-1, _WORDS)
        tensor, place = _marks(cell, rank)
        return bool((blocks[:, 0] == tensor).all() and (blocks[:, -1] == place).all())


def _marks(cell: Cell, rank: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The marks of each block: 1 + a number for the rank and the tensor, and 1 + the block's number in the tensor."""
    counts = np.array([slot.room_bytes // BLOCK_BYTES for slot in slots(cell)])
    tensor = np.repeat(np.arange(len(counts)), counts) | (rank + 1) << 32
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return tensor.astype(np.uint64), place.astype(np.uint64)
