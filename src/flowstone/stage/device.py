"""Side streams: copies between a device and the host, concurrent with the device's other work.

The engine queues the copies, from its own threads. This module does the part that needs torch: it orders them
relative to the work in the device's current stream. The CPU never touches device memory: a window with device bytes is
fetched into its arena block, and continues like a copied one when the device calls back (`native/device.h`;
docs/decisions/008). At the fence, the CPU waits until all copies are queued, and the current stream until they are
done. A load does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES
from flowstone.log import log
from flowstone.table.pieces import Memory


class SideStream(Protocol):
    """The side stream of one device. Call it on the thread that saves or loads: it refers to that current stream."""

    @property
    def native(self) -> _native.Device: ...

    def wait_current(self) -> None:
        """Copies queued from now on wait for all work that is in the current stream now."""

    def block_current(self) -> None:
        """Work put into the current stream from now on waits for the copies that are queued now."""

    def sample(self, rows: Sequence[Memory], seeds: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """A few lines of each chunk of dense rows, as the current stream sees them: those at `lines_of`.

        The array is filled before the first copy after a `wait_current`. Each row has at least one line.
        """


def lines_of(rows: Sequence[Memory], seeds: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """The offsets of the sampled lines of each row, in bytes from its start."""
    lengths = np.array([row_bytes(row) for row in rows], np.int64)
    counts = -(-lengths // CHUNK_BYTES) * _native.LINES_PER_CHUNK
    return np.split(_native.line_begins(lengths.astype(np.uint64), seeds), np.cumsum(counts)[:-1])


class CudaStream:
    """A CUDA stream. The driver makes the copies; torch's caching allocator does not know of them, so the code that
    queues them keeps their memory alive until they are done.
    """

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.native = _native.cuda_device(stream=self._stream.cuda_stream, name=name)

    def wait_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def block_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

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


def row_bytes(row: Memory) -> int:
    """Length of dense memory, in bytes."""
    return int(np.prod(row.shape, dtype=np.int64)) * row.item_bytes


def _as_lines(row: Memory) -> torch.Tensor:
    """Dense device memory as overlapping lines, one beginning at each byte."""
    assert isinstance(row.owner, torch.UntypedStorage), "device memory is owned by its storage"
    start, shape = row.address - row.owner.data_ptr(), (row_bytes(row) - _native.LINE_BYTES + 1, _native.LINE_BYTES)
    return torch.empty(0, dtype=torch.uint8, device=row.device).set_(row.owner, start, shape, (1, 1))


def as_on_this_thread(devices: Iterable[str]) -> Callable[[], AbstractContextManager[object]]:
    """Makes a context in which any thread has the current streams of `devices` that this thread has now."""
    kinds = {device for device in devices if device.partition(":")[0] == "cuda"}
    current = [torch.cuda.current_stream(device) for device in sorted(kinds)]

    def context() -> AbstractContextManager[object]:
        stack = ExitStack()
        for stream in current:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return context


OPENERS: Mapping[str, Callable[[str], SideStream]] = MappingProxyType({"cuda": CudaStream})
"""By device type. Memory of other types is copied by torch, through host memory of its own."""


class SideStreams:
    """The side streams of a process, each opened at its first use. Safe from any thread."""

    def __init__(self, openers: Mapping[str, Callable[[str], SideStream]]) -> None:
        self._openers, self._guard = openers, Lock()
        self._open: dict[str, SideStream | None] = {}

    def of(self, device: str) -> SideStream | None:
        """The side stream of a device ("cuda:0"); None if that type has none."""
        with self._guard:
            if device not in self._open:
                self._open[device] = _opened(device, self._openers)
            return self._open[device]


@cache
def _streams() -> SideStreams:
    return SideStreams(OPENERS)


def side_stream(device: str) -> SideStream | None:
    """The side stream of a device ("cuda:0"); None if that type has none."""
    return _streams().of(device)


def _opened(device: str, openers: Mapping[str, Callable[[str], SideStream]]) -> SideStream | None:
    opener = openers.get(device.partition(":")[0])
    if opener is None:
        return None
    try:
        return opener(device)
    except OSError as error:
        log.warning("no side stream on %s (%s): its memory is copied before save returns", device, error)
        return None
