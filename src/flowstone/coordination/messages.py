"""Messages between ranks about a save: the pieces that each rank holds, its assignment, and the files that it wrote."""

from __future__ import annotations

import lzma
import math
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.format.digest import digest
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.format.manifest import IoRecord, SegmentRow
from flowstone.format.merge_points import merge_map_of
from flowstone.plan.assign_writers import WriterAssignment
from flowstone.plan.replicas import ReplicaComparison
from flowstone.plan.split_replicas import Blocks
from flowstone.store.base import Receipt
from flowstone.table.chunks import ChunkBases
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Block, Layout, Pieces, Places, TensorColumns

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Number = TypeVar("_Number", bound=np.generic)


class PackedTensors(msgspec.Struct, frozen=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    buffers: list[int]


class PackedLayout(msgspec.Struct, frozen=True):
    """The pieces (tensors, or parts of tensors) that a rank holds, and their aliases, in a compact form: one array for
    each attribute.

    `tensors`, `parts` and `kinds` are equal on all ranks that hold parts of the same tensors, divided in the same way.
    """

    tensors: bytes  # PackedTensors, compressed
    parts: bytes
    kinds: bytes
    boxes: bytes
    aliases: list[tuple[str, str]]


class Proposal(msgspec.Struct, frozen=True):
    """What a rank sends to rank 0 at each save: the step, and the plan (which rank writes which pieces) with which it
    has begun to write; or, if it waits for a plan, its layout.
    """

    step: int
    host: str
    plan: str | None
    layout: PackedLayout | None
    is_far: bool = False  # whether some pieces are in device memory


class WriterShare(msgspec.Struct, frozen=True):
    """Rank 0's decision which pieces a rank writes. `positions`: the numbers of these pieces in the rank's layout;
    None: the same pieces as in the last plan.

    blocks  for each piece of which this rank writes only a range along one dimension, four int64: the piece's position
            among `positions`, the dimension, and the range's start and length
    sets    int64: for each piece of the rank's layout, the number of its set of replicas: the pieces that the same
            ranks hold (plan.replicas)
    """

    positions: bytes | None
    blocks: bytes = b""
    sets: bytes = b""


class PlanTerms(msgspec.Struct, frozen=True):
    """What all ranks must know about a plan (which rank writes which pieces).

    job      the identity of this run of the job
    buffers  number of module buffers that several ranks hold; the lowest of these ranks writes them
    share    share of the replicas that each save compares; None: all of them
    """

    plan: str
    job: str
    buffers: int
    share: float | None


class SaveAttempt(msgspec.Struct, frozen=True):
    """A call of `save` for a step. `number`: 1 for the first call with this step, 2 for the second. All ranks count the
    calls, so they know the same number without a message.
    """

    step: int
    number: int  # counted from 1


class WriteReport(msgspec.Struct, frozen=True, eq=False):
    """A rank's report to rank 0 on the files that it has written.

    tries       number of calls of `save` for this step
    segment     for each piece that the rank writes, in the order of its assignment: the number of its segment file in
                `segments`
    digests     digests of the chunks
    sections    digest of each replicated section
    replicated  the sections' texts, set only by rank 0: other ranks send only digests
    folds       for each set of replicas that the rank holds, numbers computed from the digests of these replicas
                (plan.replicas.ReplicaComparison.fold); None if a digest is missing
    places      where each chunk is stored, if some are in files of an earlier checkpoint; its `segment` is a number of
                a file in `segments`
    copies      whether some chunks are copies of others, and so are stored at the same place
    """

    plan: str
    draft: str
    tries: int
    segments: Sequence[SegmentRow]
    segment: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    digests: NDArray[np.uint64]
    sections: Mapping[str, str]
    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    io: IoRecord
    folds: NDArray[np.uint64] | None
    places: ChunkPlaces | None = None
    copies: bool = False


class PackedWriteReport(msgspec.Struct, frozen=True):
    """A WriteReport in compact form, without what rank 0 does not need."""

    plan: str
    draft: str
    tries: int
    segments: list[SegmentRow]
    segment: bytes
    offsets: bytes
    digests: bytes
    sections: dict[str, str]
    per_rank: dict[str, bytes]
    io: IoRecord
    folds: bytes | None
    places: tuple[bytes, ...] | None = None
    copies: bool = False


class DifferingObjects(msgspec.Struct, frozen=True):
    """A rank's values of the sections that are not equal on all ranks. `merge_maps`: for each section, how its values
    are merged.
    """

    texts: dict[str, bytes]
    merge_maps: dict[str, object] = msgspec.field(name="spines")


class Outcome(msgspec.Struct, frozen=True):
    """Rank 0's answer to the write reports of all ranks: a manifest, or a request for more details.

    apart      sections that are not equal on all ranks; rank 0 needs their values
    replicas   whether some replicas differ; rank 0 then needs all digests, to name the replicas
    """

    manifest: bytes
    apart: list[str]
    replicas: bool = False


class Assignment(msgspec.Struct, frozen=True, eq=False):
    """The pieces that this rank writes in a plan.

    positions  numbers of the pieces in this rank's layout, ascending; a piece with several blocks is listed repeatedly
    compared   the replicas that are compared with other ranks
    blocks     for pieces of which this rank writes only a part: the range to write, along one dimension
    buffers    number of module buffers, in the full job, that several ranks hold; the lowest of these ranks writes them
    is_everything  whether no other rank writes any piece, so that no agreement is needed
    """

    plan: str
    layout: Layout
    positions: NDArray[np.int64]
    compared: ReplicaComparison
    blocks: tuple[Block, ...] = ()
    buffers: int = 0
    is_everything: bool = False

    @classmethod
    def of_whole_layout(cls, layout: Layout) -> Assignment:
        """The assignment in a group of one: this rank writes all pieces of its layout."""
        none = np.full(len(layout.pieces), -1, np.int64)  # -1: no other rank holds the piece
        return cls(
            secrets.token_hex(8), layout, np.arange(len(layout.pieces)), ReplicaComparison.of(layout, none, None),
            is_everything=True,
        )

    def pieces(self) -> Pieces:
        """The pieces that this rank writes."""
        return self.layout.pieces if self.is_everything else self.layout.pieces.take(
            self.positions.tolist(), self.blocks
        )

    def lazy(self) -> NDArray[np.bool_]:
        """For each assigned piece, whether the layout marks it as lazy (to be captured after `save` returns). The
        option `fence` has no influence.
        """
        return np.array(self.layout.lazy, np.bool_)[self.positions]

    def places(self, of_layout: Places) -> Places:
        """The memory of the assigned pieces. `of_layout`: the memory of all pieces that this rank holds."""
        return of_layout if self.is_everything else of_layout.take(self.positions.tolist(), self.blocks)


class Contribution(msgspec.Struct, frozen=True):
    """One rank's part of a commit.

    segment   for each piece that the rank writes, in the order of its assignment: the number of its segment file in
              `segments`
    offsets   for the same pieces: offset in the segment file, in bytes
    objects   section -> the value of which `replicated` is the encoded text
    replica_digests  digests of this rank's pieces, or of samples of them, taken when the save began
    places    where each chunk is stored, if some are in files of an earlier checkpoint; `segment` and `offsets` are
              then unused
    """

    segments: Sequence[SegmentRow]
    segment: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    receipt: Receipt
    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]
    replica_digests: ReplicaDigests
    places: ChunkPlaces | None = None

    def folds(self, step: int, compared: ReplicaComparison) -> NDArray[np.uint64] | None:
        """For each set of replicas that this rank holds: numbers computed from the digests of these replicas. None if
        some replicas were not sampled.
        """
        compared_now = compared.sampled_rows(step)
        digests = self.replica_digests.of(compared.rows[compared_now])
        return None if digests is None else compared.fold(compared_now, digests, self.replica_digests.whole)

    def digests(self, step: int, assignment: Assignment) -> bytes:
        """For each compared piece of the layout the digest of its samples, and of all its bytes; 0 if unknown."""
        compared, whole, pieces = assignment.compared, self.replica_digests.whole, len(assignment.layout.pieces)
        compared_now = compared.sampled_rows(step)
        digests = self.replica_digests.of(compared.rows[compared_now])
        sampled, exact = np.zeros(pieces, "<u8"), np.zeros(pieces, "<u8")
        if digests is not None:
            sampled[compared.rows[compared_now]] = digests.astype(np.uint64) + np.uint64(1)
            if whole is not None:
                exact[whole[0]] = whole[1]
        return msgspec.msgpack.encode([zlib.compress(sampled.tobytes(), 1), zlib.compress(exact.tobytes(), 1)])


class ReplicaDigests(msgspec.Struct, frozen=True):
    """Digests of pieces, with the numbers of these pieces in the layout.

    sampled  the pieces' numbers (None: all pieces), and digests of a few bytes of each
    whole    the numbers of the pieces that devices have digested, and digests of all their bytes, never 0; None:
             devices digested nothing
    """

    sampled: tuple[NDArray[np.int64] | None, NDArray[np.uint16]]
    whole: tuple[NDArray[np.int64], NDArray[np.uint64]] | None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.uint16] | None:
        """Digests of samples of the pieces at `rows`; None if some of them were not sampled."""
        sampled_rows, digests = self.sampled
        if sampled_rows is None:
            return digests[rows]
        if not np.isin(rows, sampled_rows).all():
            return None
        order = np.argsort(sampled_rows)
        return digests[order[np.searchsorted(sampled_rows, rows, sorter=order)]]


def pack(layout: Layout) -> PackedLayout:
    return packed(layout.pieces.compact(), [(alias.name, alias.target) for alias in layout.aliases])


def packed(pieces: Pieces, aliases: list[tuple[str, str]]) -> PackedLayout:
    assert pieces.kinds is not None, "the pieces are compact"
    assert pieces.rows is None, "a rank has one piece for each of its tensors"
    dtypes, shapes = [dtype.name for dtype in pieces.dtypes], list(map(tuple, pieces.shapes))
    tensors = PackedTensors(list(pieces.names), dtypes, shapes, sorted(pieces.tensors.buffers))
    return PackedLayout(
        lzma.compress(msgspec.msgpack.encode(tensors), preset=0), by_steps(pieces.parts),
        by_steps(pieces.kinds), compressed(pieces.boxes), aliases,
    )


def tensors_of(packed: bytes) -> TensorColumns:
    """The tensors of a PackedLayout."""
    unpacked = msgspec.msgpack.decode(lzma.decompress(packed), type=PackedTensors)
    dtypes = tuple(DTYPES[name] for name in unpacked.dtypes)
    return TensorColumns(tuple(unpacked.names), dtypes, tuple(unpacked.shapes), frozenset(unpacked.buffers))


def parts_of(shared: WriterAssignment) -> Iterator[WriterShare]:
    """Yield the share of the plan for each rank. Ranks with equal assignments get equal messages."""
    parts_by_identity: dict[tuple[int, int, int], WriterShare] = {}
    sets: dict[int, bytes] = {}
    for rank, writes in enumerate(shared.writes):
        blocks, number = shared.blocks[rank] if shared.blocks else None, shared.replicas.number[rank]
        if id(number) not in sets:
            sets[id(number)] = by_steps(number.astype(np.int64))
        key = id(writes), id(blocks), id(number)
        if key not in parts_by_identity:
            parts_by_identity[key] = _part_of(writes, blocks, sets[id(number)])
        yield parts_by_identity[key]


def _part_of(writes: NDArray[np.int64], blocks: Blocks | None, sets: bytes) -> WriterShare:
    if blocks is None:
        return WriterShare(by_steps(writes), b"", sets)
    split_positions = np.flatnonzero(blocks.dim[writes] >= 0)
    split = writes[split_positions]
    columns = np.stack([split_positions, blocks.dim[split], blocks.start[split], blocks.length[split]])
    return WriterShare(by_steps(blocks.source[writes]), compressed(columns) if len(split_positions) else b"", sets)


def assignment_of(terms: PlanTerms, layout: Layout, part: WriterShare) -> Assignment:
    """The pieces that this rank writes, from the messages that it got from rank 0: `terms`, which all ranks get, and
    `part`, which is for this rank.
    """
    assert part.positions is not None, "only new positions are sent"
    writes, split = from_steps(part.positions), []
    blocks = numbers(part.blocks, np.int64).reshape(4, -1).T.tolist() if part.blocks else ()
    for row, dim, start, length in blocks:
        piece = layout.pieces[int(writes[row])]
        row_bytes = math.prod(piece.box.shape[dim + 1 :]) * piece.dtype.item_bytes
        split.append(Block(row, dim, start, length, start * row_bytes))
    compared = ReplicaComparison.of(layout, from_steps(part.sets), terms.share)
    return Assignment(terms.plan, layout, writes, compared, tuple(split), terms.buffers)


def compressed(numbers: NDArray[np.int64]) -> bytes:
    return zlib.compress(numbers.astype("<i8").tobytes(), 1)


def by_steps(numbers: NDArray[np.int64]) -> bytes:
    """Compress numbers: the differences between neighbours are stored, most of which are equal."""
    return compressed(np.diff(numbers, prepend=0))


def from_steps(packed: bytes) -> NDArray[np.int64]:
    return np.cumsum(numbers(packed, np.int64))


def written_by(
    made: Contribution, plan: str, draft: str, tries: int, folds: NDArray[np.uint64] | None = None
) -> WriteReport:
    return WriteReport(
        plan=plan, draft=draft, tries=tries, segments=made.segments, segment=made.segment, offsets=made.offsets,
        digests=made.receipt.digests, sections={name: digest(text) for name, text in made.replicated.items()},
        replicated=made.replicated, per_rank=made.per_rank, io=made.receipt.io, folds=folds, places=made.places,
        copies=made.receipt.has_copies,
    )


def pack_written(written: WriteReport) -> bytes:
    """Encode a write report for sending it to rank 0. Returns the bytes of a PackedWriteReport."""
    return msgspec.msgpack.encode(PackedWriteReport(
        plan=written.plan, draft=written.draft, tries=written.tries, segments=list(written.segments),
        segment=zlib.compress(written.segment.astype("<u4").tobytes(), 1),
        offsets=zlib.compress(written.offsets.astype("<u8").tobytes(), 1),
        digests=zlib.compress(written.digests.astype("<u8").tobytes(), 0),
        sections=dict(written.sections), per_rank=dict(written.per_rank), io=written.io,
        folds=None if written.folds is None else written.folds.astype("<u8").tobytes(),
        places=None if written.places is None else _packed_places(written.places), copies=written.copies,
    ))


def unpack_written(message: bytes) -> WriteReport:
    unpacked = unpack(message, PackedWriteReport)
    return WriteReport(
        plan=unpacked.plan, draft=unpacked.draft, tries=unpacked.tries, segments=unpacked.segments,
        segment=numbers(unpacked.segment, np.uint32), offsets=numbers(unpacked.offsets, np.uint64),
        digests=numbers(unpacked.digests, np.uint64), sections=unpacked.sections, replicated={},
        per_rank=unpacked.per_rank, io=unpacked.io,
        folds=None if unpacked.folds is None else np.frombuffer(unpacked.folds, "<u8").astype(np.uint64).reshape(3, -1),
        places=None if unpacked.places is None else _unpacked_places(unpacked.places), copies=unpacked.copies,
    )


def _packed_places(places: ChunkPlaces) -> tuple[bytes, ...]:
    columns: list[tuple[NDArray[np.integer], str]] = [(places.segment, "<u4"), (places.offset, "<u8")]
    if (forms := places.forms) is not None:
        columns += [(forms.length, "<u4"), (forms.codec, "u1"), (forms.digest, "<u8")]
        kinds = ("<u4", "<u8", "<u4", "u1", "<u8", "<u8")
        columns += [] if forms.bases is None else zip(forms.bases.columns(), kinds, strict=True)
    return tuple(zlib.compress(column.astype(kind).tobytes(), 1) for column, kind in columns)


def _unpacked_places(columns: tuple[bytes, ...]) -> ChunkPlaces:
    segment, offset, *form = columns
    forms = None
    if form:
        kinds = (np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64)
        bases = ChunkBases.by_columns(map(numbers, form[3:], kinds)) if form[3:] else None  # type: ignore[arg-type]
        forms = ChunkForms(numbers(form[0], np.uint32), numbers(form[1], np.uint8), numbers(form[2], np.uint64), bases)
    return ChunkPlaces(numbers(segment, np.uint32), numbers(offset, np.uint64), forms)


def apart_of(made: Contribution, sections: Sequence[str]) -> DifferingObjects:
    texts = {name: zlib.compress(made.replicated[name], 1) for name in sections}
    return DifferingObjects(texts, {name: merge_map_of(made.objects[name]) for name in sections})


def numbers(packed: bytes, kind: type[_Number]) -> NDArray[_Number]:
    return np.frombuffer(zlib.decompress(packed), np.dtype(kind).newbyteorder("<")).astype(kind)


def unpack(message: bytes, kind: type[_Struct]) -> _Struct:
    return msgspec.msgpack.decode(message, type=kind)
