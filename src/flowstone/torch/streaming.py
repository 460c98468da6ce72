"""A stream of tensors: an iterator of names and tensors in the order on disk, for inference engines that load weights.

Tensors are read in groups of limited size, called windows. Each window is read while the consumer works on the
previous one, so the disk never waits. The memory of a window is reused once the consumer has dropped its tensors, so a
few windows of memory suffice. Tensors that the consumer keeps stay valid; later windows then get new memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.errors import ArgumentError, BudgetError
from flowstone.format.index import Index
from flowstone.plan.read import plan_reads
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import ReadTargets, raise_damage, scatter
from flowstone.store.base import Store
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places
from flowstone.torch.tensors import device_of, of_buffer, view_as

if TYPE_CHECKING:
    from flowstone._native import Arena
    from flowstone.reading.regions import Region

_ALIGN = 64  # alignment of each tensor in its window, in bytes; torch aligns tensors in the same way
_AHEAD = 1  # how many windows are read ahead


class StreamedTensor(msgspec.Struct, frozen=True):
    """A tensor to be read: its name, its index row, the box to read, and the shape that the consumer gets."""

    name: str
    row: int
    box: Box
    shape: tuple[int, ...]


class _WindowMemory(np.ndarray):
    """The memory of one window. It is reused once no tensor uses it."""


class _Ring:
    """Blocks of memory of one size; a block is reused once its tensors are gone."""

    def __init__(self, block_bytes: int) -> None:
        self._bytes = block_bytes
        self._free: deque[NDArray[np.uint8]] = deque()

    def lease(self, needed: int) -> _WindowMemory:
        """A free block of memory. For a tensor of more than a block's size, a separate block of `needed` bytes. Raises
        BudgetError if there is not enough memory.
        """
        try:
            block = self._free.popleft() if needed <= self._bytes and self._free else self._new(needed)
        except MemoryError as error:
            raise BudgetError(
                f"not enough memory for a buffer of {max(needed, self._bytes)} bytes to stream tensors through",
                next="delete tensors that were streamed, use a smaller window_bytes, or stream only regions",
            ) from error
        leased = block.view(_WindowMemory)
        if len(block) == self._bytes:
            weakref.finalize(leased, self._free.append, block).atexit = False
        return leased

    def _new(self, needed: int) -> NDArray[np.uint8]:
        memory = np.empty(max(needed, self._bytes) + _ALIGN, np.uint8)
        return memory[-memory.ctypes.data % _ALIGN :][: max(needed, self._bytes)]


class _Window(msgspec.Struct, frozen=True):
    """Tensors that are read together, their offsets in the window, and its length in bytes."""

    tensors: tuple[StreamedTensor, ...]
    offsets: tuple[int, ...]
    length: int


def in_disk_order(index: Index, tensors: Sequence[StreamedTensor]) -> list[StreamedTensor]:
    """`tensors`, sorted by the position of each tensor's first piece on disk."""
    def position(tensor: StreamedTensor) -> tuple[int, int]:
        pieces = index.pieces_of(tensor.row)
        if not pieces or (index.chunks.stored is not None and not index.chunks.length[pieces.start]):
            return -1, 0
        segment, offset = index.chunks.stored_locations(np.array([pieces.start]), np.zeros(1, np.int64))
        return int(segment[0]), int(offset[0])

    return sorted(tensors, key=position)


def _windows(index: Index, requested: Sequence[StreamedTensor], window_bytes: int) -> Iterator[_Window]:
    tensors: list[StreamedTensor] = []
    offsets: list[int] = []
    end = 0
    for tensor in requested:
        length = prod(tensor.box.shape) * index.tensors.dtypes[tensor.row].item_bytes
        if tensors and end + length > window_bytes:
            yield _Window(tuple(tensors), tuple(offsets), end)
            tensors, offsets, end = [], [], 0
        tensors.append(tensor)
        offsets.append(end)
        end += length + -length % _ALIGN
    if tensors:
        yield _Window(tuple(tensors), tuple(offsets), end)


class TensorStream(msgspec.Struct, frozen=True, eq=False):
    """A stream's tensors, their checkpoint, and the device to which `run` reads them."""

    store: Store
    index: Index
    segment_paths: Sequence[str]
    location: str
    tensors: Sequence[StreamedTensor]
    window_bytes: int
    device: str | torch.device

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors. A thread reads the next ones meanwhile; it ends when the iterator ends."""
        windows = _windows(self.index, in_disk_order(self.index, self.tensors), self.window_bytes)
        ring, arena = _Ring(self.window_bytes), open_read_arena(self.store)
        ahead: deque[Future[list[tuple[str, torch.Tensor]]]] = deque()
        with ThreadPoolExecutor(1, "flowstone-stream") as thread:
            try:
                for window in windows:
                    ahead.append(thread.submit(self._read, window, ring, arena))
                    if len(ahead) > _AHEAD:
                        yield from self._hand_out(ahead.popleft())
                while ahead:
                    yield from self._hand_out(ahead.popleft())
            finally:
                thread.shutdown(cancel_futures=True)
                arena.close()

    def _hand_out(self, read: Future[list[tuple[str, torch.Tensor]]]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = read.result()
        tensors.reverse()
        del read  # this variable would keep the tensors alive, too
        while tensors:
            yield tensors.pop()

    def _read(self, window: _Window, ring: _Ring, arena: Arena) -> list[tuple[str, torch.Tensor]]:
        index, tensors = self.index, window.tensors
        leased = ring.lease(window.length)
        base = leased.ctypes.data
        pieces = Pieces.of([
            Piece(tensor.name, index.tensors.dtypes[tensor.row], index.tensors.shapes[tensor.row], tensor.box)
            for tensor in tensors
        ])
        places = Places.of([
            _memory(leased, base + offset, tensor.box.shape, index.tensors.dtypes[tensor.row].item_bytes)
            for tensor, offset in zip(tensors, window.offsets, strict=True)
        ])
        rows = [tensor.row for tensor in tensors]
        fill = ReadTargets(index, plan_reads(index, pieces, rows), pieces, places)
        outcome = scatter(self.store, self.segment_paths, fill, arena)
        failure = f"cannot read {len(tensors)} tensors of {self.location}"
        raise_damage(outcome, index, pieces, self.segment_paths, failure)
        whole = of_buffer(leased, window.length)
        results = []
        for tensor, offset in zip(tensors, window.offsets, strict=True):
            dtype = index.tensors.dtypes[tensor.row]
            length = prod(tensor.box.shape) * dtype.item_bytes
            own = view_as(whole[offset : offset + length], dtype, tensor.shape)
            results.append((tensor.name, own if str(self.device) == "cpu" else own.to(self.device)))
        return results


def check_arguments(
    names: object, regions: Mapping[str, Region] | None, device: object
) -> tuple[dict[str, Region], torch.device]:
    """Check the arguments of a stream. Returns the regions and the device. Raises ArgumentError."""
    if not isinstance(names, Iterable | None) or isinstance(names, bytes):
        raise ArgumentError(f"names must be a list or a pattern, not {names!r:.60}", next="write names='model.*'")
    if not isinstance(regions, Mapping | None):
        raise ArgumentError(
            f"regions must be a dict, not {regions!r:.60}", next="write regions={'model.weight': slice(0, 128)}"
        )
    return dict(regions or {}), device_of(device)


def _memory(owner: object, address: int, shape: tuple[int, ...], item_bytes: int) -> Memory:
    strides = [item_bytes]
    for side in reversed(shape[1:]):
        strides.append(strides[-1] * side)
    return Memory(owner, address, shape, tuple(reversed(strides[: len(shape)])), item_bytes)
