"""Messages between ranks about a save: what each rank holds, is to write, and has written. Compactly encoded."""

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
from flowstone.plan.replicas import Compared
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
    """Pieces and their aliases, compactly, column by column.

    `tensors`, `parts` and `kinds` are equal on all ranks that hold parts of the same tensors, split alike.
    """

    tensors: bytes  # PackedTensors, compressed
    parts: bytes
    kinds: bytes
    boxes: bytes
    aliases: list[tuple[str, str]]


class Proposal(msgspec.Struct, frozen=True):
    """A rank's report at a save: the step, and its layout if it is new; else the plan that it has begun with."""

    step: int
    host: str
    plan: str | None
    layout: PackedLayout | None
    is_far: bool = False  # some pieces are in device memory


class Part(msgspec.Struct, frozen=True):
    """What a rank writes, as rank 0 has decided. `positions` is None if that did not change.

    blocks  int64, for pieces of which this rank writes a block: position among `positions`, dimension, start and
            length; all numbers of the first piece, then of the next
    sets    int64: for each piece of its layout, the number of its set of replicas (plan.replicas)
    """

    positions: bytes | None
    blocks: bytes = b""
    sets: bytes = b""


class Terms(msgspec.Struct, frozen=True):
    """What all ranks learn about a plan.

    job      the identity of this run of the job
    buffers  number of module buffers that several ranks hold, and the lowest of them writes
    share    share of the replicas that each save compares; None: all of them
    """

    plan: str
    job: str
    buffers: int
    share: float | None


class Try(msgspec.Struct, frozen=True):
    """A call of `save` for a step. Ranks count calls alike, so all have the same one; no rank has one twice."""

    step: int
    number: int  # counted from 1


class Written(msgspec.Struct, frozen=True, eq=False):
    """What a rank has written, as rank 0 gets it.

    tries       number of calls of `save` for this step
    segment     for each piece that it writes, in the order of its assignment: position among `segments`
    digests     of the chunks
    sections    digest of each replicated section
    replicated  the sections' texts, from rank 0 alone: equal ones need not be sent
    folds       numbers for each set of replicas that it is in (plan.replicas.Compared.folded); None if unknown
    places      of each chunk, if some are in the base; `segment` being a position among `segments`
    copies      some chunks have the place of others
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


class PackedWritten(msgspec.Struct, frozen=True):
    """The same, compactly, without what need not be sent."""

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


class Apart(msgspec.Struct, frozen=True):
    """A rank's sections that are not equal on all ranks. `merge_maps`: the merge map of each."""

    texts: dict[str, bytes]
    merge_maps: dict[str, object] = msgspec.field(name="spines")


class Outcome(msgspec.Struct, frozen=True):
    """Rank 0's answer to what all ranks have written: a manifest, or what rank 0 needs to see of each rank first.

    apart      sections that are not equal on all ranks
    replicas   some replicas differ; rank 0 needs their digests to name them
    """

    manifest: bytes
    apart: list[str]
    replicas: bool = False


class Assignment(msgspec.Struct, frozen=True, eq=False):
    """What this rank writes, by the plan with that name.

    positions  among the pieces of its layout, ascending; repeated for blocks
    compared   replicas that it compares with other ranks
    blocks     for pieces of which it writes only some rows
    buffers    in the whole job: module buffers that several ranks hold, and the lowest of them writes
    is_everything  no other rank writes any piece: no agreement is needed
    """

    plan: str
    layout: Layout
    positions: NDArray[np.int64]
    compared: Compared
    blocks: tuple[Block, ...] = ()
    buffers: int = 0
    is_everything: bool = False

    @classmethod
    def everything(cls, layout: Layout) -> Assignment:
        """The assignment of a group of one: the whole layout."""
        none = np.full(len(layout.pieces), -1, np.int64)  # no piece is also held by another rank
        return cls(
            secrets.token_hex(8), layout, np.arange(len(layout.pieces)), Compared.of(layout, none, None),
            is_everything=True,
        )

    def pieces(self) -> Pieces:
        """The pieces that this rank writes."""
        return self.layout.pieces if self.is_everything else self.layout.pieces.take(
            self.positions.tolist(), self.blocks
        )

    def lazy(self) -> NDArray[np.bool_]:
        """Which of those pieces the layout has as lazy, whatever waits for their capture."""
        return np.array(self.layout.lazy, np.bool_)[self.positions]

    def places(self, of_layout: Places) -> Places:
        """The memory of those pieces. `of_layout`: the memory of all pieces that this rank holds."""
        return of_layout if self.is_everything else of_layout.take(self.positions.tolist(), self.blocks)


class Contribution(msgspec.Struct, frozen=True):
    """One rank's part of a commit.

    segment   for each piece that it writes, in the order of its assignment: position among `segments`
    offsets   for the same pieces, in bytes
    objects   section to the value that `replicated` encodes
    looked_at digests of its pieces, or of samples of them, taken when the save began
    places    of each chunk, if some are in the base; `segment` and `offsets` are then of no use
    """

    segments: Sequence[SegmentRow]
    segment: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    receipt: Receipt
    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]
    looked_at: LookedAt
    places: ChunkPlaces | None = None

    def folds(self, step: int, compared: Compared) -> NDArray[np.uint64] | None:
        """Numbers for each set of replicas that this rank is in; None if some pieces were not sampled."""
        at = compared.looked_at(step)
        digests = self.looked_at.of(compared.rows[at])
        return None if digests is None else compared.folded(at, digests, self.looked_at.whole)

    def digests(self, step: int, assignment: Assignment) -> bytes:
        """For each compared piece of the layout the digest of its samples, and of all of it; 0 if unknown."""
        compared, whole, pieces = assignment.compared, self.looked_at.whole, len(assignment.layout.pieces)
        at = compared.looked_at(step)
        digests = self.looked_at.of(compared.rows[at])
        sampled, exact = np.zeros(pieces, "<u8"), np.zeros(pieces, "<u8")
        if digests is not None:
            sampled[compared.rows[at]] = digests.astype(np.uint64) + np.uint64(1)
            if whole is not None:
                exact[whole[0]] = whole[1]
        return msgspec.msgpack.encode([zlib.compress(sampled.tobytes(), 1), zlib.compress(exact.tobytes(), 1)])


class LookedAt(msgspec.Struct, frozen=True):
    """Digests of pieces, each with their rows of the layout.

    sampled  of a few bytes of some pieces; rows None: of all pieces
    whole    of all bytes of those that devices have digested, none of which is 0; None: devices were not to
    """

    sampled: tuple[NDArray[np.int64] | None, NDArray[np.uint16]]
    whole: tuple[NDArray[np.int64], NDArray[np.uint64]] | None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.uint16] | None:
        """Digests of samples of the pieces at `rows`; None if some of them were not sampled."""
        known, digests = self.sampled
        if known is None:
            return digests[rows]
        if not np.isin(rows, known).all():
            return None
        order = np.argsort(known)
        return digests[order[np.searchsorted(known, rows, sorter=order)]]


def pack(layout: Layout) -> PackedLayout:
    return packed(layout.pieces.compact(), [(alias.name, alias.target) for alias in layout.aliases])


def packed(pieces: Pieces, aliases: list[tuple[str, str]]) -> PackedLayout:
    assert pieces.kinds is not None, "each distinct box once"
    assert pieces.rows is None, "a rank has one piece for each of its tensors"
    dtypes, shapes = [dtype.name for dtype in pieces.dtypes], list(map(tuple, pieces.shapes))
    tensors = PackedTensors(list(pieces.names), dtypes, shapes, sorted(pieces.tensors.buffers))
    return PackedLayout(
        lzma.compress(msgspec.msgpack.encode(tensors), preset=0), by_steps(pieces.parts),
        by_steps(pieces.kinds), compressed(pieces.boxes), aliases,
    )


def tensors_of(packed: bytes) -> TensorColumns:
    """The tensors of a PackedLayout."""
    found = msgspec.msgpack.decode(lzma.decompress(packed), type=PackedTensors)
    dtypes = tuple(DTYPES[name] for name in found.dtypes)
    return TensorColumns(tuple(found.names), dtypes, tuple(found.shapes), frozenset(found.buffers))


def parts_of(shared: WriterAssignment) -> Iterator[Part]:
    """The message for each rank. Ranks that write alike get the same bytes."""
    known: dict[tuple[int, int, int], Part] = {}
    sets: dict[int, bytes] = {}
    for rank, writes in enumerate(shared.writes):
        blocks, number = shared.blocks[rank] if shared.blocks else None, shared.replicas.number[rank]
        if id(number) not in sets:
            sets[id(number)] = by_steps(number.astype(np.int64))
        key = id(writes), id(blocks), id(number)
        if key not in known:
            known[key] = _part_of(writes, blocks, sets[id(number)])
        yield known[key]


def _part_of(writes: NDArray[np.int64], blocks: Blocks | None, sets: bytes) -> Part:
    if blocks is None:
        return Part(by_steps(writes), b"", sets)
    at = np.flatnonzero(blocks.dim[writes] >= 0)
    split = writes[at]
    columns = np.stack([at, blocks.dim[split], blocks.start[split], blocks.length[split]])
    return Part(by_steps(blocks.source[writes]), compressed(columns) if len(at) else b"", sets)


def assignment_of(terms: Terms, layout: Layout, part: Part) -> Assignment:
    """A rank's assignment, from its part of the plan."""
    assert part.positions is not None, "only what is new is told"
    writes, split = from_steps(part.positions), []
    blocks = numbers(part.blocks, np.int64).reshape(4, -1).T.tolist() if part.blocks else ()
    for at, dim, start, length in blocks:
        piece = layout.pieces[int(writes[at])]
        row_bytes = math.prod(piece.box.shape[dim + 1 :]) * piece.dtype.item_bytes
        split.append(Block(at, dim, start, length, start * row_bytes))
    compared = Compared.of(layout, from_steps(part.sets), terms.share)
    return Assignment(terms.plan, layout, writes, compared, tuple(split), terms.buffers)


def compressed(numbers: NDArray[np.int64]) -> bytes:
    return zlib.compress(numbers.astype("<i8").tobytes(), 1)


def by_steps(numbers: NDArray[np.int64]) -> bytes:
    """Compressed differences of neighbouring numbers, most of which are equal."""
    return compressed(np.diff(numbers, prepend=0))


def from_steps(packed: bytes) -> NDArray[np.int64]:
    return np.cumsum(numbers(packed, np.int64))


def written_by(
    made: Contribution, plan: str, draft: str, tries: int, folds: NDArray[np.uint64] | None = None
) -> Written:
    return Written(
        plan=plan, draft=draft, tries=tries, segments=made.segments, segment=made.segment, offsets=made.offsets,
        digests=made.receipt.digests, sections={name: digest(text) for name, text in made.replicated.items()},
        replicated=made.replicated, per_rank=made.per_rank, io=made.receipt.io, folds=folds, places=made.places,
        copies=made.receipt.has_copies,
    )


def pack_written(one: Written) -> bytes:
    """Encode for sending to rank 0."""
    return msgspec.msgpack.encode(PackedWritten(
        plan=one.plan, draft=one.draft, tries=one.tries, segments=list(one.segments),
        segment=zlib.compress(one.segment.astype("<u4").tobytes(), 1),
        offsets=zlib.compress(one.offsets.astype("<u8").tobytes(), 1),
        digests=zlib.compress(one.digests.astype("<u8").tobytes(), 0),
        sections=dict(one.sections), per_rank=dict(one.per_rank), io=one.io,
        folds=None if one.folds is None else one.folds.astype("<u8").tobytes(),
        places=None if one.places is None else _packed_places(one.places), copies=one.copies,
    ))


def unpack_written(message: bytes) -> Written:
    one = unpack(message, PackedWritten)
    return Written(
        plan=one.plan, draft=one.draft, tries=one.tries, segments=one.segments,
        segment=numbers(one.segment, np.uint32), offsets=numbers(one.offsets, np.uint64),
        digests=numbers(one.digests, np.uint64), sections=one.sections, replicated={}, per_rank=one.per_rank, io=one.io,
        folds=None if one.folds is None else np.frombuffer(one.folds, "<u8").astype(np.uint64).reshape(3, -1),
        places=None if one.places is None else _unpacked_places(one.places), copies=one.copies,
    )


def _packed_places(places: ChunkPlaces) -> tuple[bytes, ...]:
    found: list[tuple[NDArray[np.integer], str]] = [(places.segment, "<u4"), (places.offset, "<u8")]
    if (forms := places.forms) is not None:
        found += [(forms.length, "<u4"), (forms.codec, "u1"), (forms.digest, "<u8")]
        kinds = ("<u4", "<u8", "<u4", "u1", "<u8", "<u8")
        found += [] if forms.bases is None else zip(forms.bases.columns(), kinds, strict=True)
    return tuple(zlib.compress(column.astype(kind).tobytes(), 1) for column, kind in found)


def _unpacked_places(columns: tuple[bytes, ...]) -> ChunkPlaces:
    segment, offset, *form = columns
    forms = None
    if form:
        kinds = (np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64)
        bases = ChunkBases.by_columns(map(numbers, form[3:], kinds)) if form[3:] else None  # type: ignore[arg-type]
        forms = ChunkForms(numbers(form[0], np.uint32), numbers(form[1], np.uint8), numbers(form[2], np.uint64), bases)
    return ChunkPlaces(numbers(segment, np.uint32), numbers(offset, np.uint64), forms)


def apart_of(made: Contribution, sections: Sequence[str]) -> Apart:
    texts = {name: zlib.compress(made.replicated[name], 1) for name in sections}
    return Apart(texts, {name: merge_map_of(made.objects[name]) for name in sections})


def numbers(packed: bytes, kind: type[_Number]) -> NDArray[_Number]:
    return np.frombuffer(zlib.decompress(packed), np.dtype(kind).newbyteorder("<")).astype(kind)


def unpack(message: bytes, kind: type[_Struct]) -> _Struct:
    return msgspec.msgpack.decode(message, type=kind)
