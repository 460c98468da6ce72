"""The write plan: which piece goes into which slot of which segment.

A plan knows sizes, never addresses, so it is made once and reused for every save of the
same layout. `place` then turns slots into offsets, once the memory's addresses are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, HEADER_BYTES_MAX, PACKED_BELOW_BYTES
from flowstone.errors import CollisionError
from flowstone.format.index import Index
from flowstone.format.segment import entry_name, entry_text, reserve, reserved
from flowstone.pieces import Alias, Box, Piece
from flowstone.plan.boxes import check_tiling


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One file to be written: `pieces` are positions in the plan, in file order."""

    name: str
    header_bytes: int
    bytes: int
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """Where everything goes. Columns have one entry per piece, in the order of `pieces`.

    text      the piece's header entry, up to its offsets
    segment   position in `segments`
    slot      offset_bytes in the segment's file: of the slot, or of the packed piece itself
    slotted   whether the piece may start up to BLOCK_BYTES - 1 behind `slot`
    chunk     the number of the piece's first chunk, over the whole plan
    """

    pieces: tuple[Piece, ...]
    segments: tuple[SegmentPlan, ...]
    text: tuple[str, ...]
    segment: NDArray[np.uint32]
    slot: NDArray[np.uint64]
    length: NDArray[np.uint64]
    slotted: NDArray[np.bool_]
    chunk: NDArray[np.uint64]
    chunks: int

    @property
    def bytes(self) -> int:
        """Of all pieces, without headers and padding."""
        return int(self.length.sum())

    @property
    def file_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


def plan_writes(
    pieces: Sequence[Piece], *, rank: int = 0, header_bytes_max: int = HEADER_BYTES_MAX
) -> WritePlan:
    """Lay out `pieces` in as few segments as headers of `header_bytes_max` allow.

    raises  CoverageError   a tensor's pieces overlap or leave a hole
            CollisionError  two pieces make one entry or a reserved one, or differ in the tensor's dtype or shape
    """
    _check_tensors(pieces)
    text = tuple(entry_text(entry_name(p.name, p.box, p.shape), p.dtype, p.box.shape) for p in pieces)
    length = np.array([piece.bytes for piece in pieces], np.uint64)
    slotted = length >= PACKED_BELOW_BYTES
    groups = _split(text, header_bytes_max)
    segment = np.zeros(len(pieces), np.uint32)
    slot = np.zeros(len(pieces), np.uint64)
    segments = []
    for number, (members, header_bytes) in enumerate(groups):
        order, at = _lay_out(pieces, members, slotted, header_bytes, slot)
        segment[members] = number
        name = f"rank-{rank:05d}" + (f".{number:04d}" if number else "") + ".safetensors"
        segments.append(SegmentPlan(name, header_bytes, _round_up(at), tuple(order)))
    counts = (length + CHUNK_BYTES - 1) // CHUNK_BYTES  # unsigned: the -(-a // b) idiom would wrap
    chunk = np.zeros(len(pieces) + 1, np.uint64)
    np.cumsum(counts, out=chunk[1:])
    return WritePlan(
        pieces=tuple(pieces), segments=tuple(segments), text=text, segment=segment, slot=slot, length=length,
        slotted=slotted, chunk=chunk[:-1], chunks=int(chunk[-1]),
    )


def place(plan: WritePlan, phases: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The file offset of each piece's bytes, given each address modulo BLOCK_BYTES.

    A slotted piece starts at the phase of its memory, so that whole blocks of it can be
    written from where they lie, whether or not they are in the end.
    """
    return plan.slot + np.where(plan.slotted, phases, 0).astype(np.uint64)


def index_of(
    plan: WritePlan, offsets: NDArray[np.uint64], digests: NDArray[np.uint64], aliases: Sequence[Alias]
) -> Index:
    """The index of what was written: the plan's pieces at `offsets`, with `digests` in plan order."""
    rows: dict[str, int] = {}
    for piece in plan.pieces:
        rows.setdefault(piece.name, len(rows))
    first = {piece.name: piece for piece in reversed(plan.pieces)}
    tensor = np.array([rows[piece.name] for piece in plan.pieces], np.int64)
    order = np.argsort(tensor, kind="stable")
    boxes = [n for p in order for n in (*plan.pieces[p].box.offset, *plan.pieces[p].box.shape)]
    counts = ((plan.length + CHUNK_BYTES - 1) // CHUNK_BYTES).astype(np.int64)
    runs = [np.arange(int(plan.chunk[p]), int(plan.chunk[p]) + counts[p]) for p in order]
    chunk_order = np.concatenate([np.zeros(0, np.int64), *runs])
    stored = np.full(plan.chunks, CHUNK_BYTES, np.uint32)
    some = plan.length > 0
    stored[(plan.chunk[some] + counts[some].astype(np.uint64) - 1).astype(np.int64)] = (
        (plan.length[some] - 1) % CHUNK_BYTES + 1
    ).astype(np.uint32)
    return Index(
        names=tuple(rows), dtypes=tuple(first[name].dtype for name in rows),
        shapes=tuple(first[name].shape for name in rows),
        aliases=tuple((alias.name, rows[alias.target]) for alias in aliases),
        tensor=tensor[order], boxes=np.array(boxes, np.uint64), segment=plan.segment[order],
        offset=offsets[order], length=plan.length[order], digest=digests[chunk_order], stored=stored[chunk_order],
        codec=np.zeros(plan.chunks, np.uint8),
    )


def _round_up(n: int) -> int:
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES


def _split(text: Sequence[str], header_bytes_max: int) -> list[tuple[list[int], int]]:
    """Runs of pieces whose header fits, each with the room that its header needs."""
    groups: list[tuple[list[int], int]] = []
    members: list[int] = []
    text_bytes = 0
    for position, entry in enumerate(text):
        size = len(entry.encode())
        # At most one pad in front of each piece, and one at the end.
        if members and reserve(text_bytes + size, entries=len(members) + 1, pads=len(members) + 2) > header_bytes_max:
            groups.append((members, reserve(text_bytes, entries=len(members), pads=len(members) + 1)))
            members, text_bytes = [], 0
        members.append(position)
        text_bytes += size
    groups.append((members, reserve(text_bytes, entries=len(members), pads=len(members) + 1)))
    return groups


def _lay_out(
    pieces: Sequence[Piece], members: Sequence[int], slotted: NDArray[np.bool_], at: int, slot: NDArray[np.uint64]
) -> tuple[list[int], int]:
    """Fill `slot` for one segment from offset `at`; the order in the file, and its end."""
    large = [position for position in members if slotted[position]]
    small = [position for position in members if not slotted[position]]
    small.sort(key=lambda position: -pieces[position].dtype.item_bytes)  # stable: state order within a type
    for position in large:
        slot[position] = at
        at += _round_up(pieces[position].bytes + BLOCK_BYTES)
    for position in small:
        slot[position] = at
        at += pieces[position].bytes
    return large + small, at


def _check_tensors(pieces: Sequence[Piece]) -> None:
    """One dtype and shape for each name, every element held once, every entry name its own."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    first: dict[str, Piece] = {}
    for piece in pieces:
        known = first.setdefault(piece.name, piece)
        if (known.dtype, known.shape) != (piece.dtype, piece.shape):
            raise CollisionError(
                f"two shards of {piece.name!r} describe different tensors",
                expected=f"{known.dtype.name} {known.shape}", found=f"{piece.dtype.name} {piece.shape}",
                next="give every shard of a tensor the same dtype and global shape",
            )
        boxes[piece.name].append(piece.box)
    entries: set[str] = set()
    for name, parts in boxes.items():
        shape = first[name].shape
        if len(parts) > 1 or parts[0] != Box.whole(shape):
            check_tiling(name, shape, parts)
        for box in parts:
            entry = entry_name(name, box, shape)
            if reserved(entry):
                raise CollisionError(f"a segment keeps the entry {entry!r} for itself", next="rename that tensor")
            if entry in entries:
                raise CollisionError(f"two tensors make the segment entry {entry!r}", next="rename one of them")
            entries.add(entry)
