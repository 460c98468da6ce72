"""Bounce buffers: memory for bytes that cannot be read directly into their target.

A piece is read into a bounce buffer, and then copied into its target (it bounces), in these cases: its values are
converted (rule Cast); its device has no side stream (a stream for Flowstone's copies, device.py); its elements are not
adjacent in the device's memory; or the load verifies everything before it changes anything. The first `BOUNCE_BYTES` of
these pieces are read together with all other pieces. The rest follows in rounds of at most `BOUNCE_BYTES`, so that a
load needs no memory for a second copy of the state.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from flowstone._native import Device
from flowstone.config import BOUNCE_BYTES
from flowstone.errors import BudgetError
from flowstone.extensions import extension
from flowstone.format.index import Index
from flowstone.plan.read import ReadPlan, plan_reads, select_runs
from flowstone.stage.device import SideStream, side_stream
from flowstone.stage.scatter import ReadResult, ReadTargets, merge_results
from flowstone.state.framework import FRAMEWORK
from flowstone.store.mount import available_bytes
from flowstone.table.dtype import DType
from flowstone.table.pieces import Block, Memory, Pieces, Places


class BounceBuffer(msgspec.Struct, frozen=True, eq=False):
    """Memory for a piece's stored bytes. `copy_back` copies them from `buffer` into the piece's target, and converts
    them if necessary.
    """

    buffer: Any  # a tensor; a numpy array if torch is not installed
    target: Memory
    dtype: DType

    def copy_back(self) -> None:
        values = FRAMEWORK.converted(self.buffer, self.dtype)
        if self.target.device == "cpu":
            host_array(self.target)[...] = host_array(FRAMEWORK.memory_of(values))
            return
        extension("torch.device_memory").copy_from(self.target, values)


class ReadRound(msgspec.Struct, frozen=True, eq=False):
    """A part of a load's read plan, and the positions of those of its pieces that are read into bounce buffers."""

    plan: ReadPlan
    bounced: tuple[int, ...] = ()


class ReadDestinations(msgspec.Struct, frozen=True, eq=False):
    """The memory into which requested pieces are read, and the order of the reads.

    pieces, places, stored  the pieces; for each piece its memory, and its dtype in the checkpoint. A piece that is read
                            through a bounce buffer, and whose buffer would be longer than `BOUNCE_BYTES`, is divided
                            into blocks, unless the load verifies everything first
    plan     the plan for these pieces
    rounds   parts of the plan, at least one; the first has all pieces that do not bounce
    streams  for each device into which bytes are read directly, its side stream, by the device's name
    """

    pieces: Pieces
    places: Places
    stored: tuple[DType, ...]
    plan: ReadPlan
    rounds: tuple[ReadRound, ...]
    streams: Mapping[str, SideStream]

    @property
    def bounced(self) -> tuple[int, ...]:
        """The positions of all pieces that bounce."""
        return tuple(position for reading in self.rounds for position in reading.bounced)

    @property
    def device(self) -> Device | None:
        """The first device into which bytes are read directly."""
        return next((stream.native for stream in self.streams.values()), None)

    def run(self, index: Index, read: Callable[[int, ReadTargets], ReadResult]) -> ReadResult:
        """Read all rounds. Once a round is verified, its bounce buffers are copied to their targets. Ends at the first
        failure.

        read     a function that reads the round with a given number into ReadTargets
        returns  `written`: positions of pieces whose memory has changed
        """
        devices = {name: stream.native for name, stream in self.streams.items()}
        results: list[ReadResult] = []
        for number, reading in enumerate(self.rounds):
            places, buffers = self._buffers(reading.bounced)
            part = read(number, ReadTargets(index, reading.plan, self.pieces, places, devices))
            if part.failed:
                part = replace(part, written=tuple([position for position in part.written if position not in buffers]))
            results.append(part)
            if part.failed:
                break
            for buffer in buffers.values():
                buffer.copy_back()
        return results[0] if len(results) == 1 else merge_results(results)

    def _buffers(self, bounced: Sequence[int]) -> tuple[Places, Mapping[int, BounceBuffer]]:
        """Allocate buffers for these pieces. Returns the places, with buffers in place of the pieces' memory, and the
        buffers by the pieces' positions.
        """
        if not bounced:
            return self.places, {}
        buffers = {}
        for position in bounced:
            piece, dtype = self.pieces[position], self.stored[position]
            target = self.places.memory(position, piece)
            buffer = FRAMEWORK.empty(dtype, piece.box.shape)
            buffers[position] = BounceBuffer(buffer, target, piece.dtype)
        copies = {
            position: (FRAMEWORK.memory_of(bounce.buffer).address, bounce.buffer)
            for position, bounce in buffers.items()
        }
        return self.places.with_copies(copies), buffers


def choose_destinations(
    index: Index, pieces: Pieces, places: Places, rows: Sequence[int], *, verify_first: bool
) -> ReadDestinations:
    """Plan the read, and choose for each requested piece whether it bounces.

    rows          the index row of each piece's tensor
    verify_first  whether all pieces bounce, in one round
    raises        BudgetError if the buffers need more than the available memory; CoverageError
    """
    dtypes = index.tensors.dtypes
    if verify_first:
        needed, available = sum(piece.bytes for piece in pieces), available_bytes()
        if needed > available:
            raise BudgetError(
                f"load(verify_first=True) needs {needed} bytes of memory besides the state",
                found=f"{available} bytes available",
                next="load with verify_first=False: every chunk is still verified as it is read",
            )
        stored, plan = tuple(map(dtypes.__getitem__, rows)), plan_reads(index, pieces, rows)
        return ReadDestinations(pieces, places, stored, plan, (ReadRound(plan, tuple(range(len(pieces)))),), {})
    streams = {name: side_stream(name) for name in places.devices}
    bounced = _bounced(pieces, places, tuple(map(dtypes.__getitem__, rows)), streams)
    while bounced and (blocks := _blocks(bounced)):
        positions = _repeated(len(pieces), blocks)
        pieces, places = pieces.take(positions, blocks), places.take(positions, blocks)
        rows = [rows[position] for position in positions]
        bounced = _bounced(pieces, places, tuple(map(dtypes.__getitem__, rows)), streams)
    stored, plan = tuple(map(dtypes.__getitem__, rows)), plan_reads(index, pieces, rows)
    return ReadDestinations(
        pieces, places, stored, plan, tuple(_rounds(index, plan, bounced)),
        {name: stream for name, stream in streams.items() if stream is not None},
    )


class _BouncedPiece(msgspec.Struct, frozen=True):
    """A piece that is read into a bounce buffer. `item_bytes`: length of an element; `bytes`: length of the buffer."""

    position: int
    shape: tuple[int, ...]
    item_bytes: int
    bytes: int


def _bounced(
    pieces: Pieces, places: Places, stored: Sequence[DType], streams: Mapping[str, SideStream | None]
) -> list[_BouncedPiece]:
    apart = {row for row, memory in places.strided.items() if memory.device != "cpu" and not _is_reached(memory)}
    for number, name in enumerate(places.devices):
        if streams[name] is None:
            apart.update(np.flatnonzero(places.device == number).tolist())
    if not apart and tuple(stored) == pieces.dtypes:
        return []
    bounced = []
    for position, (dtype, kind) in enumerate(zip(stored, pieces.dtypes, strict=True)):
        if dtype is kind and position not in apart:
            continue
        piece = pieces[position]
        elements = piece.box.elements
        needed = elements * dtype.item_bytes + (elements * kind.item_bytes if dtype != kind else 0)
        bounced.append(_BouncedPiece(position, piece.box.shape, kind.item_bytes, needed))
    return bounced


def _is_reached(memory: Memory) -> bool:
    """Whether a side stream copies into this memory at full rate. False if the memory's elements are not adjacent."""
    inner = next((dim for dim in reversed(range(len(memory.shape))) if memory.shape[dim] > 1), None)
    return inner is None or memory.strides_bytes[inner] == memory.item_bytes or memory.contiguous


def _blocks(bounced: Sequence[_BouncedPiece]) -> list[Block]:
    """Divide each piece whose buffer is longer than `BOUNCE_BYTES` into blocks along one dimension. Returns the blocks.
    """
    blocks: list[Block] = []
    further = 0  # how many pieces the division has added so far
    for piece in bounced:
        dim = next((dim for dim, length in enumerate(piece.shape) if length > 1), None)
        if piece.bytes <= BOUNCE_BYTES or dim is None:
            continue
        length, skipped = piece.shape[dim], math.prod(piece.shape[dim + 1 :]) * piece.item_bytes
        step = max(1, length * BOUNCE_BYTES // piece.bytes)
        for start in range(0, length, step):
            further += start > 0
            blocks.append(Block(piece.position + further, dim, start, min(step, length - start), start * skipped))
    return blocks


def _repeated(count: int, blocks: Sequence[Block]) -> list[int]:
    """For each entry of the list after the division (a block, or an undivided piece): the position of its piece in the
    list before the division.

    count   number of pieces before the division
    blocks  the blocks of the divided pieces, as `_blocks` returns them
    """
    further = {block.position for block in blocks if block.start > 0}
    positions: list[int] = []
    while len(positions) < count + len(further):
        positions.append((positions[-1] + (len(positions) not in further)) if positions else 0)
    return positions


def _rounds(index: Index, plan: ReadPlan, bounced: Sequence[_BouncedPiece]) -> Iterator[ReadRound]:
    """Divide the plan into rounds of at most `BOUNCE_BYTES` of buffers."""
    groups: list[list[int]] = [[]]
    left_bytes = BOUNCE_BYTES
    for piece in bounced:
        if piece.bytes > left_bytes and groups[-1]:
            groups.append([])
            left_bytes = BOUNCE_BYTES
        groups[-1].append(piece.position)
        left_bytes -= piece.bytes
    if len(groups) == 1:
        yield ReadRound(plan, tuple(groups[0]))
        return
    number = np.zeros(len(plan.target) and int(plan.target.max()) + 1, np.int64)  # for each piece, its round
    for turn, group in enumerate(groups):
        number[[position for position in group if position < len(number)]] = turn
    for turn, group in enumerate(groups):
        rows = np.flatnonzero(number[plan.target] == turn)
        yield ReadRound(select_runs(plan, index, rows, plan.first[rows], plan.last[rows]), tuple(group))


def fill_with_zeros(memory: Memory) -> None:
    """Set all bytes of host or device memory to zero. The caller keeps the owner alive."""
    if memory.device != "cpu":
        extension("torch.device_memory").on_device(memory).zero_()
    else:
        host_array(memory)[...] = 0


def fill_with(memory: Memory, content: bytes) -> None:
    """Set host or device memory to these bytes, in row-major order. The caller keeps the owner alive."""
    if not content:
        return
    if memory.device != "cpu":
        extension("torch.device_memory").fill_with(memory, content)
    else:
        array = host_array(memory)
        array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)


_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def host_array(memory: Memory) -> np.ndarray:
    """Host memory as an array, without a copy. The array's dtype has the item size of `memory`, but may be another type
    of number. The caller keeps the owner of the memory alive.
    """
    reach = [(n - 1) * s for n, s in zip(memory.shape, memory.strides_bytes, strict=True)]
    if 0 in memory.shape:
        return np.empty(memory.shape, _CARRIERS[memory.item_bytes])
    below, above = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    raw = (ctypes.c_char * (above - below + memory.item_bytes)).from_address(memory.address + below)
    return np.ndarray(memory.shape, _CARRIERS[memory.item_bytes], memoryview(raw), -below, memory.strides_bytes)
