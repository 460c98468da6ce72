"""A stream of tensors: read ahead of the reader, in the order of the disk, through memory that is used again.

The shape in which inference engines take weights: an iterator of names and tensors. As each window is read whole while
its reader works on the one before, the disk never waits. Memory stays at a few windows as long as the reader lets go of
tensors; what it keeps stays valid, and takes new memory for what follows.
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
from numpy.typing import NDArray

from flowstone.errors import ArgumentError, BudgetError
from flowstone.format.index import Index
from flowstone.plan.read import plan_reads
from flowstone.stage.arena import open_read_arena
from flowstone.stage.fresh import need_torch
from flowstone.stage.scatter import Fill, raise_damage, scatter
from flowstone.store.base import Store
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places

if TYPE_CHECKING:
    import torch

    from flowstone import _native
    from flowstone.regions import Region

_ALIGN = 64  # bytes; of each tensor in its window, as torch aligns its own
_AHEAD = 1  # windows that are read while the reader is at one


class Wanted(msgspec.Struct, frozen=True):
    """A tensor to be read: its name for the reader, its row, the box of it, and the shape that the reader sees."""

    name: str
    row: int
    box: Box
    shape: tuple[int, ...]


class _Lease(np.ndarray):
    """Memory of one window. The ring has it back once no tensor lies in it any more."""


class _Ring:
    """Blocks of memory of one size: each is given out again when what was made of it is gone."""

    def __init__(self, block_bytes: int) -> None:
        self._bytes = block_bytes
        self._free: deque[NDArray[np.uint8]] = deque()

    def lease(self, needed: int) -> _Lease:
        """A block; one of its own for a tensor that is larger. Raises BudgetError."""
        try:
            block = self._free.popleft() if needed <= self._bytes and self._free else self._new(needed)
        except MemoryError as error:
            raise BudgetError(
                f"no memory for a window of {max(needed, self._bytes)} bytes",
                next="let go of the tensors that were streamed, stream with a smaller window_bytes, or only boxes",
            ) from error
        leased = block.view(_Lease)
        if len(block) == self._bytes:
            weakref.finalize(leased, self._free.append, block).atexit = False
        return leased

    def _new(self, needed: int) -> NDArray[np.uint8]:
        memory = np.empty(max(needed, self._bytes) + _ALIGN, np.uint8)
        return memory[-memory.ctypes.data % _ALIGN :][: max(needed, self._bytes)]


class _Window(msgspec.Struct, frozen=True):
    """Tensors that are read together, each at its offset into the window, and the bytes of all."""

    tensors: tuple[Wanted, ...]
    offsets: tuple[int, ...]
    length: int


def in_disk_order(index: Index, wanted: Sequence[Wanted]) -> list[Wanted]:
    """By where the first piece of each lies."""
    def place(one: Wanted) -> tuple[int, int]:
        pieces = index.pieces_of(one.row)
        if not pieces or (index.chunks.stored is not None and not index.chunks.length[pieces.start]):
            return -1, 0
        segment, offset = index.chunks.stored_at(np.array([pieces.start]), np.zeros(1, np.int64))
        return int(segment[0]), int(offset[0])

    return sorted(wanted, key=place)


def _windows(index: Index, wanted: Sequence[Wanted], window_bytes: int) -> Iterator[_Window]:
    tensors: list[Wanted] = []
    offsets: list[int] = []
    end = 0
    for one in wanted:
        length = prod(one.box.shape) * index.tensors.dtypes[one.row].item_bytes
        if tensors and end + length > window_bytes:
            yield _Window(tuple(tensors), tuple(offsets), end)
            tensors, offsets, end = [], [], 0
        tensors.append(one)
        offsets.append(end)
        end += length + -length % _ALIGN
    if tensors:
        yield _Window(tuple(tensors), tuple(offsets), end)


class Streaming(msgspec.Struct, frozen=True, eq=False):
    """What to stream from where; `run` does it."""

    store: Store
    index: Index
    segment_paths: Sequence[str]
    location: str
    wanted: Sequence[Wanted]
    window_bytes: int
    device: str | torch.device

    def run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors. Reads ahead on a thread; ends with it, however the reader ends."""
        windows = _windows(self.index, in_disk_order(self.index, self.wanted), self.window_bytes)
        ring, arena = _Ring(self.window_bytes), open_read_arena(self.store)
        ahead: deque[Future[list[tuple[str, torch.Tensor]]]] = deque()
        with ThreadPoolExecutor(1, "flowstone-stream") as thread:
            try:
                for window in windows:
                    ahead.append(thread.submit(self._read, window, ring, arena))
                    if len(ahead) > _AHEAD:
                        yield from self._given(ahead.popleft())
                while ahead:
                    yield from self._given(ahead.popleft())
            finally:
                thread.shutdown(cancel_futures=True)
                arena.close()

    def _given(self, read: Future[list[tuple[str, torch.Tensor]]]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = read.result()
        tensors.reverse()
        del read  # which holds them, too
        while tensors:
            yield tensors.pop()

    def _read(self, window: _Window, ring: _Ring, arena: _native.Arena) -> list[tuple[str, torch.Tensor]]:
        from flowstone.state import tensors as torch_tensors  # here: what else reads a checkpoint needs no torch

        index, tensors = self.index, window.tensors
        leased = ring.lease(window.length)
        base = leased.ctypes.data
        pieces = Pieces.of([
            Piece(one.name, index.tensors.dtypes[one.row], index.tensors.shapes[one.row], one.box) for one in tensors
        ])
        places = Places.of([
            _memory(leased, base + offset, one.box.shape, index.tensors.dtypes[one.row].item_bytes)
            for one, offset in zip(tensors, window.offsets, strict=True)
        ])
        rows = [one.row for one in tensors]
        fill = Fill(index, plan_reads(index, pieces, rows), pieces, places)
        found = scatter(self.store, self.segment_paths, fill, arena)
        raise_damage(found, index, pieces, self.segment_paths, f"cannot read {len(tensors)} tensors of {self.location}")
        whole = torch_tensors.of_buffer(leased, window.length)
        made = []
        for one, offset in zip(tensors, window.offsets, strict=True):
            dtype = index.tensors.dtypes[one.row]
            length = prod(one.box.shape) * dtype.item_bytes
            own = torch_tensors.viewed(whole[offset : offset + length], dtype, one.shape)
            made.append((one.name, own if str(self.device) == "cpu" else own.to(self.device)))
        return made


def checked(
    names: object, regions: Mapping[str, Region] | None, device: object
) -> tuple[dict[str, Region], torch.device]:
    """The arguments of a stream. Raises ArgumentError."""
    need_torch("a stream of tensors")
    from flowstone.state.tensors import device_of  # as above

    if not isinstance(names, Iterable | None) or isinstance(names, bytes):
        raise ArgumentError(f"names {names!r:.60} are none", next="give a list of names, or a pattern: 'model.*'")
    if not isinstance(regions, Mapping | None):
        raise ArgumentError(f"regions {regions!r:.60} are none", next="give a dict: {name: slice(0, 128)}")
    return dict(regions or {}), device_of(device)


def _memory(owner: object, address: int, shape: tuple[int, ...], item_bytes: int) -> Memory:
    strides = [item_bytes]
    for side in reversed(shape[1:]):
        strides.append(strides[-1] * side)
    return Memory(owner, address, shape, tuple(reversed(strides[: len(shape)])), item_bytes)
