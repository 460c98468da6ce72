"""The write plan: in which segment file each piece is stored, and where. A large piece gets a slot: a range of the file
that is longer than the piece by a block, so that the piece can begin at any offset modulo the block length.

A plan contains sizes but no addresses, so it is made once and reused for every save of the same layout. Once the
memory's addresses are known, `data_offsets` computes where in its slot each piece begins. The plan also contains
everything else that depends only on the layout: the order of pieces in the files, the text of header entries with fixed
offsets, and the index except offsets and digests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import BLOCK_BYTES, HEADER_BYTES_MAX, PACKED_BELOW_BYTES, PathShare
from flowstone.errors import CollisionError
from flowstone.format.segment import (
    CHUNKS_HEADER_BYTES,
    PackedEntries,
    entry_name,
    entry_text,
    header_bytes_needed,
    is_reserved,
    pack_entries,
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
    """The rank that writes, and which share of its bytes each path of the store gets; no shares: the store has one
    path.
    """

    rank: int = 0
    shares: tuple[PathShare, ...] = ()


SOLE_WRITER = Writer()
_WHOLE = (PathShare(0, 1.0),)


class SegmentPlan(msgspec.Struct, frozen=True):
    """One segment file to be written. `pieces`: positions in the plan, in the order of the file, those with slots
    first.

    packed  the text of the header entries of the pieces without slots, which are small and stored without gaps
    chunks  whether the file contains only those chunks of its pieces that no earlier checkpoint has, encoded or raw.
            It then has at most `bytes` bytes (docs/FORMAT.md, Delta)
    """

    name: str
    header_bytes: int
    bytes: int
    pieces: tuple[int, ...]
    slotted: int  # number of pieces with a slot
    packed: PackedEntries
    chunks: bool = False


class WritePlan(msgspec.Struct, frozen=True, eq=False):
    """Where the pieces of a save are stored in all its files. The attributes from `text` to `chunk` are arrays with one
    entry for each piece, in the order of `pieces`.

    text      the piece's header entry, up to its offsets
    segment   number of the piece's file in `segments`
    slot      offset in that file, in bytes: of the piece's slot, or, if it has none, of the piece
    slotted   whether the piece has a slot, and so may start up to BLOCK_BYTES - 1 bytes after `slot`
    lazy      whether the piece may be captured after `save` has returned
    unchanged  whether the earlier checkpoint to which this save may refer probably has most of the piece's chunks
    width     length in bytes of one number, for encoding by byte planes; 0: the piece is not encoded in this way
    block     number of elements with a common scale if the piece is quantized; 0: it is not
    derivation  how the piece may be computed from another piece: COPY, or an element of CAST_ELEMENTS; 0: it is stored
    follows   position of that other piece
    chunk     the number of the piece's first chunk in the plan
    order     headers and pieces of all files, in the order in which they are stored: number s is the header of segment
              s, and number len(segments) + p is piece p
    """

    pieces: Pieces
    segments: tuple[SegmentPlan, ...]
    text: tuple[str, ...]
    segment: NDArray[np.uint32]
    slot: NDArray[np.uint64]
    length: NDArray[np.uint64]
    slotted: NDArray[np.bool_]
    lazy: NDArray[np.bool_]
    unchanged: NDArray[np.bool_]
    width: NDArray[np.uint8]
    block: NDArray[np.uint16]
    derivation: NDArray[np.uint8]
    follows: NDArray[np.int64]
    chunk: NDArray[np.uint64]
    chunks: int
    order: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Length of all pieces in bytes, without headers and padding."""
        return int(self.length.sum())

    @property
    def lazy_bytes(self) -> int:
        """Length in bytes of the pieces that may be captured after `save` has returned."""
        return int(self.length[self.lazy].sum())

    @property
    def in_chunk_segment(self) -> NDArray[np.bool_]:
        """For each piece, whether it is in a segment file that lists chunks, not tensors."""
        is_apart: NDArray[np.bool_] = self.unchanged | self.is_encoded | (self.derivation > 0)
        return is_apart

    @property
    def is_encoded(self) -> NDArray[np.bool_]:
        """For each piece: whether its chunks may be encoded."""
        is_coded: NDArray[np.bool_] = (self.width > 0) | (self.block > 0)
        return is_coded

    def source_chunks(self) -> NDArray[np.int64]:
        """For each chunk the number of the first chunk from which it may be derived; arbitrary if there is none."""
        counts = np.diff(first_chunks(self.length))
        within = np.arange(self.chunks) - np.repeat(self.chunk.astype(np.int64), counts)
        sources: NDArray[np.int64] = (
            self.per_chunk(self.chunk.astype(np.int64)[self.follows])
            + within * np.where(self.per_chunk(self.derivation) == COPY, 1, 2)
        )
        return sources

    def per_chunk(self, column: NDArray[_Number]) -> NDArray[_Number]:
        """Expand a column with one entry per piece to one entry per chunk."""
        return np.repeat(column, np.diff(first_chunks(self.length)))

    @property
    def file_bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


class Derivations(msgspec.Struct, frozen=True, eq=False):
    """Which pieces may be computed from other pieces, their sources; arrays with one entry for each piece. Sources are
    always stored.

    derivation  how the piece is computed: COPY, or an element of CAST_ELEMENTS; 0: the piece is stored
    follows     position of the source
    """

    derivation: NDArray[np.uint8]
    follows: NDArray[np.int64]


class PieceEncoding(msgspec.Struct, frozen=True, eq=False):
    """How the chunks of pieces are encoded. Each array has one entry for each piece; it may be empty if all are 0.

    planes   whether the piece is encoded by byte planes, which is lossless
    block    number of elements with a common scale if the piece is quantized; 0: it is not
    derivations  pieces that need not be stored; None: all are stored
    """

    planes: Sequence[bool] = ()
    block: Sequence[int] = ()
    derivations: Derivations | None = None


NOT_ENCODED = PieceEncoding()


def plan_writes(
    pieces: Sequence[Piece], *, lazy: Sequence[bool] = (), writer: Writer = SOLE_WRITER,
    is_complete: bool = True, header_bytes_max: int = HEADER_BYTES_MAX, unchanged: Sequence[bool] = (),
    encoding: PieceEncoding = NOT_ENCODED,
) -> WritePlan:
    """Plan where `pieces` are stored, in as few segment files as headers of at most `header_bytes_max` allow.

    lazy         for each piece, whether it may be captured after `save` has returned. Lazy pieces are stored apart from
                 others, so that few parts of a file must be captured before `save` returns. Small pieces, which have no
                 slot, are never lazy. Empty: no piece is lazy
    unchanged    for each piece, whether the checkpoint to which the save may refer probably has most of its chunks.
                 Such pieces are in a separate last segment, except small ones. Empty: no piece is unchanged
    encoding     how pieces are encoded; encoded pieces are in that last segment, too, except small ones
    writer       determines the names of the segments; each path of the store has its own segments
    is_complete  whether these are all pieces of their tensors; if not, other ranks write the others
    raises       CoverageError   pieces of a tensor overlap, or an element is in no piece
                 CollisionError  two pieces get the same name, or a piece gets a reserved name, or two pieces of a
                                 tensor differ in its dtype or shape
    """
    pieces = Pieces.of(pieces)
    boxes = dict(pieces.part_boxes())
    check_tensors(pieces, boxes, is_complete=is_complete)
    text = _entry_texts(pieces, boxes)
    item = pieces.tensors.item_bytes[pieces.tensor]
    length = pieces.lengths()
    slotted = length >= PACKED_BELOW_BYTES
    late = slotted & np.array(lazy, np.bool_) if len(lazy) else np.zeros(len(pieces), np.bool_)
    is_unchanged = slotted & np.array(unchanged, np.bool_) if len(unchanged) else np.zeros(len(pieces), np.bool_)
    block = np.where(slotted, np.array(encoding.block or [0], np.uint16), 0).astype(np.uint16)
    width = _widths(pieces, slotted & (block == 0) & np.array(encoding.planes or [False], np.bool_))
    derivation, follows = _derived(encoding.derivations, slotted, late, block)
    apart = is_unchanged | (width > 0) | (block > 0) | (derivation > 0)
    segment, slot = np.zeros(len(pieces), np.uint32), np.zeros(len(pieces), np.uint64)
    segments: list[SegmentPlan] = []
    path = _paths(length, slotted, late, writer.shares)
    for of_path, members, header_bytes in _parts(path, ~apart, writer.shares, text, length, header_bytes_max):
        number = len(segments)
        order, end = _lay_out(members, length, slotted, late, item, header_bytes, slot)
        segment[members] = number
        large, small = np.split(order, [int(slotted[order].sum())])
        packed = pack_entries(
            map(text.__getitem__, small.tolist()), length[small].tolist(), header_bytes=header_bytes,
            begin=int(slot[small[0]]) if len(small) else end,
        )
        name = segment_name(writer.rank, number, of_path)
        segments.append(SegmentPlan(name, header_bytes, _round_up(end), tuple(order.tolist()), len(large), packed))
    for of_path in sorted(set(path[apart].tolist())):
        members, number = np.flatnonzero(apart & (path == of_path)), len(segments)
        order, end = _lay_out(members, length, slotted, late, item, CHUNKS_HEADER_BYTES, slot)
        segment[members] = number
        segments.append(SegmentPlan(
            segment_name(writer.rank, number, of_path), CHUNKS_HEADER_BYTES, _round_up(end), tuple(order.tolist()),
            len(order), PackedEntries("", end, end), chunks=True,
        ))
    chunk = first_chunks(length)
    return WritePlan(
        pieces=pieces, segments=tuple(segments), text=text, segment=segment, slot=slot, length=length,
        slotted=slotted, lazy=late, unchanged=is_unchanged, width=width, block=block, derivation=derivation,
        follows=follows, chunk=chunk[:-1].astype(np.uint64), chunks=int(chunk[-1]), order=_row_order(segments),
    )


def _entry_texts(pieces: Pieces, boxes: Mapping[int, Box]) -> tuple[str, ...]:
    """The text of each piece's entry in a segment header, up to its offsets. `boxes`: the boxes of pieces that are only
    a part of their tensor.
    """
    return tuple(
        entry_text(entry_name(name, boxes[i], shape), dtype, boxes[i].shape) if i in boxes
        else entry_text(name, dtype, shape)
        for i, (name, dtype, shape) in enumerate(zip(pieces.names, pieces.dtypes, pieces.shapes, strict=True))
    )


def _derived(
    derived: Derivations | None, slotted: NDArray[np.bool_], late: NDArray[np.bool_], block: NDArray[np.uint16]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The arrays `derivation` and `follows` of a plan. A piece is not derived if it or its source is small or
    quantized, or if it is captured before its source.
    """
    if derived is None:
        return np.zeros(len(slotted), np.uint8), np.zeros(len(slotted), np.int64)
    source = derived.follows
    good = slotted & slotted[source] & (late | ~late[source]) & (block == 0) & (block[source] == 0)
    return np.where(good, derived.derivation, 0).astype(np.uint8), source


def _widths(pieces: Pieces, coded: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """For each piece the length of its numbers in bytes; 0 if it is not `coded`."""
    numbers = np.array([dtype.number_bytes for dtype in pieces.tensors.dtypes], np.uint8)[pieces.tensor]
    return np.where(coded, numbers, 0).astype(np.uint8)


def data_offsets(plan: WritePlan, phases: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The file offset of each piece's bytes. `phases`: the address of each piece's memory modulo BLOCK_BYTES.

    A piece with a slot starts at an offset that equals its phase modulo BLOCK_BYTES. So a load can read complete blocks
    of it directly into memory of the same phase (docs/decisions/001).
    """
    return plan.slot + np.where(plan.slotted, phases, 0).astype(np.uint64)


def _row_order(segments: Sequence[SegmentPlan]) -> NDArray[np.int64]:
    runs = [np.array([number, *(len(segments) + p for p in file.pieces)]) for number, file in enumerate(segments)]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _round_up(n: int) -> int:
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES


def _paths(
    length: NDArray[np.uint64], slotted: NDArray[np.bool_], late: NDArray[np.bool_], shares: Sequence[PathShare]
) -> NDArray[np.int64]:
    """For each piece, the number of the store's path that gets it."""
    if not shares:
        return np.zeros(len(length), np.int64)
    from flowstone.plan.spread import spread_pieces  # imported here: most stores have one path

    return spread_pieces(length, slotted, late, shares)


def _parts(
    path: NDArray[np.int64], some: NDArray[np.bool_], shares: Sequence[PathShare], text: Sequence[str],
    length: NDArray[np.uint64], header_bytes_max: int,
) -> Iterator[tuple[int, NDArray[np.int64], int]]:
    """Divide the pieces `some` on each path into runs (see `_split`), and yield each run with its path's number. The
    first path has a run even if it has no pieces.
    """
    for number, share in enumerate(shares or _WHOLE):
        members = np.flatnonzero(some & (path == share.path))
        if not number or len(members):
            yield from ((share.path, *part) for part in _split(text, length, header_bytes_max, members))


def _split(
    text: Sequence[str], length: NDArray[np.uint64], header_bytes_max: int, members: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], int]]:
    """Divide `members` into runs of pieces, so that the header of a file with one run fits. Returns each run with the
    bytes to reserve for that header.
    """
    sizes = [len(text[i].encode()) for i in members.tolist()]
    length = length[members]
    large = (length >= PACKED_BELOW_BYTES).tolist()
    # No file is longer than one with all pieces, slots rounded up. This limits how many digits an offset has.
    file_bytes_max = int(length.sum()) + 2 * BLOCK_BYTES * (sum(large) + 1) + HEADER_BYTES_MAX

    def header_bytes(text_bytes: int, entries: int, slotted: int) -> int:
        # At most one padding entry before each piece with a slot, one before the small pieces, and one at the end.
        return header_bytes_needed(text_bytes, entries=entries, pads=slotted + 2, file_bytes_max=file_bytes_max)

    everything = header_bytes(sum(sizes), len(members), sum(large))
    if everything <= header_bytes_max:
        return [(members, everything)]
    groups: list[tuple[NDArray[np.int64], int]] = []
    begin = text_bytes = slotted = 0
    for i, size in enumerate(sizes):
        if i > begin and header_bytes(text_bytes + size, i - begin + 1, slotted + large[i]) > header_bytes_max:
            groups.append((members[begin:i], header_bytes(text_bytes, i - begin, slotted)))
            begin, text_bytes, slotted = i, 0, 0
        text_bytes += size
        slotted += large[i]
    groups.append((members[begin:], header_bytes(text_bytes, len(members) - begin, slotted)))
    return groups


def _lay_out(
    members: NDArray[np.int64], length: NDArray[np.uint64], slotted: NDArray[np.bool_], lazy: NDArray[np.bool_],
    item: NDArray[np.int64], begin: int, slot: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], int]:
    """Choose where the pieces `members` are stored in one segment file, from offset `begin` on; written into `slot`.
    Returns the order of the pieces in the file, and the offset of the file's end.
    """
    large, small = members[slotted[members]], members[~slotted[members]]
    large = np.concatenate([large[lazy[large]], large[~lazy[large]]])  # the pieces that are not lazy are last
    small = small[np.argsort(-item[small], kind="stable")]  # by element size, descending, then in the state's order
    order = np.concatenate([large, small])
    sizes = np.concatenate([(length[large] + 2 * BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES, length[small]])
    ends = begin + np.cumsum(sizes.astype(np.int64))
    slot[order] = ends - sizes.astype(np.int64)
    return order, int(ends[-1]) if len(ends) else begin


def check_tensors(pieces: Pieces, boxes: Mapping[int, Box], *, is_complete: bool) -> None:
    """Check that each name has one dtype and shape, pieces cover every element once, and entry names are distinct.

    boxes  the boxes of partial pieces, by position
    """
    split = {pieces.names[i] for i in boxes}
    if len(set(pieces.names)) < len(pieces):
        split |= {name for name, count in Counter(pieces.names).items() if count > 1}
    entries = {name for name in pieces.names if name not in split} if split else set(pieces.names)
    entries |= _check_split(pieces, boxes, split, entries, alone=is_complete)
    for entry in entries:
        if is_reserved(entry):
            raise CollisionError(
                f"the name {entry!r} is reserved in the files of a checkpoint", next="rename that tensor"
            )


def _check_split(
    pieces: Pieces, boxes: Mapping[int, Box], split: set[str], entries: set[str], *, alone: bool
) -> set[str]:
    """Check tensors that have several boxes, or one box that is not the full tensor. Returns the names that their boxes
    get in segments, none of which may be in `entries`.
    """
    boxes_by_name: dict[str, list[Box]] = defaultdict(list)
    first: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for i in [i for i, name in enumerate(pieces.names) if name in split] if split else []:
        name, dtype, shape = pieces.names[i], pieces.dtypes[i], tuple(pieces.shapes[i])
        expected = first.setdefault(name, (dtype, shape))
        if expected != (dtype, shape):
            raise CollisionError(
                f"two shards of {name!r} describe different tensors", expected=f"{expected[0].name} {expected[1]}",
                found=f"{dtype.name} {shape}", next="give every shard of a tensor the same dtype and global shape",
            )
        boxes_by_name[name].append(boxes.get(i) or Box.whole(shape))
    split_entries: set[str] = set()
    for name, parts in boxes_by_name.items():
        shape = first[name][1]
        if alone:
            check_tiling(name, shape, parts)
        for box in parts:
            entry = entry_name(name, box, shape)
            if entry in entries or entry in split_entries:
                raise CollisionError(
                    f"{name!r} and another tensor would both be stored under the name {entry!r}",
                    next="rename one of the two tensors",
                )
            split_entries.add(entry)
    return split_entries
