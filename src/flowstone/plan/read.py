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
    """What to read. One row for each run of successive chunks of a stored piece that a requested piece needs.

    piece        row of the stored piece in the index
    target       position of the requested piece among all requested pieces
    first, last  the run: chunks [first, last) of the stored piece
    common       row -> the region that the stored and the requested piece have in common, in elements of the full
                 tensor; rows for which the two pieces are equal are left out
    bytes        stored length of the chunks of all rows; a chunk in several rows counts for each
    """

    piece: NDArray[np.int64]
    target: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    common: Mapping[int, Box]
    bytes: int


def plan_reads(index: Index, pieces: Sequence[Piece], rows: Sequence[int]) -> ReadPlan:
    """Find the stored pieces that fill each requested box, each element exactly once.

    pieces  pieces to fill; boxes in elements of the global tensor
    rows    for each piece, the index row of the tensor that fills it, which has the same shape
    raises  CoverageError for the first region that is in no stored piece
    """
    pieces, tensor = Pieces.of(pieces), np.array(rows, np.int64)
    begin = index.first_piece[tensor]
    alone = index.first_piece[tensor + 1] == begin + 1
    begin[~alone] = 0  # for a tensor without pieces, the index could be past the last piece
    same = alone & (index.chunks.length[begin] == index.tensors.lengths[tensor]) if len(index.pieces) else alone
    same[pieces.parts] = False
    target = np.flatnonzero(same)
    piece = begin[target]
    last = index.chunks.first[piece + 1] - index.chunks.first[piece]
    some = last > 0
    columns = [[piece[some], target[some], np.zeros(int(some.sum()), np.int64), last[some]]]
    common: dict[int, Box] = {}
    plan_row = len(columns[0][0])
    cover = _Covers(index, pieces)
    for position in np.flatnonzero(~same).tolist():
        row = int(tensor[position])
        covered = cover(position, row)
        columns.append([covered.piece + index.first_piece[row], np.full(len(covered.piece), position), covered.first,
                        covered.last])
        common.update(zip(range(plan_row, plan_row + len(covered.piece)), covered.common, strict=True))
        plan_row += len(covered.piece)
    piece, target, first, last = map(np.concatenate, zip(*columns, strict=True))
    return ReadPlan(piece, target, first, last, common, int(index.chunks.stored_bytes(piece, first, last).sum()))


def select_runs(
    plan: ReadPlan, index: Index, rows: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> ReadPlan:
    """Return a new plan with only a part of `plan`.

    rows         the rows of `plan` that the new plan has; a row may occur several times
    first, last  for each of these rows, which chunks of the stored piece to read: [first, last)
    """
    piece = plan.piece[rows]
    common = {i: plan.common[row] for i, row in enumerate(rows.tolist()) if row in plan.common}
    total = int(index.chunks.stored_bytes(piece, first, last).sum())
    return ReadPlan(piece, plan.target[rows], first, last, common, total)


class _Cover(msgspec.Struct, frozen=True, eq=False):
    """The rows of a read plan that fill one requested piece.

    stored  the boxes of all stored pieces of its tensor
    piece   for each row, the number of its stored piece among those of the tensor
    """

    stored: NDArray[np.int64]
    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    common: Sequence[Box]


class _Covers:
    """Finds the rows of a read plan that fill a requested piece. For most tensors of the same shape, stored and
    requested boxes are equal, so their rows are computed once.
    """

    def __init__(self, index: Index, pieces: Pieces) -> None:
        self._index, self._tensors, self._wanted = index, index.tensors, pieces
        self._stored, self._starts = index.pieces.boxes, index.pieces.starts
        numbers, starts = pieces.part_numbers()
        data, ends = numbers.tobytes(), (starts * numbers.itemsize).tolist()
        runs = zip(pieces.parts.tolist(), pairwise(ends), strict=True)
        self._boxes = {position: data[begin:end] for position, (begin, end) in runs}  # only of pieces with a box
        self._known: dict[tuple[object, ...], list[_Cover]] = {}
        self._runs: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}

    def __call__(self, position: int, row: int) -> _Cover:
        index, tensors = self._index, self._tensors
        shape, item = tensors.shapes[row], tensors.dtypes[row].item_bytes
        begin, stop = index.first_piece[row], index.first_piece[row + 1]
        stored = self._stored[self._starts[begin] : self._starts[stop]]
        covers = self._known.setdefault((shape, item, self._boxes.get(position), int(stop - begin)), [])
        for cover in covers:
            if np.array_equal(cover.stored, stored):
                return cover
        covered = self._cover(self._wanted[position], stored, int(stop - begin), item)
        covers.append(covered)
        return covered

    def _cover(self, target: Piece, stored: NDArray[np.int64], count: int, item_bytes: int) -> _Cover:
        """The rows that fill a requested piece. Raises CoverageError if a part is not stored."""
        ndim = len(target.shape)
        boxes = stored.reshape(count, 2 * ndim)
        offset, sides = boxes[:, :ndim], boxes[:, ndim:]
        low = np.maximum(offset, target.box.offset)
        high = np.minimum(offset + sides, target.box.end)
        hit = np.flatnonzero((high > low).all(axis=1))
        low, length = low[hit], (high - low)[hit]
        if not tiles(low - np.array(target.box.offset, np.int64), length, target.box.shape):
            _check_covered(target, low, length)
        regions = list(map(Box, map(tuple, low.tolist()), map(tuple, length.tolist())))
        inside, shapes = (low - offset[hit]).tolist(), list(map(tuple, sides[hit].tolist()))
        runs = [
            self._runs_of(shape, tuple(inner_offset), region.shape, item_bytes)
            for shape, inner_offset, region in zip(shapes, inside, regions, strict=True)
        ]
        counts = np.array([len(piece_runs) for piece_runs in runs], np.int64)
        first, last = np.array([run for piece_runs in runs for run in piece_runs], np.int64).reshape(-1, 2).T
        common = [region for region, piece_runs in zip(regions, runs, strict=True) for _ in piece_runs]
        return _Cover(stored, np.repeat(hit, counts), first, last, common)

    def _runs_of(
        self, stored: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], item_bytes: int
    ) -> tuple[tuple[int, int], ...]:
        """The runs of chunks that contain a region of a stored box of shape `stored`."""
        key = stored, offset, shape, item_bytes
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = chunk_runs(stored, Box(offset, shape), item_bytes)
        return runs


def _check_covered(target: Piece, offset: NDArray[np.int64], sides: NDArray[np.int64]) -> None:
    """Raise CoverageError unless the regions with these offsets and sides cover the requested box."""
    regions = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
    hole = uncovered(target.box, regions)
    if hole is not None:
        raise CoverageError(
            f"cannot load {target.name!r}: the checkpoint does not contain the elements of {hole}",
            wanted=f"box {target.box} of shape {target.shape}",
            next="run `flowstone verify` on the checkpoint, or load with a rule fs.Skip or fs.Init",
        )


def chunk_runs(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """The runs of chunks, as (first, last) with `last` excluded, that contain `box` of a tensor of `shape` that is
    stored row-major. Ascending.

    Only chunks with requested elements are included. For a narrow column of a wide matrix, the chunks that have no
    element of this column are skipped.
    """
    if box.elements == 0:
        return ()
    begin, length = _runs(shape, box, item_bytes)
    first = begin * item_bytes // CHUNK_BYTES
    last = ((begin + length) * item_bytes - 1) // CHUNK_BYTES + 1
    joins = np.flatnonzero(first[1:] > last[:-1])  # where at least one chunk is skipped
    starts = first[np.concatenate(([0], joins + 1))]
    stops = last[np.concatenate((joins, [len(last) - 1]))]
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[NDArray[np.int64], int]:
    """Divide `box` into runs of consecutive stored elements. Returns where each run starts, in elements and ascending,
    and the length that all runs have.

    Runs are merged if less than a chunk lies between them, because no chunk between them could be skipped. So a column
    of a narrow matrix is one run.
    """
    inner, dim = 1, len(shape)
    length = 1
    while dim > 0:  # merge the last dimensions that the box covers completely, and one more dimension
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

