"""Bounce buffers: memory that bytes are read to first, if they cannot be read straight into their target.

That is the case when values are converted (cast), when a device has no side stream or single elements lie apart in its
memory, and when a load verifies everything before it changes anything. All else is read first; what bounces follows in
rounds, each of which takes at most `BOUNCE_BYTES`, so that a load needs no memory for a second copy of the state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from flowstone import _native
from flowstone.config import BOUNCE_BYTES
from flowstone.errors import BudgetError
from flowstone.format.index import Index
from flowstone.plan.read import ReadPlan, part_of, plan_reads
from flowstone.stage.capture import on_device
from flowstone.stage.device import SideStream, side_stream
from flowstone.stage.scatter import Fill, Scattered, joined
from flowstone.state import tensors
from flowstone.store.mount import available_bytes
from flowstone.table.dtype import DType
from flowstone.table.pieces import Block, Memory, Pieces, Places


class BounceBuffer(msgspec.Struct, frozen=True, eq=False):
    """`buffer` receives a piece's bytes as stored; `copy_back` copies them to their target, converted if necessary.
    """

    buffer: torch.Tensor
    target: Memory
    wanted: DType

    def copy_back(self) -> None:
        values = self.buffer
        if tensors.dtype_of(values) != self.wanted:
            values = values.to(tensors.torch_dtype(self.wanted))
        if self.target.device != "cpu":
            alone = tuple(slice(1) if stride == 0 else slice(None) for stride in self.target.strides_bytes)
            carrier = on_device(self.target)[alone]  # torch refuses to copy into what is expanded
            carrier.copy_(values[alone].view(carrier.dtype))
            return
        source = tensors.memory_of(values.contiguous())
        host_array(self.target)[...] = host_array(source)


class Round(msgspec.Struct, frozen=True, eq=False):
    """A part of a load's plan, and the positions of those pieces in it that are read to bounce buffers."""

    plan: ReadPlan
    bounced: tuple[int, ...] = ()


class Destinations(msgspec.Struct, frozen=True, eq=False):
    """Where the bytes of the requested pieces go to, and in which order.

    wanted, places, stored  parallel: the pieces, their memory, and the dtypes in the checkpoint. Of pieces that bounce
                            and are longer than a round: blocks
    plan     for these pieces
    rounds   parts of the plan: at least one. The first has all that is read straight into its place
    streams  of the devices that bytes are read straight into, by name
    """

    wanted: Pieces
    places: Places
    stored: tuple[DType, ...]
    plan: ReadPlan
    rounds: tuple[Round, ...]
    streams: Mapping[str, SideStream]

    @property
    def bounced(self) -> tuple[int, ...]:
        """The positions of all pieces that bounce."""
        return tuple(at for one in self.rounds for at in one.bounced)

    @property
    def device(self) -> _native.Device | None:
        """The first of those that bytes are read straight into."""
        return next((stream.native for stream in self.streams.values()), None)

    def run(self, index: Index, read: Callable[[int, Fill], Scattered]) -> Scattered:
        """Read all rounds, and copy each one's buffers back once it is verified. Ends at the first that fails.

        read     of round number n: reads what a Fill says
        returns  `written`: positions of pieces whose memory has changed
        """
        devices = {name: stream.native for name, stream in self.streams.items()}
        found: list[Scattered] = []
        for number, one in enumerate(self.rounds):
            places, buffers = self._buffers(one.bounced)
            part = read(number, Fill(index, one.plan, self.wanted, places, devices))
            if part.failed:
                part = replace(part, written=tuple([at for at in part.written if at not in buffers]))
            found.append(part)
            if part.failed:
                break
            for buffer in buffers.values():
                buffer.copy_back()
        return found[0] if len(found) == 1 else joined(found)

    def _buffers(self, bounced: Sequence[int]) -> tuple[Places, Mapping[int, BounceBuffer]]:
        """The places with buffers for these pieces, and the buffers."""
        if not bounced:
            return self.places, {}
        buffers = {}
        for at in bounced:
            piece, dtype = self.wanted[at], self.stored[at]
            target = self.places.memory(at, piece)
            buffer = tensors.empty(dtype, piece.box.shape)
            buffers[at] = BounceBuffer(buffer, target, piece.dtype)
        copies = {at: (one.buffer.data_ptr(), one.buffer) for at, one in buffers.items()}
        return self.places.with_copies(copies), buffers


def choose_destinations(
    index: Index, wanted: Pieces, places: Places, rows: Sequence[int], *, verify_first: bool
) -> Destinations:
    """Plan what is read, and choose where each requested piece is read to.

    rows          the index row of each piece's tensor
    verify_first  all pieces use bounce buffers, at once
    raises        BudgetError if the buffers need more than the available memory; CoverageError
    """
    dtypes = index.tensors.dtypes
    if verify_first:
        needed, available = sum(piece.bytes for piece in wanted), available_bytes()
        if needed > available:
            raise BudgetError(
                f"load(verify_first=True) needs {needed} bytes beside the state", found=f"{available} bytes available",
                next="load with verify_first=False: every chunk is still verified as it is read",
            )
        stored, plan = tuple(map(dtypes.__getitem__, rows)), plan_reads(index, wanted, rows)
        return Destinations(wanted, places, stored, plan, (Round(plan, tuple(range(len(wanted)))),), {})
    streams = {name: side_stream(name) for name in places.devices}
    bounced = _bounced(wanted, places, tuple(map(dtypes.__getitem__, rows)), streams)
    while bounced and (blocks := _blocks(bounced)):
        positions = _repeated(len(wanted), blocks)
        wanted, places = wanted.take(positions, blocks), places.take(positions, blocks)
        rows = [rows[at] for at in positions]
        bounced = _bounced(wanted, places, tuple(map(dtypes.__getitem__, rows)), streams)
    stored, plan = tuple(map(dtypes.__getitem__, rows)), plan_reads(index, wanted, rows)
    return Destinations(
        wanted, places, stored, plan, tuple(_rounds(index, plan, bounced)),
        {name: stream for name, stream in streams.items() if stream is not None},
    )


class _Bounced(msgspec.Struct, frozen=True):
    """A piece that bounces, its elements' length, and the bytes that it needs meanwhile."""

    at: int
    shape: tuple[int, ...]
    item_bytes: int
    bytes: int


def _bounced(
    wanted: Pieces, places: Places, stored: Sequence[DType], streams: Mapping[str, SideStream | None]
) -> list[_Bounced]:
    apart = {at for at, memory in places.apart.items() if memory.device != "cpu" and not _is_reached(memory)}
    for number, name in enumerate(places.devices):
        if streams[name] is None:
            apart.update(np.flatnonzero(places.device == number).tolist())
    if not apart and tuple(stored) == wanted.dtypes:
        return []
    found = []
    for at, (dtype, kind) in enumerate(zip(stored, wanted.dtypes, strict=True)):
        if dtype is kind and at not in apart:
            continue
        piece = wanted[at]
        elements = piece.box.elements
        needed = elements * dtype.item_bytes + (elements * kind.item_bytes if dtype != kind else 0)
        found.append(_Bounced(at, piece.box.shape, kind.item_bytes, needed))
    return found


def _is_reached(memory: Memory) -> bool:
    """Whether a device's own copies reach this memory at their rate: not where single elements lie apart."""
    inner = next((at for at in reversed(range(len(memory.shape))) if memory.shape[at] > 1), None)
    return inner is None or memory.strides_bytes[inner] == memory.item_bytes or memory.contiguous


def _blocks(bounced: Sequence[_Bounced]) -> list[Block]:
    """Those that are longer than a round, divided along one dimension."""
    blocks: list[Block] = []
    further = 0  # pieces than before
    for one in bounced:
        dim = next((dim for dim, length in enumerate(one.shape) if length > 1), None)
        if one.bytes <= BOUNCE_BYTES or dim is None:
            continue
        length, skipped = one.shape[dim], math.prod(one.shape[dim + 1 :]) * one.item_bytes
        step = max(1, length * BOUNCE_BYTES // one.bytes)
        for start in range(0, length, step):
            further += start > 0
            blocks.append(Block(one.at + further, dim, start, min(step, length - start), start * skipped))
    return blocks


def _repeated(count: int, blocks: Sequence[Block]) -> list[int]:
    """The old position of each new one."""
    further = {block.at for block in blocks if block.start > 0}
    positions: list[int] = []
    while len(positions) < count + len(further):
        positions.append((positions[-1] + (len(positions) not in further)) if positions else 0)
    return positions


def _rounds(index: Index, plan: ReadPlan, bounced: Sequence[_Bounced]) -> Iterator[Round]:
    """As many rounds as it takes, so that none needs more than `BOUNCE_BYTES`."""
    groups: list[list[int]] = [[]]
    room = BOUNCE_BYTES
    for one in bounced:
        if one.bytes > room and groups[-1]:
            groups.append([])
            room = BOUNCE_BYTES
        groups[-1].append(one.at)
        room -= one.bytes
    if len(groups) == 1:
        yield Round(plan, tuple(groups[0]))
        return
    number = np.zeros(len(plan.target) and int(plan.target.max()) + 1, np.int64)  # of each piece's round
    for at, group in enumerate(groups):
        number[[one for one in group if one < len(number)]] = at
    for at, group in enumerate(groups):
        rows = np.flatnonzero(number[plan.target] == at)
        yield Round(part_of(plan, index, rows, plan.first[rows], plan.last[rows]), tuple(group))


def fill_with_zeros(memory: Memory) -> None:
    """Set all bytes of host or device memory to zero. The caller keeps the owner alive."""
    if memory.device != "cpu":
        on_device(memory).zero_()
    else:
        host_array(memory)[...] = 0


def fill_with(memory: Memory, content: bytes) -> None:
    """Set host or device memory to these bytes, in row-major order. The caller keeps the owner alive."""
    if not content:
        return
    if memory.device != "cpu":
        carrier = on_device(memory)
        carrier.copy_(torch.frombuffer(bytearray(content), dtype=carrier.dtype).view(carrier.shape))
    else:
        array = host_array(memory)
        array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)


_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def host_array(memory: Memory) -> np.ndarray:
    """Host memory as an array with elements of the same size; the caller keeps the owner alive."""
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True)]
    if 0 in memory.shape:
        return np.empty(memory.shape, _CARRIERS[memory.item_bytes])
    below, above = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    raw = (ctypes.c_char * (above - below + memory.item_bytes)).from_address(memory.address + below)
    return np.ndarray(memory.shape, _CARRIERS[memory.item_bytes], memoryview(raw), -below, memory.strides_bytes)
