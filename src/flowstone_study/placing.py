"""Where each tensor is in a process' memory and in the files, and the requests that read or write it.

A process has its tensors in one range of memory (the run). Each tensor has a slot there, which consists of full blocks.
The files contain the same range, divided as the layout says. So one request can span several tensors that are adjacent
in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES
from flowstone_study.mixes import tensor_bytes
from flowstone_study.records import Cell

_RANKS_OF_A_PAIR = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """The range of a tensor in its process' memory. `start_bytes` and `room_bytes` (the length of the range) are
    multiples of the block size.
    """

    start_bytes: int
    room_bytes: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a process' memory (the run) that is stored in one file.

    size_bytes     size of the file, including the parts of other processes
    offset_bytes   start of this part in the file
    start_bytes    start of this part in the run
    """

    file: str
    size_bytes: int
    offset_bytes: int
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests in the order of the run (a process' memory). Each array has one entry for each request.

    file    index into the process' parts
    offset  offset in that file, in bytes
    start   offset in the run, in bytes
    length  length in bytes: a multiple of the block size, and at most the cell's request_bytes
    """

    file: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    start: NDArray[np.uint64]
    length: NDArray[np.uint64]


def slots(cell: Cell) -> tuple[Slot, ...]:
    """The slots (ranges of memory) of one process' tensors, in order, without gaps. They are the same for every
    process.
    """
    result, start = [], 0
    for size in tensor_bytes(cell):
        room_bytes = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        result.append(Slot(start, room_bytes, size))
        start += room_bytes
    return tuple(result)


def run_bytes(cell: Cell) -> int:
    """How many bytes of memory one process needs."""
    return sum(slot.room_bytes for slot in slots(cell))


def payload_bytes(cell: Cell) -> int:
    """The size of all processes' tensors in bytes, without padding. Rates are computed from this size."""
    return sum(slot.tensor_bytes for slot in slots(cell)) * cell.processes


def parts(cell: Cell, rank: int) -> tuple[Part, ...]:
    """The parts of one process' memory and files, in the order of the memory. They cover all of it."""
    run = run_bytes(cell)
    if cell.layout == "tensor":
        return tuple(
            Part(f"rank{rank}-tensor{number:05d}", slot.room_bytes, 0, slot.start_bytes, slot.room_bytes)
            for number, slot in enumerate(slots(cell))
        )
    if cell.layout == "chunk":
        lengths = [min(cell.chunk_bytes, run - start) for start in range(0, run, cell.chunk_bytes)]
        return tuple(
            Part(f"rank{rank}-chunk{number:05d}", length, 0, number * cell.chunk_bytes, length)
            for number, length in enumerate(lengths)
        )
    ranks = {"rank": 1, "pair": _RANKS_OF_A_PAIR, "shared": cell.processes}[cell.layout]
    first = rank - rank % ranks
    sharers = min(ranks, cell.processes - first)
    return (Part(f"{cell.layout}{first}", sharers * run, (rank - first) * run, 0, run),)


def files(cell: Cell) -> tuple[str, ...]:
    """The names of the files of all processes. Each name occurs once."""
    return tuple(dict.fromkeys(part.file for rank in range(cell.processes) for part in parts(cell, rank)))


def requests(cell: Cell, own: Sequence[Part]) -> Requests:
    """Divide a process' memory into requests: at the ends of files, at the ends of tensors (unless coalesced), and
    after every `request_bytes`.
    """
    run = run_bytes(cell)
    ends = {part.start_bytes + part.length_bytes for part in own}
    if not cell.coalesced:
        ends |= {slot.start_bytes + slot.room_bytes for slot in slots(cell)}
    edges = np.array([0, *sorted(ends)])
    first, length = edges[:-1], np.diff(edges)
    count = -(-length // cell.request_bytes)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start = np.repeat(first, count) + within * cell.request_bytes
    starts, offsets = (np.array(column) for column in zip(*((p.start_bytes, p.offset_bytes) for p in own), strict=True))
    file = np.searchsorted(starts, start, side="right") - 1
    return Requests(
        file.astype(np.uint32), (start - starts[file] + offsets[file]).astype(np.uint64), start.astype(np.uint64),
        np.diff(start, append=run).astype(np.uint64),
    )
