"""The engine's own stream of a device, ordered relative to the current one. Imported once a device is in use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.errors import StorageError
from flowstone.stage.fence import FENCE_BEFORE, SAVE_OUTSIDE, recording_error
from flowstone.table.pieces import Memory, row_bytes


class OwnStream:
    """A stream of the engine's own, ordered relative to the current one by the driver. torch does not know of it: the
    code that queues copies keeps their memory alive until they are done.

    current  the handle of the stream that the calling thread puts its work into
    """

    def __init__(self, native: _native.Device, current: Callable[[], int]) -> None:
        self.native, self._current = native, current

    def wait_current(self) -> None:
        self.check_current("save or load", SAVE_OUTSIDE)
        try:
            self.native.follow(self._current())
        except OSError as error:
            raise StorageError(
                "a device refuses to copy", errno=errno.EIO, reason=error.strerror,
                next="after a GPU has failed only a new process can use it: resume from the newest checkpoint",
            ) from error

    def block_current(self, *, early: bool = False) -> None:
        self.check_current("change the state", FENCE_BEFORE)
        try:
            self.native.lead(self._current(), early=early)
        except OSError:
            with suppress(OSError):  # the save tells how its copies ended
                self.native.synchronize()

    @property
    def is_recording(self) -> bool:
        """Whether the current stream records a graph."""
        return self.native.is_recording(self._current())

    def check_current(self, what: str, remedy: str) -> None:
        if self.is_recording:
            raise recording_error(what, remedy)


class CudaStream(OwnStream):
    """A CUDA stream."""

    def __init__(self, name: str) -> None:
        if torch.version.hip is not None:
            # libcuda.so.1 may be there all the same, and would be asked for another maker's GPU.
            raise OSError(errno.ENOSYS, "this torch is built for ROCm")
        self._device = torch.device(name)
        native = _native.cuda_device(ordinal=self._device.index, name=name)
        super().__init__(native, lambda: torch.cuda.current_stream(self._device).cuda_stream)

    def sample(self, rows: Sequence[Memory], seeds: NDArray[np.uint64]) -> NDArray[np.uint8]:
        with torch.cuda.device(self._device), torch.no_grad():
            lines = lines_of(rows, seeds)
            # Pinned both ways: then the CPU does not wait for the work in the stream.
            host = torch.from_numpy(np.concatenate(lines).astype(np.int64)).pin_memory()
            begins = host.to(self._device, non_blocking=True)
            found = torch.empty((len(begins), _native.LINE_BYTES), dtype=torch.uint8, device=self._device)
            at = 0
            for row, own in zip(rows, lines, strict=True):
                reach = slice(at, at + len(own))
                torch.index_select(_as_lines(row), 0, begins[reach], out=found[reach])
                at += len(own)
            host = torch.empty(found.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            return host.copy_(found, non_blocking=True).numpy().reshape(-1)


def _as_lines(row: Memory) -> torch.Tensor:
    """Dense device memory as overlapping lines, one beginning at each byte."""
    assert isinstance(row.owner, torch.UntypedStorage), "device memory is owned by its storage"
    start, shape = row.address - row.owner.data_ptr(), (row_bytes(row) - _native.LINE_BYTES + 1, _native.LINE_BYTES)
    return torch.empty(0, dtype=torch.uint8, device=row.device).set_(row.owner, start, shape, (1, 1))


def lines_of(rows: Sequence[Memory], seeds: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """The offsets of the sampled lines of each row, in bytes from its start."""
    lengths = np.array([row_bytes(row) for row in rows], np.int64)
    counts = -(-lengths // CHUNK_BYTES) * _native.LINES_PER_CHUNK
    return np.split(_native.line_begins(lengths.astype(np.uint64), seeds), np.cumsum(counts)[:-1])
