"""Find the parts in which two tensors of Flowstone checkpoints differ, by their digests, without reading the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowstone.config import CHUNK_BYTES
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import SourceCheckpoint
from flowstone.table.box import Box
from flowstone.table.stored import SourceTensor, row_major


def unequal_runs(
    sources: tuple[SourceCheckpoint, SourceCheckpoint], a: SourceTensor, b: SourceTensor
) -> list[tuple[int, int]] | None:
    """Returns ascending ranges of elements, numbered in row-major order. Outside of these ranges the tensors are equal.
    Returns None if the digests cannot be compared.

    Digests can be compared if both tensors have the same dtype, and were saved in the same parts.
    """
    pieces = _unequal(sources, a, b)
    return None if pieces is None else _merge_runs([_run_of(a, box, i) for box, _, unequal in pieces for i in unequal])


def unequal_chunks(
    sources: tuple[SourceCheckpoint, SourceCheckpoint], a: SourceTensor, b: SourceTensor
) -> tuple[int, int] | None:
    """Returns (number of chunks whose digests differ, number of all chunks). None if the digests cannot be compared:
    see `unequal_runs`.
    """
    counts = _unequal(sources, a, b)
    if counts is None:
        return None
    return sum(len(chunks) for _, _, chunks in counts), sum(count for _, count, _ in counts)


def _unequal(
    sources: tuple[SourceCheckpoint, SourceCheckpoint], a: SourceTensor, b: SourceTensor
) -> list[tuple[Box, int, list[int]]] | None:
    """For each part in which the tensors were saved: its box (offsets and lengths), its number of chunks, and the
    chunks whose digests differ. None if the digests cannot be compared.
    """
    pieces = [sorted(tensor.pieces, key=lambda piece: piece.box.offset) for tensor in (a, b)]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or [p.box for p in pieces[0]] != [p.box for p in pieces[1]]:
        return None
    if not pieces[0] or sources[0].digests is None or sources[1].digests is None:
        return None
    pieces_found = []
    for piece_a, piece_b in zip(*pieces, strict=True):
        count = -(-piece_a.box.elements * a.dtype.item_bytes // CHUNK_BYTES)
        first = sources[0].digests[piece_a.first_chunk : piece_a.first_chunk + count]
        second = sources[1].digests[piece_b.first_chunk : piece_b.first_chunk + count]
        pieces_found.append((piece_a.box, count, np.flatnonzero(first != second).tolist()))
    return pieces_found


def _run_of(tensor: SourceTensor, box: Box, chunk: int) -> tuple[int, int]:
    """The smallest range of the tensor's elements, in row-major order, that contains chunk number `chunk` of the part
    at `box`.
    """
    elements = CHUNK_BYTES // tensor.dtype.item_bytes
    parts = linear_boxes(box.shape, chunk * elements, min(box.elements, (chunk + 1) * elements))
    last = [offset + length - 1 for offset, length in zip(parts[-1].offset, parts[-1].shape, strict=True)]
    corners = [
        sum((o + inner) * s for o, inner, s in zip(box.offset, corner, row_major(tensor.shape), strict=True))
        for corner in (parts[0].offset, last)
    ]
    return corners[0], corners[1] + 1


def _merge_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap or touch. Returns them in ascending order."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
