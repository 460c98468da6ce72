"""The write plan: which piece goes into which slot of which segment.

A plan knows sizes, never addresses, so it is made once and reused for every save of the same layout. `data_offsets`
turns slots into offsets, once the memory's addresses are known. The plan also holds everything else that depends on
the layout alone: the order of rows in the files, the text of header entries that never move, and the index except
offsets and digests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES, HEADER_BYTES_MAX, PACKED_BELOW_BYTES, Share
from flowstone.errors import CollisionError
from flowstone.format.segment import (
    CHUNKS_HEADER_BYTES,
    Packed,
    entry_name,
    entry_text,
    pack_entries,
    reserve,
    reserved,
    segment_name,
)
from flowstone.plan.coverage import check_tiling
from flowstone.table.box import Box
from flowstone.table.chunks import first_chunks
from flowstone.table.dtype import DType
from flowstone.table.pieces import Piece, Pieces

_Number = TypeVar("_Number", bound=np.generic)

COPY = 1
"""The derivation of a piece with the same bytes as another one."""


class Writer(NamedTuple):
    """The rank that writes, and what part of its bytes each path of the store gets; no shares: there is one path."""

    rank: int = 0
    shares: tuple[Share, ...] = ()


SOLE = Writer()
_WHOLE = (Share(0, 1.0),)


class SegmentPlan(msgspec.Struct, frozen=True):
    """One file to be written: `pieces` are positions in the plan, in file order, the slotted ones first.

    packed  header entries of the packed pieces
    chunks  it holds chunks of its pieces, those that the base lacks, encoded or not, and has `bytes` at most
            (docs/FORMAT.md, Delta)
    """

    name: str
    header_bytes: int
    bytes: int
    pieces: tuple[int, ...]
    slotted: int  # number of pieces with a slot
    packed: Packed
    chunks: bool = False


class WritePlan(msgspec.Struct, frozen=True, eq=False):
    """Where everything goes. Columns have one entry per piece, in the order of `pieces`.

    text      the piece's header entry, up to its offsets
    segment   position in `segments`
    slot      offset_bytes in the segment's file: of the slot, or of the packed piece itself
    slotted   whether the piece may start up to BLOCK_BYTES - 1 after `slot`
    lazy      whether the piece may be captured after `save` has returned
    rests     whether the base is expected to have most of it
    width     length in bytes of the numbers by which its chunks are encoded; 0: they are not
    block     elements that share a scale where its chunks are quantized; 0: they are not
    derivation  how it may follow from another piece: COPY, or an element of CAST_ELEMENTS; 0: it does not
    follows   position of that piece
    chunk     the number of the piece's first chunk, over the whole plan
    order     rows of all files in file order: number s is the header of segment s, and
              number len(segments) + p is piece p
    """

    pieces: Pieces
    segments: tuple[SegmentPlan, ...]
    text: tuple[str, ...]
    segment: NDArray[np.uint32]
    slot: NDArray[np.uint64]
    length: NDArray[np.uint64]
    slotted: NDArray[np.bool_]
    lazy: NDArray[np.bool_]
    rests: NDArray[np.bool_]
    width: NDArray[np.uint8]
    block: NDArray[np.uint16]
    derivation: NDArray[np.uint8]
    follows: NDArray[np.int64]
    chunk: NDArray[np.uint64]
    chunks: int
    order: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Length of all pieces, without headers and padding."""
        return int(self.length.sum())

    @property
    def lazy_bytes(self) -> int:
        """Length of the pieces that may be captured after `save` has returned."""
        return int(self.length[self.lazy].sum())

    @property
    def apart(self) -> NDArray[np.bool_]:
        """For each piece: whether it is in the segment of chunks."""
        found: NDArray[np.bool_] = self.rests | self.coded | (self.derivation > 0)
        return found

    @property
    def coded(self) -> NDArray[np.bool_]:
        """For each piece: whether its chunks may be encoded."""
        found: NDArray[np.bool_] = (self.width > 0) | (self.block > 0)
        return found

    def source_chunks(self) -> NDArray[np.int64]:
        """For each chunk the number of the first one that it may follow from; of those that follow from none, any."""
        counts = np.diff(first_chunks(self.length))
        within = np.arange(self.chunks) - np.repeat(self.chunk.astype(np.int64), counts)
        found: NDArray[np.int64] = (
            self.of_chunks(self.chunk.astype(np.int64)[self.follows])
            + within * np.where(self.of_chunks(self.derivation) == COPY, 1, 2)
        )
        return found

    def of_chunks(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """A column with one entry per chunk, of one with an entry per piece."""
        return np.repeat(column, np.diff(first_chunks(self.length)))

    @property
    def file_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


class Derived(msgspec.Struct, frozen=True, eq=False):
    """Which pieces may follow from others, parallel to the pieces. Those that others follow from follow from none.

    derivation  COPY, or an element of CAST_ELEMENTS; 0: the piece follows from none
    follows     position of the piece that it follows from
    """

    derivation: NDArray[np.uint8]
    follows: NDArray[np.int64]


class Coded(msgspec.Struct, frozen=True, eq=False):
    """How the chunks of pieces are encoded; each column is parallel to them, and empty if none is encoded so.

    planes  whether by planes, which loses nothing
    block   elements that share a scale where they are quantized; 0: they are not
    derived what need not be stored; None: everything has to be
    """

    planes: Sequence[bool] = ()
    block: Sequence[int] = ()
    derived: Derived | None = None


NOT_CODED = Coded()


def plan_writes(
    pieces: Sequence[Piece], *, lazy: Sequence[bool] = (), writer: Writer = SOLE,
    alone: bool = True, header_bytes_max: int = HEADER_BYTES_MAX, resting: Sequence[bool] = (),
    coded: Coded = NOT_CODED,
) -> WritePlan:
    """Lay out `pieces` in as few segments as headers of `header_bytes_max` allow.

    lazy     parallel to `pieces`: which may be captured late. They are kept apart from the others, so that early
             capture touches few windows. Packed pieces are never lazy. Empty: none
    resting  parallel to `pieces`: of which the base is expected to have most chunks. They have the last segment to
             themselves. Packed pieces never rest. Empty: none
    coded    those that may be encoded are in that segment, too. Packed pieces never are
    writer   names the segments; each path of its shares has segments of its own
    alone    these are all pieces of their tensors; else other ranks write the rest, and assign_writers has checked it
    raises   CoverageError   a tensor's pieces overlap or leave a hole
             CollisionError  two pieces make the same entry or a reserved one, or differ in the tensor's dtype or shape
    """
    pieces = Pieces.of(pieces)
    boxes = dict(pieces.part_boxes())
    check_tensors(pieces, boxes, alone=alone)
    text = _entry_texts(pieces, boxes)
    item = pieces.tensors.item_bytes[pieces.tensor]
    length = pieces.lengths()
    slotted = length >= PACKED_BELOW_BYTES
    late = slotted & np.array(lazy, np.bool_) if len(lazy) else np.zeros(len(pieces), np.bool_)
    rests = slotted & np.array(resting, np.bool_) if len(resting) else np.zeros(len(pieces), np.bool_)
    block = np.where(slotted, np.array(coded.block or [0], np.uint16), 0).astype(np.uint16)
    width = _widths(pieces, slotted & (block == 0) & np.array(coded.planes or [False], np.bool_))
    derivation, follows = _derived(coded.derived, slotted, late, block)
    apart = rests | (width > 0) | (block > 0) | (derivation > 0)
    segment = np.zeros(len(pieces), np.uint32)
    slot = np.zeros(len(pieces), np.uint64)
    segments: list[SegmentPlan] = []
    path = _paths(length, slotted, late, writer.shares)
    for of_path, members, header_bytes in _parts(path, ~apart, writer.shares, text, length, header_bytes_max):
        number = len(segments)
        order, at = _lay_out(members, length, slotted, late, item, header_bytes, slot)
        segment[members] = number
        large, small = np.split(order, [int(slotted[order].sum())])
        packed = pack_entries(
            map(text.__getitem__, small.tolist()), length[small].tolist(), header_bytes=header_bytes,
            begin=int(slot[small[0]]) if len(small) else at,
        )
        name = segment_name(writer.rank, number, of_path)
        segments.append(SegmentPlan(name, header_bytes, _round_up(at), tuple(order.tolist()), len(large), packed))
    for of_path in sorted(set(path[apart].tolist())):
        members, number = np.flatnonzero(apart & (path == of_path)), len(segments)
        order, at = _lay_out(members, length, slotted, late, item, CHUNKS_HEADER_BYTES, slot)
        segment[members] = number
        segments.append(SegmentPlan(
            segment_name(writer.rank, number, of_path), CHUNKS_HEADER_BYTES, _round_up(at), tuple(order.tolist()),
            len(order), Packed("", at, at), chunks=True,
        ))
    chunk = first_chunks(length)
    return WritePlan(
        pieces=pieces, segments=tuple(segments), text=text, segment=segment, slot=slot, length=length,
        slotted=slotted, lazy=late, rests=rests, width=width, block=block, derivation=derivation, follows=follows,
        chunk=chunk[:-1].astype(np.uint64), chunks=int(chunk[-1]), order=_row_order(segments),
    )


def _entry_texts(pieces: Pieces, boxes: Mapping[int, Box]) -> tuple[str, ...]:
    """Each piece's header entry, up to its offsets. `boxes`: of partial pieces."""
    return tuple(
        entry_text(entry_name(name, boxes[at], shape), dtype, boxes[at].shape) if at in boxes
        else entry_text(name, dtype, shape)
        for at, (name, dtype, shape) in enumerate(zip(pieces.names, pieces.dtypes, pieces.shapes, strict=True))
    )


def _derived(
    derived: Derived | None, slotted: NDArray[np.bool_], late: NDArray[np.bool_], block: NDArray[np.uint16]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The columns of what may be derived: not from what is captured later, and nothing that loses precision."""
    if derived is None:
        return np.zeros(len(slotted), np.uint8), np.zeros(len(slotted), np.int64)
    source = derived.follows
    good = slotted & slotted[source] & (late | ~late[source]) & (block == 0) & (block[source] == 0)
    return np.where(good, derived.derivation, 0).astype(np.uint8), source


def _widths(pieces: Pieces, coded: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """For each piece the length of its numbers, in bytes; 0 of those that are not `coded`."""
    numbers = np.array([dtype.number_bytes for dtype in pieces.tensors.dtypes], np.uint8)[pieces.tensor]
    return np.where(coded, numbers, 0).astype(np.uint8)


def data_offsets(plan: WritePlan, phases: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The file offset of each piece's bytes, from each address modulo BLOCK_BYTES.

    A slotted piece starts at the phase of its memory (address modulo BLOCK_BYTES), so that a load can read whole
    blocks of it straight into memory of the same phase (docs/decisions/001).
    """
    return plan.slot + np.where(plan.slotted, phases, 0).astype(np.uint64)


def _row_order(segments: Sequence[SegmentPlan]) -> NDArray[np.int64]:
    runs = [np.array([number, *(len(segments) + p for p in file.pieces)]) for number, file in enumerate(segments)]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _round_up(n: int) -> int:
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES


def _paths(
    length: NDArray[np.uint64], slotted: NDArray[np.bool_], late: NDArray[np.bool_], shares: Sequence[Share]
) -> NDArray[np.int64]:
    """The path of each piece."""
    if not shares:
        return np.zeros(len(length), np.int64)
    from flowstone.plan.spread import spread_pieces  # imported here: most stores have one path

    return spread_pieces(length, slotted, late, shares)


def _parts(
    path: NDArray[np.int64], some: NDArray[np.bool_], shares: Sequence[Share], text: Sequence[str],
    length: NDArray[np.uint64], header_bytes_max: int,
) -> Iterator[tuple[int, NDArray[np.int64], int]]:
    """`_split` for each path that gets `some` pieces, and for the first one."""
    for number, share in enumerate(shares or _WHOLE):
        members = np.flatnonzero(some & (path == share.path))
        if not number or len(members):
            yield from ((share.path, *part) for part in _split(text, length, header_bytes_max, members))


def _split(
    text: Sequence[str], length: NDArray[np.uint64], header_bytes_max: int, among: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], int]]:
    """Runs of pieces whose header fits, each with the room reserved for its header. `among`: the pieces to be split."""
    sizes = [len(text[at].encode()) for at in among.tolist()]
    length = length[among]
    large = (length >= PACKED_BELOW_BYTES).tolist()
    # Upper bound of a file's length, used for the digits of offsets: one file with all pieces, each slot rounded up.
    file_bytes_max = int(length.sum()) + 2 * BLOCK_BYTES * (sum(large) + 1) + HEADER_BYTES_MAX

    def room(text_bytes: int, entries: int, slotted: int) -> int:
        # At most one pad before each slotted piece, one before the packed ones, and one at the end.
        return reserve(text_bytes, entries=entries, pads=slotted + 2, file_bytes_max=file_bytes_max)

    everything = room(sum(sizes), len(among), sum(large))
    if everything <= header_bytes_max:
        return [(among, everything)]
    groups: list[tuple[NDArray[np.int64], int]] = []
    begin = text_bytes = slotted = 0
    for at, size in enumerate(sizes):
        if at > begin and room(text_bytes + size, at - begin + 1, slotted + large[at]) > header_bytes_max:
            groups.append((among[begin:at], room(text_bytes, at - begin, slotted)))
            begin, text_bytes, slotted = at, 0, 0
        text_bytes += size
        slotted += large[at]
    groups.append((among[begin:], room(text_bytes, len(among) - begin, slotted)))
    return groups


def _lay_out(
    members: NDArray[np.int64], length: NDArray[np.uint64], slotted: NDArray[np.bool_], lazy: NDArray[np.bool_],
    item: NDArray[np.int64], at: int, slot: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], int]:
    """Fill `slot` for one segment from offset `at`. Returns the order in the file, and the file's end."""
    large, small = members[slotted[members]], members[~slotted[members]]
    large = np.concatenate([large[lazy[large]], large[~lazy[large]]])  # early ones next to the small ones
    small = small[np.argsort(-item[small], kind="stable")]  # in state order for types of equal size
    order = np.concatenate([large, small])
    rooms = np.concatenate([(length[large] + 2 * BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES, length[small]])
    ends = at + np.cumsum(rooms.astype(np.int64))
    slot[order] = ends - rooms.astype(np.int64)
    return order, int(ends[-1]) if len(ends) else at


def check_tensors(pieces: Pieces, boxes: Mapping[int, Box], *, alone: bool) -> None:
    """Check: one dtype and shape per name, every element covered once, entry names distinct. `boxes`: of partial
    pieces.
    """
    split = {pieces.names[at] for at in boxes}
    if len(set(pieces.names)) < len(pieces):
        split |= {name for name, count in Counter(pieces.names).items() if count > 1}
    entries = {name for name in pieces.names if name not in split} if split else set(pieces.names)
    entries |= _check_split(pieces, boxes, split, entries, alone=alone)
    for entry in entries:
        if reserved(entry):
            raise CollisionError(f"the entry name {entry!r} is reserved in a segment", next="rename that tensor")


def _check_split(
    pieces: Pieces, boxes: Mapping[int, Box], split: set[str], entries: set[str], *, alone: bool
) -> set[str]:
    """Check tensors in several boxes, or in a partial one. Returns the entries of their boxes, none of them in
    `entries`.
    """
    held: dict[str, list[Box]] = defaultdict(list)
    first: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for at in [at for at, name in enumerate(pieces.names) if name in split] if split else []:
        name, dtype, shape = pieces.names[at], pieces.dtypes[at], tuple(pieces.shapes[at])
        known = first.setdefault(name, (dtype, shape))
        if known != (dtype, shape):
            raise CollisionError(
                f"two shards of {name!r} describe different tensors", expected=f"{known[0].name} {known[1]}",
                found=f"{dtype.name} {shape}", next="give every shard of a tensor the same dtype and global shape",
            )
        held[name].append(boxes.get(at) or Box.whole(shape))
    found: set[str] = set()
    for name, parts in held.items():
        shape = first[name][1]
        if alone:
            check_tiling(name, shape, parts)
        for box in parts:
            entry = entry_name(name, box, shape)
            if entry in entries or entry in found:
                raise CollisionError(f"two tensors have the same segment entry {entry!r}", next="rename one of them")
            found.add(entry)
    return found
