"""The read plan: which chunks of which stored pieces fill the requested boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.errors import CoverageError
from flowstone.format.index import Index
from flowstone.plan.coverage import tiles, uncovered
from flowstone.table.box import Box
from flowstone.table.pieces import Piece, Pieces


class ReadPlan(msgspec.Struct, frozen=True, eq=False):
    """Everything to read, as columns: one row for each run of chunks of a stored piece that a requested piece needs.

    piece        row in the index
    target       position among the requested pieces
    first, last  the run, half-open, among the stored piece's chunks
    common       row -> the region that both pieces hold, in elements of the global tensor, unless it is the
                 whole of both
    bytes        stored length of the chunks, counted once per row
    """

    piece: NDArray[np.int64]
    target: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    common: Mapping[int, Box]
    bytes: int


def plan_reads(index: Index, wanted: Sequence[Piece], rows: Sequence[int]) -> ReadPlan:
    """Find the stored parts that fill each requested box, each element exactly once.

    wanted  pieces to fill; boxes in elements of the global tensor
    rows    for each piece, the index row of its tensor, which has the same shape
    raises  CoverageError naming the first region that is in no stored piece
    """
    wanted, tensor = Pieces.of(wanted), np.array(rows, np.int64)
    begin = index.first_piece[tensor]
    alone = index.first_piece[tensor + 1] == begin + 1
    begin[~alone] = 0  # for a tensor without pieces, it could be past the last piece
    same = alone & (index.chunks.length[begin] == index.tensors.lengths[tensor]) if len(index.pieces) else alone
    same[wanted.parts] = False
    target = np.flatnonzero(same)
    piece = begin[target]
    last = index.chunks.first[piece + 1] - index.chunks.first[piece]
    some = last > 0
    columns = [[piece[some], target[some], np.zeros(int(some.sum()), np.int64), last[some]]]
    common: dict[int, Box] = {}
    at = len(columns[0][0])
    cover = _Covers(index, wanted)
    for position in np.flatnonzero(~same).tolist():
        row = int(tensor[position])
        found = cover(position, row)
        columns.append([found.piece + index.first_piece[row], np.full(len(found.piece), position), found.first,
                        found.last])
        common.update(zip(range(at, at + len(found.piece)), found.common, strict=True))
        at += len(found.piece)
    piece, target, first, last = map(np.concatenate, zip(*columns, strict=True))
    return ReadPlan(piece, target, first, last, common, int(index.chunks.stored_bytes(piece, first, last).sum()))


def part_of(
    plan: ReadPlan, index: Index, rows: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> ReadPlan:
    """For the given rows of a plan, repeated as given, only chunks [first, last), which their runs contain."""
    piece = plan.piece[rows]
    common = {at: plan.common[row] for at, row in enumerate(rows.tolist()) if row in plan.common}
    total = int(index.chunks.stored_bytes(piece, first, last).sum())
    return ReadPlan(piece, plan.target[rows], first, last, common, total)


class _Cover(msgspec.Struct, frozen=True, eq=False):
    """The rows of a plan that fill one requested piece. `piece`: number among the pieces of its tensor.

    stored  the boxes of its tensor's pieces
    """

    stored: NDArray[np.int64]
    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    common: Sequence[Box]


class _Covers:
    """Finds the rows for a requested piece. Most tensors of one shape have equal boxes on both sides: computed once."""

    def __init__(self, index: Index, wanted: Pieces) -> None:
        self._index, self._tensors, self._wanted = index, index.tensors, wanted
        self._stored, self._starts = index.pieces.boxes, index.pieces.starts
        numbers, starts = wanted.part_numbers()
        data, ends = numbers.tobytes(), (starts * numbers.itemsize).tolist()
        runs = zip(wanted.parts.tolist(), pairwise(ends), strict=True)
        self._boxes = {at: data[begin:end] for at, (begin, end) in runs}  # of pieces that are not whole
        self._known: dict[tuple[object, ...], list[_Cover]] = {}
        self._runs: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}

    def __call__(self, position: int, row: int) -> _Cover:
        index, tensors = self._index, self._tensors
        shape, item = tensors.shapes[row], tensors.dtypes[row].item_bytes
        begin, stop = index.first_piece[row], index.first_piece[row + 1]
        stored = self._stored[self._starts[begin] : self._starts[stop]]
        known = self._known.setdefault((shape, item, self._boxes.get(position), int(stop - begin)), [])
        for cover in known:
            if np.array_equal(cover.stored, stored):
                return cover
        found = self._cover(self._wanted[position], stored, int(stop - begin), item)
        known.append(found)
        return found

    def _cover(self, wanted: Piece, stored: NDArray[np.int64], count: int, item_bytes: int) -> _Cover:
        """The rows that fill a requested piece. Raises CoverageError if a part is not stored."""
        ndim = len(wanted.shape)
        boxes = stored.reshape(count, 2 * ndim)
        offset, sides = boxes[:, :ndim], boxes[:, ndim:]
        low = np.maximum(offset, wanted.box.offset)
        high = np.minimum(offset + sides, wanted.box.end)
        hit = np.flatnonzero((high > low).all(axis=1))
        low, length = low[hit], (high - low)[hit]
        if not tiles(low - np.array(wanted.box.offset, np.int64), length, wanted.box.shape):
            _check_covered(wanted, low, length)
        regions = list(map(Box, map(tuple, low.tolist()), map(tuple, length.tolist())))
        inside, shapes = (low - offset[hit]).tolist(), list(map(tuple, sides[hit].tolist()))
        runs = [
            self._runs_of(shape, tuple(at), region.shape, item_bytes)
            for shape, at, region in zip(shapes, inside, regions, strict=True)
        ]
        counts = np.array([len(one) for one in runs], np.int64)
        first, last = np.array([run for one in runs for run in one], np.int64).reshape(-1, 2).T
        common = [region for region, one in zip(regions, runs, strict=True) for _ in one]
        return _Cover(stored, np.repeat(hit, counts), first, last, common)

    def _runs_of(
        self, stored: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], item_bytes: int
    ) -> tuple[tuple[int, int], ...]:
        """The runs of chunks that contain a region of a stored box of shape `stored`."""
        key = stored, offset, shape, item_bytes
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = chunk_runs(stored, Box(offset, shape), item_bytes)
        return found


def _check_covered(wanted: Piece, offset: NDArray[np.int64], sides: NDArray[np.int64]) -> None:
    """Raise CoverageError unless these regions, aligned or not, cover the requested box."""
    regions = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
    hole = uncovered(wanted.box, regions)
    if hole is not None:
        raise CoverageError(
            f"cannot load {wanted.name!r}: {hole} is in no stored piece",
            wanted=f"box {wanted.box} of shape {wanted.shape}",
            next="run `flowstone verify` on the checkpoint, or load with a skip or init rule",
        )


def chunk_runs(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """Half-open runs of chunks that contain `box` of a row-major extent of `shape`, ascending.

    Only chunks with requested elements: for a narrow column of a wide matrix, chunks between its rows are skipped.
    """
    if box.elements == 0:
        return ()
    begin, length = _runs(shape, box, item_bytes)
    first = begin * item_bytes // CHUNK_BYTES
    last = ((begin + length) * item_bytes - 1) // CHUNK_BYTES + 1
    joins = np.flatnonzero(first[1:] > last[:-1])  # a gap of at least one chunk
    starts = first[np.concatenate(([0], joins + 1))]
    stops = last[np.concatenate((joins, [len(last) - 1]))]
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[NDArray[np.int64], int]:
    """The begin of each run of the box, in elements and ascending, and the runs' common length.

    Runs that are apart by less than a chunk are one: no chunk lies between them. So a column of single elements is one
    run, however many they are.
    """
    inner, dim = 1, len(shape)
    length = 1
    while dim > 0:  # merge the trailing dimensions that the box covers completely, and one more
        dim -= 1
        length = inner * box.shape[dim]
        inner *= shape[dim]
        if box.shape[dim] != shape[dim]:
            break
    first = box.offset[dim] * (inner // shape[dim] if shape[dim] else 0) if len(shape) else 0
    stride = inner
    while dim > 0 and stride * item_bytes <= CHUNK_BYTES:
        dim -= 1
        first += box.offset[dim] * stride
        length += (box.shape[dim] - 1) * stride
        stride *= shape[dim]
    begin = np.array([first], np.int64)
    for outer in range(dim - 1, -1, -1):
        steps = (np.arange(box.shape[outer], dtype=np.int64) + box.offset[outer]) * stride
        begin = (steps[:, None] + begin[None, :]).reshape(-1)
        stride *= shape[outer]
    return begin, length

