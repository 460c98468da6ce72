"""The place of each tensor, in a process's memory and in the files, and the requests that move it. Pure.

A process has its tensors in one range of memory, each in a slot of whole blocks. Files contain the same range, divided
and placed by the layout, so requests can span tensors wherever the files do.
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
    """A tensor's room in its process's memory; `start_bytes` and `room_bytes` are whole blocks."""

    start_bytes: int
    room_bytes: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a process's memory that is stored in one file.

    size_bytes     of the whole file, other processes' parts included
    offset_bytes   where this part starts in the file
    start_bytes    where it starts in the run
    """

    file: str
    size_bytes: int
    offset_bytes: int
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of equal length, one row for each request, in the order of the run.

    file    index into the process's parts
    offset  in that file, bytes
    start   in the run, bytes
    length  bytes, whole blocks, at most the cell's request_bytes
    """

    file: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    start: NDArray[np.uint64]
    length: NDArray[np.uint64]


def slots(cell: Cell) -> tuple[Slot, ...]:
    """The tensors of one process, in order, without holes; the same for every process."""
    found, start = [], 0
    for size in tensor_bytes(cell):
        room = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        found.append(Slot(start, room, size))
        start += room
    return tuple(found)


def run_bytes(cell: Cell) -> int:
    """Memory that one process needs."""
    return sum(slot.room_bytes for slot in slots(cell))


def payload_bytes(cell: Cell) -> int:
    """The tensors of all processes, without padding: the bytes on which the rate is based."""
    return sum(slot.tensor_bytes for slot in slots(cell)) * cell.processes


def parts(cell: Cell, rank: int) -> tuple[Part, ...]:
    """The files of one process, in the order of its run; they cover the run."""
    run = run_bytes(cell)
    if cell.layout == "tensor":
        return tuple(
            Part(f"rank{rank}-tensor{at:05d}", slot.room_bytes, 0, slot.start_bytes, slot.room_bytes)
            for at, slot in enumerate(slots(cell))
        )
    if cell.layout == "chunk":
        lengths = [min(cell.chunk_bytes, run - start) for start in range(0, run, cell.chunk_bytes)]
        return tuple(
            Part(f"rank{rank}-chunk{at:05d}", length, 0, at * cell.chunk_bytes, length)
            for at, length in enumerate(lengths)
        )
    ranks = {"rank": 1, "pair": _RANKS_OF_A_PAIR, "shared": cell.processes}[cell.layout]
    first = rank - rank % ranks
    sharers = min(ranks, cell.processes - first)
    return (Part(f"{cell.layout}{first}", sharers * run, (rank - first) * run, 0, run),)


def files(cell: Cell) -> tuple[str, ...]:
    """Names of the files of all processes, each once."""
    return tuple(dict.fromkeys(part.file for rank in range(cell.processes) for part in parts(cell, rank)))


def requests(cell: Cell, own: Sequence[Part]) -> Requests:
    """Divide the run at ends of files, at ends of tensors unless coalesced, and then every `request_bytes`."""
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
