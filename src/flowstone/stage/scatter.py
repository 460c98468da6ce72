"""Scatter: from stored extents, verified chunk by chunk, into the memory that wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowstone import _native
from flowstone.errors import DamagedError, FlowstoneError
from flowstone.format.index import Index
from flowstone.pieces import Box, Memory, Piece
from flowstone.plan.read import Copy, ReadPlan
from flowstone.store.base import ReadReceipt, Store, finish_reading


@dataclass(slots=True)
class _Columns:
    """One row for each run of chunks of each copy."""

    piece: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)
    copy: list[int] = field(default_factory=list)
    layouts: list[_native.ScatterLayout] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scattered:
    """What a read did. `written` are positions of wanted pieces whose memory has changed."""

    receipt: ReadReceipt
    written: tuple[int, ...]
    bad: tuple[tuple[int, int], ...]  # (piece row in the index, chunk of that piece)


def scatter(
    store: Store,
    paths: Sequence[str],
    index: Index,
    plan: ReadPlan,
    wanted: Sequence[Piece],
    memory: Sequence[Memory],
    arena: _native.Arena,
    on_progress: Callable[[int], None] | None = None,
) -> Scattered:
    """Read `plan` into `memory` (parallel to `wanted`, on the host). Blocks.

    paths        in the store, of the segments, by id
    on_progress  is told the bytes done, every POLL_S
    Never raises for bad bytes or a failing store: that is in the result. Ctrl-C cancels and is raised.
    """
    columns = _Columns()
    for number, copy in enumerate(plan.copies):
        _add(columns, number, copy, index, wanted[copy.target], memory[copy.target])
    piece = np.array(columns.piece, np.int64)
    rows = _native.ReadRows(
        file=index.segment[piece], offset=index.offset[piece], length=index.length[piece],
        address=np.array(columns.address, np.uint64), chunk=index.first_chunk[piece].astype(np.uint64),
        first=np.array(columns.first, np.uint64), last=np.array(columns.last, np.uint64),
        layout=np.array(columns.layout, np.int64), layouts=columns.layouts, digests=index.digest,
    )
    receipt = finish_reading(store.read_extents(paths, rows, arena, wanted_bytes=plan.bytes), on_progress)
    targets = {plan.copies[columns.copy[row]].target for row in np.flatnonzero(receipt.touched)}
    return Scattered(receipt, tuple(sorted(targets)), locate_chunks(index, receipt))


def locate_chunks(index: Index, receipt: ReadReceipt) -> tuple[tuple[int, int], ...]:
    """(piece row, chunk within the piece) of each bad chunk of a receipt."""
    pieces = np.searchsorted(index.first_chunk, receipt.bad.astype(np.int64), side="right") - 1
    return tuple((int(p), int(c) - int(index.first_chunk[p])) for p, c in zip(pieces, receipt.bad, strict=True))


def raise_damage(found: Scattered, index: Index, wanted: Sequence[Piece], paths: Sequence[str], what: str) -> None:
    """Raise what a receipt says went wrong, naming every tensor that was written; nothing if nothing did."""
    written = tuple(wanted[position].name for position in found.written)
    changed = f"{len(written)} tensors" + (f": {', '.join(written[:5])}" + " ..." * (len(written) > 5)) * bool(written)
    if found.bad:
        lines = []
        for piece, chunk in found.bad:
            begin = int(index.offset[piece]) + (chunk << 20)
            stop = begin + int(index.stored[int(index.first_chunk[piece]) + chunk])
            name = index.names[int(index.tensor[piece])]
            lines.append(f"{name!r}, chunk {chunk}, bytes {begin}..{stop} of {paths[int(index.segment[piece])]}")
        raise DamagedError(
            f"{what}: stored bytes are not what was written", written=written, damaged="\n".join(lines),
            changed=changed, next="load an older step, or allow it with load(..., fallback=True)",
        )
    error: FlowstoneError | None = found.receipt.error
    if error is not None:
        if written:
            raise DamagedError(
                f"{what}: reading failed part of the way", written=written,
                cause=error.message, range=error.facts.get("range", "unknown"), changed=changed,
                next="load again, or an older step, before saving",
            ) from error
        raise error


def _add(columns: _Columns, number: int, copy: Copy, index: Index, wanted: Piece, memory: Memory) -> None:
    stored = index.box(copy.piece)
    inside = copy.common.within(wanted.box)
    address = memory.address + sum(o * s for o, s in zip(inside.offset, memory.strides_bytes, strict=True))
    layout = -1
    if copy.common != stored or not _dense(copy.common, memory):
        layout = len(columns.layouts)
        part = copy.common.within(stored)
        columns.layouts.append(
            _native.ScatterLayout(
                item_bytes=memory.item_bytes, extent_shape=stored.shape, offset=part.offset, shape=part.shape,
                strides_bytes=memory.strides_bytes,
            )
        )
    for first, last in copy.chunks:
        columns.piece.append(copy.piece)
        columns.address.append(address)
        columns.first.append(first)
        columns.last.append(last)
        columns.layout.append(layout)
        columns.copy.append(number)


def _dense(box: Box, memory: Memory) -> bool:
    """Whether a box of this shape lies in the memory as one run of bytes, row-major."""
    part = Memory(None, 0, box.shape, memory.strides_bytes, memory.item_bytes)
    return part.contiguous
