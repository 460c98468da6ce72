"""What two tensors of checkpoints of ours have that is not equal, as far as digests tell: without reading data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowstone.config import CHUNK_BYTES
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import Source
from flowstone.table.box import Box
from flowstone.table.stored import SourceTensor, row_major


def unequal_runs(
    sources: tuple[Source, Source], a: SourceTensor, b: SourceTensor
) -> list[tuple[int, int]] | None:
    """Ascending runs of elements, in row-major order, outside of which both tensors are equal; None: nothing is known.

    Both are known chunk by chunk if they have one dtype, and were saved in the same pieces.
    """
    found = _unequal(sources, a, b)
    return None if found is None else _joined([_run_of(a, box, at) for box, _, unequal in found for at in unequal])


def unequal_chunks(
    sources: tuple[Source, Source], a: SourceTensor, b: SourceTensor
) -> tuple[int, int] | None:
    """How many chunks have other digests, of how many; None: nothing is known, as in `unequal_runs`."""
    found = _unequal(sources, a, b)
    return None if found is None else (sum(len(one) for _, _, one in found), sum(count for _, count, _ in found))


def _unequal(
    sources: tuple[Source, Source], a: SourceTensor, b: SourceTensor
) -> list[tuple[Box, int, list[int]]] | None:
    """For each piece its box, how many chunks it has, and which of these have other digests. None: nothing is known."""
    pieces = [sorted(one.pieces, key=lambda piece: piece.box.offset) for one in (a, b)]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or [p.box for p in pieces[0]] != [p.box for p in pieces[1]]:
        return None
    if not pieces[0] or sources[0].digests is None or sources[1].digests is None:
        return None
    found = []
    for one, other in zip(*pieces, strict=True):
        count = -(-one.box.elements * a.dtype.item_bytes // CHUNK_BYTES)
        first = sources[0].digests[one.first_chunk : one.first_chunk + count]
        second = sources[1].digests[other.first_chunk : other.first_chunk + count]
        found.append((one.box, count, np.flatnonzero(first != second).tolist()))
    return found


def _run_of(tensor: SourceTensor, box: Box, chunk: int) -> tuple[int, int]:
    """The least run of the tensor's elements that has a chunk of a piece in it."""
    elements = CHUNK_BYTES // tensor.dtype.item_bytes
    parts = linear_boxes(box.shape, chunk * elements, min(box.elements, (chunk + 1) * elements))
    last = [offset + length - 1 for offset, length in zip(parts[-1].offset, parts[-1].shape, strict=True)]
    corners = [
        sum((o + inner) * s for o, inner, s in zip(box.offset, corner, row_major(tensor.shape), strict=True))
        for corner in (parts[0].offset, last)
    ]
    return corners[0], corners[1] + 1


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same elements, each once."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
