"""The read plan: which chunks of which stored pieces fill the boxes that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.errors import CoverageError
from flowstone.format.index import Index
from flowstone.pieces import Box, Piece
from flowstone.plan.boxes import uncovered


@dataclass(frozen=True, slots=True)
class Copy:
    """Part of one stored piece for one wanted piece.

    piece   row in the index
    target  position among the wanted pieces
    common  the region both hold, in elements of the global tensor
    chunks  half-open runs of the stored piece's chunks that hold it, ascending
    """

    piece: int
    target: int
    common: Box
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything to read. `bytes` counts the chunks, once for each copy that wants them."""

    copies: tuple[Copy, ...]
    bytes: int


def plan_reads(index: Index, wanted: Sequence[Piece], rows: Sequence[int]) -> ReadPlan:
    """Find the stored parts that fill each wanted box, each element exactly once.

    wanted  pieces to fill; boxes in elements of the global tensor
    rows    the index row of each one's tensor, which has the same shape
    raises  CoverageError naming the first region that nobody stored
    """
    copies: list[Copy] = []
    total = 0
    for target, (piece, row) in enumerate(zip(wanted, rows, strict=True)):
        found = []
        for stored in index.pieces_of(row):
            box = index.box(stored)
            common = box.intersect(piece.box)
            if common is None:
                continue
            found.append(common)
            chunks = chunk_runs(box.shape, common.within(box), index.dtypes[row].item_bytes)
            copies.append(Copy(stored, target, common, chunks))
            total += _bytes(index, stored, chunks)
        hole = uncovered(piece.box, found)
        if hole is not None:
            raise CoverageError(
                f"cannot load {piece.name!r}: {hole} is in no stored piece",
                wanted=f"box {piece.box} of shape {piece.shape}",
                next="run `flowstone verify` on the checkpoint, or load with a skip or init rule",
            )
    return ReadPlan(tuple(copies), total)


def chunk_runs(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """Half-open runs of chunks that hold `box` of a row-major extent of `shape`, ascending.

    Only chunks in which some wanted element lies: a narrow column of a wide matrix skips
    the chunks between its rows.
    """
    if box.elements == 0:
        return ()
    begin, length = _runs(shape, box)
    first = begin * item_bytes // CHUNK_BYTES
    last = ((begin + length) * item_bytes - 1) // CHUNK_BYTES + 1
    joins = np.flatnonzero(first[1:] > last[:-1])  # a gap of at least one chunk
    starts = first[np.concatenate(([0], joins + 1))]
    stops = last[np.concatenate((joins, [len(last) - 1]))]
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs(shape: Sequence[int], box: Box) -> tuple[NDArray[np.int64], int]:
    """Where the box's contiguous runs begin, in elements and ascending, and their common length."""
    inner, dim = 1, len(shape)
    length = 1
    while dim > 0:  # fold the trailing dimensions that the box covers wholly, and one more
        dim -= 1
        length = inner * box.shape[dim]
        inner *= shape[dim]
        if box.shape[dim] != shape[dim]:
            break
    begin = np.array([box.offset[dim] * (inner // shape[dim] if shape[dim] else 0)] if len(shape) else [0], np.int64)
    stride = inner
    for outer in range(dim - 1, -1, -1):
        steps = (np.arange(box.shape[outer], dtype=np.int64) + box.offset[outer]) * stride
        begin = (steps[:, None] + begin[None, :]).reshape(-1)
        stride *= shape[outer]
    return begin, length


def _bytes(index: Index, piece: int, runs: Sequence[tuple[int, int]]) -> int:
    base = int(index.first_chunk[piece])
    return sum(int(index.stored[base + first : base + last].sum()) for first, last in runs)
