"""For the tuner: measures how long saves and restores of synthetic tensors take with a real store."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.random import default_rng  # else numpy imports this at its first use, and loses a Ctrl-C there
from numpy.typing import NDArray

from flowstone._native import Arena, ReadExtents, WriteExtents, has_io_uring, probe_direct
from flowstone.config import BLOCK_BYTES, KIB, MIB, Direct, EngineOptions, Tuning
from flowstone.errors import DamagedError
from flowstone.plan.write import WritePlan, data_offsets, plan_writes
from flowstone.stage.arena import open_read_arena, open_write_arena
from flowstone.store.base import FilePlan, ReadReceipt, finish_reading
from flowstone.store.local import LocalStore
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Piece
from flowstone_study.cache import drop_cached

# Tensors of a decoder with its optimizer's moments. Most bytes are in large tensors, but most tensors are small.
_TENSOR_BYTES = (96 * MIB, 24 * MIB, 24 * MIB, 8 * MIB, 2 * MIB, 384 * KIB, 16 * KIB, 16 * KIB, 8 * KIB)
_PHASE_BYTES = 64  # large tensors usually start so many bytes after a page boundary
# length of the noise, which is longer than the range in which a compressing file system finds repetitions
_TILE_BYTES = 4 * MIB
_TOUCH_POLL_S = 0.002


class Tensors:
    """Synthetic tensors of noise, in ordinary memory (without huge pages, as in torch's heap), and their positions in a
    segment. Owns the memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self.plan: WritePlan = plan_writes([
            Piece(f"tensor{number}", DTYPES["uint8"], (size,), Box.whole((size,)))
            for number, size in enumerate(_sizes(total_bytes))
        ])
        self._memory = [_noise(piece.bytes) for piece in self.plan.pieces]
        self.address = np.array([memory.ctypes.data for memory in self._memory], np.uint64)
        self.offset = data_offsets(self.plan, self.address % BLOCK_BYTES)

    @property
    def bytes(self) -> int:
        return self.plan.bytes

    @property
    def file_bytes(self) -> int:
        return self.plan.file_bytes

    def write_rows(self) -> WriteExtents:
        order = np.lexsort((self.offset, self.plan.segment))
        return WriteExtents(
            file=self.plan.segment[order], offset=self.offset[order], length=self.plan.length[order],
            address=self.address[order], chunk=self.plan.chunk[order], layout=np.full(len(order), -1, np.int64),
            layouts=[], chunks=self.plan.chunks,
        )

    def read_rows(self, digests: NDArray[np.uint64]) -> ReadExtents:
        """The ranges of the file from which every chunk is read into its tensor."""
        chunks = -(-self.plan.length.astype(np.int64) // MIB)
        rows = ReadExtents(
            file=self.plan.segment, offset=self.offset, length=self.plan.length, chunk=self.plan.chunk,
            first=np.zeros(len(chunks), np.uint64), last=chunks.astype(np.uint64), digests=digests,
        )
        rows.aim(self.address, np.full(len(chunks), -1, np.int64), [])
        return rows


def _sizes(total_bytes: int) -> Iterator[int]:
    """The sizes of tensors that fill `total_bytes`. Tensors that do not fit are left out, and the last one takes the
    rest.
    """
    left = total_bytes
    while left > 0:
        fitting = [size for size in _TENSOR_BYTES if size <= left]
        for size in fitting or [left]:
            if size <= left:
                yield size
                left -= size


def _noise(size: int) -> NDArray[np.uint8]:
    # Mapped here, as numpy would request huge pages for its own large arrays.
    mapped = mmap.mmap(-1, _PHASE_BYTES + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)[_PHASE_BYTES:]
    tile = default_rng(size).integers(0, 256, min(size, _TILE_BYTES), np.uint8)
    for offset in range(0, size, _TILE_BYTES):
        memory[offset : offset + _TILE_BYTES] = tile[: size - offset]
    return memory


def concrete(tuning: Tuning) -> Tuning:
    """The same tuning, in which "auto" is replaced by the engine that it selects here."""
    if tuning.backend != "auto":
        return tuning
    return replace(tuning, backend="io_uring" if has_io_uring() else "posix")


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors that were written to a file, for restores."""

    tensors: Tensors
    file: str
    digests: NDArray[np.uint64]


class Trials:
    """Measures how long saves and restores in a directory take. They consist of the same operations as a Checkpointer's
    writes and reads of segments.

    A save creates and reserves files; captures the tensors through an arena (staging memory) of half their size, whose
    memory was touched before; computes digests; and syncs file and directory. A restore creates the arena, reads a file
    that is not cached, checks digests, and copies the bytes into the tensors.

    direct  "on" if O_DIRECT works here, else "off"
    cold    whether the kernel reports that, in all restores so far, the file was not in the page cache at the start
    """

    def __init__(self, directory: Path) -> None:
        alignment = probe_direct(str(directory))
        self.direct: Direct = "on" if 0 < alignment <= BLOCK_BYTES else "off"
        self.cold = True
        self._directory = directory
        self._stores: dict[EngineOptions, LocalStore] = {}
        self._names = (f"trial-{number}" for number in count())

    def save(self, tensors: Tensors, tuning: Tuning) -> float:
        """Save `tensors` to a new file, and remove the file. Returns the seconds until the tensors were durable."""
        store, name = self._store(tuning, tensors.bytes), next(self._names)
        rows = tensors.write_rows()
        with _touched_arena(store, tensors.bytes // 2) as arena:
            started = time.perf_counter()
            self._write(store, tensors, rows, name, arena)
            seconds = time.perf_counter() - started
        store.remove(name)
        return seconds

    def restore(self, stored: Stored, tuning: Tuning) -> float:
        """Restore the tensors, and check every chunk. Returns the seconds that this took."""
        tensors, store = stored.tensors, self._store(tuning, stored.tensors.bytes)
        rows = tensors.read_rows(stored.digests)
        self.cold &= drop_cached([self._directory / stored.file]) is True
        started = time.perf_counter()
        arena = open_read_arena(store)
        try:
            receipt = finish_reading(store.read_extents([stored.file], rows, arena, wanted_bytes=tensors.bytes))
        finally:
            arena.close()
        seconds = time.perf_counter() - started
        _check(receipt, self._directory / stored.file)
        return seconds

    def store(self, tensors: Tensors, tuning: Tuning) -> Stored:
        """Write `tensors` to a file for restores."""
        store, name = self._store(tuning, tensors.bytes), next(self._names)
        with _touched_arena(store, tensors.bytes // 2) as arena:
            digests = self._write(store, tensors, tensors.write_rows(), name, arena)
        return Stored(tensors, name, digests)

    def remove(self, stored: Stored) -> None:
        (self._directory / stored.file).unlink()

    def close(self) -> None:
        while self._stores:
            self._stores.popitem()[1].close()

    def _write(
        self, store: LocalStore, tensors: Tensors, rows: WriteExtents, name: str, arena: Arena
    ) -> NDArray[np.uint64]:
        receipt = store.write([FilePlan(name, tensors.file_bytes)], rows, arena).receipt()
        store.sync_directory()
        if receipt.error is not None:
            raise receipt.error
        return receipt.digests

    def _store(self, tuning: Tuning, total_bytes: int) -> LocalStore:
        """A store with the settings of `tuning` for saves of `total_bytes`. Its engine is started, and the directory
        was probed.
        """
        start = tuning.direct_from_bytes
        options = EngineOptions(
            backend=concrete(tuning).backend, direct="off" if start is None or total_bytes < start else self.direct,
            queue_depth=tuning.queue_depth, request_bytes=tuning.request_bytes, workers=tuning.workers,
            read_in_place=tuning.in_place,
        )
        if options not in self._stores:
            store = self._stores[options] = LocalStore(self._directory, options)
            small, name = Tensors(BLOCK_BYTES), next(self._names)
            with _touched_arena(store, 0) as arena:
                self._write(store, small, small.write_rows(), name, arena)
            store.remove(name)
        return self._stores[options]


@contextmanager
def _touched_arena(store: LocalStore, size_bytes: int) -> Iterator[Arena]:
    """Context of an arena (staging memory) whose memory was touched, as a Checkpointer has it from its second save on.
    """
    request = store.settings("write").tuning.request_bytes
    arena = open_write_arena(store, max(size_bytes, 2 * request))
    try:
        arena.grow(arena.budget_bytes)
        while arena.touched_bytes < arena.budget_bytes:
            time.sleep(_TOUCH_POLL_S)
        yield arena
    finally:
        arena.close()


def _check(receipt: ReadReceipt, path: Path) -> None:
    if receipt.error is not None:
        raise receipt.error
    if receipt.bad.size:
        raise DamagedError(
            f"{path} returns bytes that differ from the bytes written", found=f"{receipt.bad.size} chunks that differ",
            next="do not keep checkpoints on this device; check it, and this machine's memory",
        )
