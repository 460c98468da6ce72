"""The base of the next save: the newest save that is committed, as this rank has written it; of a first save, what
adopted_base.py has found.

A piece *rests* if most of it is expected to be in the base already: a parameter that is found frozen, and whatever was
equal in two saves, one after the other. Resting pieces are captured and digested like all others, but only chunks that
differ are written (docs/decisions/015).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.commit import publish
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import CHUNK_BYTES
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError
from flowstone.format.codec import CAST
from flowstone.format.digest import digest
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.format.manifest import SegmentRow
from flowstone.format.segment import CHUNKS_HEADER_BYTES, encode_chunks_header, linked_name
from flowstone.log import log
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import WritePlan
from flowstone.stage.encode import BaseChunks
from flowstone.store.base import Encoded, Receipt, Store
from flowstone.table.chunks import CODEC_RAW, Chunks, first_chunks, spread
from flowstone.table.pieces import Pieces

_REFUSALS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)  # of links
_RESTING_SHARE = 0.25  # of a piece's chunks; below, the saved bytes are not worth a segment that lists no tensors


class Base(msgspec.Struct, frozen=True, eq=False):
    """What this rank has of a committed step.

    pieces    that it has written, in plan order; `lazy`: which of them its layout has as lazy
    digest    of each of their chunks, as it was captured
    places    where they lie, `segment` being a position among `segments`
    rests     pieces of which enough was in the base of that step; None: that was not compared
    loads     how many loads there had been before that save
    known     chunks that may be referred to; None: all
    """

    step: int
    id: str
    pieces: Pieces
    lazy: NDArray[np.bool_]
    digest: NDArray[np.uint64]
    segments: Sequence[SegmentRow]
    places: ChunkPlaces
    rests: NDArray[np.bool_] | None
    loads: int
    known: NDArray[np.bool_] | None = None

    def has(self, pieces: Pieces) -> bool:
        """Whether these are the pieces that it has, in the same order."""
        return self.pieces is pieces or self.pieces == pieces

    def resting(self, pieces: Pieces, assignment: Assignment) -> NDArray[np.bool_] | None:
        """Which of the pieces that a new plan assigns rest; None: none does.

        Until two saves have been compared, those that are lazy since the last one: parameters that were found frozen.
        """
        if not self.has(pieces):
            return None
        found = assignment.lazy() & ~self.lazy if self.rests is None else self.rests
        return found if found.any() else None

    def compared(self, before: Base | None, length: NDArray[np.uint64]) -> Base:
        """The same, knowing what rests; `before`: the base of that step. `length`: of each piece, in bytes."""
        if before is None or not before.has(self.pieces):
            return self
        return replace(self, rests=mostly(self.digest == before.digest, length))


def mostly(found: NDArray[np.bool_], length: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which pieces have so many chunks that are `found` that they rest. `length`: of each piece, in bytes."""
    first, total = first_chunks(length), np.concatenate([[0], np.cumsum(found)])
    counts, number = np.diff(first), total[first[1:]] - total[first[:-1]]
    enough: NDArray[np.bool_] = (counts > 0) & (number >= _RESTING_SHARE * counts)
    return enough


class Referred(msgspec.Struct, frozen=True, eq=False):
    """The files of the base that a save may refer to, under further names in its draft.

    segments  of these files
    chunks    what the base has, by the number of a chunk of the plan
    places    of the chunks in the base, `segment` being a position among `segments`
    refused   the store does not link its files, and will not in the next save either
    """

    segments: Sequence[SegmentRow]
    chunks: BaseChunks
    places: ChunkPlaces
    refused: bool = False

    @classmethod
    def nothing(cls, chunks: int, *, refused: bool = False) -> Referred:
        """For a plan of so many chunks."""
        none = np.zeros(chunks, np.uint64)
        places = ChunkPlaces(none.astype(np.uint32), none)
        return cls((), BaseChunks(none, np.zeros(chunks, np.bool_)), places, refused)


def refer(store: Store, draft: publish.Draft, base: Base | None, plan: WritePlan) -> Referred:
    """Link the files of the base that the plan's resting pieces need. Where that is refused, nothing is referred to.

    raises  StorageError: the device fails, or is full; no link is left
    """
    if base is None or not base.has(plan.pieces):
        return Referred.nothing(plan.chunks)
    numbers = _worth_referring(base, plan)
    needed = sorted(set(base.places.segment[numbers].tolist()))
    rows = [_as_linked(base.segments[at], base.id) for at in needed]
    linked: list[str] = []
    try:
        for at, row in zip(needed, rows, strict=True):
            path = inside(draft.directory, row.name)
            store.link(inside(step_directory(base.step), base.segments[at].name), path)
            linked.append(path)
        # Only then: what is linked now is of this checkpoint, whatever happens to the directory.
        if read_manifest(store, step_directory(base.step)).id != base.id:
            raise NoCheckpointError(f"step {base.step} was saved again", next="nothing: this save writes everything")
    except FlowstoneError as error:
        for path in linked:
            store.remove(path)
        code = error.errno if isinstance(error, StorageError) else None
        if code not in (None, errno.ENOENT, *_REFUSALS):
            raise
        log.info("step %d refers to no earlier checkpoint, and is written whole: %s", draft.step, error)
        return Referred.nothing(plan.chunks, refused=code in _REFUSALS)
    known = np.zeros(plan.chunks, np.bool_)
    known[numbers] = True
    position = np.zeros(len(base.segments), np.uint32)
    position[needed] = np.arange(len(needed))
    places = replace(base.places, segment=position[base.places.segment])
    return Referred(rows, BaseChunks(base.digest, known), places)


def _worth_referring(base: Base, plan: WritePlan) -> NDArray[np.int64]:
    """Numbers of the chunks of resting pieces that the base has, without those that are written again to free a file.
    """
    from flowstone.plan.compaction import to_write_again  # imported here: only where something rests

    first = first_chunks(plan.length)
    rests = np.flatnonzero(plan.rests)
    numbers = spread(first[:-1][rests], np.diff(first)[rests])
    if base.known is not None:
        numbers = numbers[base.known[numbers]]
    forms = base.places.forms
    length = (Chunks.to_come(plan.segment, plan.length).stored_lengths() if forms is None else forms.length)[numbers]
    file_bytes = np.array([row.bytes for row in base.segments], np.int64)
    again = to_write_again(base.places.segment[numbers], length, file_bytes)
    if again.any():
        log.info("%d bytes that are in little used files are written again", int(length[again].sum()))
    return numbers[~again]


def _as_linked(row: SegmentRow, home: str) -> SegmentRow:
    """The row of a base's file in a checkpoint that refers to it."""
    if row.home is not None:
        return row
    return replace(row, home=home, name=linked_name(home, row.name))


def stored_chunks(
    segments: Sequence[SegmentRow], plan: WritePlan, offsets: NDArray[np.uint64], referred: Referred | None,
    receipt: Receipt,
) -> tuple[Sequence[SegmentRow], ChunkPlaces | None]:
    """The segments that a save consists of, and where its chunks are; None: all where the plan has put their pieces.

    segments  those that list tensors; `offsets`: of each piece
    """
    encoded = receipt.encoded
    if encoded is None:
        return segments, None
    referred = referred or Referred.nothing(plan.chunks)
    rows, same = list(segments), encoded.same
    new = plan.of_chunks(plan.apart) & ~same & ~encoded.derived
    planned = places_of(plan, offsets)
    segment, offset = planned.segment.astype(np.int64), planned.offset.copy()
    if new.any():
        segment[new], offset[new] = len(rows), encoded.offset[new]
        name, size = plan.segments[-1].name, encoded.file_bytes[-1]
        rows.append(SegmentRow(len(rows), None, name, size, CHUNKS_HEADER_BYTES, digest(encode_chunks_header(size))))
    used = sorted(set(referred.places.segment[same].tolist()))
    position = np.full(len(referred.segments), -1, np.int64)
    position[used] = len(rows) + np.arange(len(used))
    rows += [replace(referred.segments[at], id=len(rows) + number) for number, at in enumerate(used)]
    segment[same], offset[same] = position[referred.places.segment[same]], referred.places.offset[same]
    forms = _forms(plan, encoded, referred.places.forms, receipt.digests)
    places = ChunkPlaces(segment.astype(np.uint32), offset, forms)
    return rows, _with_derived(plan, encoded, places, receipt.digests) if encoded.derived.any() else places


def _forms(
    plan: WritePlan, encoded: Encoded, of_base: ChunkForms | None, digests: NDArray[np.uint64]
) -> ChunkForms | None:
    """How the chunks are stored, those that are the base's as there; None: all as they are."""
    same = encoded.same
    new = plan.of_chunks(plan.coded) & ~same & ~encoded.derived
    if not encoded.codec[new].any() and (of_base is None or not of_base.codec[same].any()):
        return None
    found = raw_forms(plan.length, digests)
    found.length[new], found.codec[new] = encoded.length[new], encoded.codec[new]
    if of_base is not None:
        found.length[same], found.codec[same] = of_base.length[same], of_base.codec[same]
        found.digest[same] = of_base.digest[same]
    return found


def _with_derived(
    plan: WritePlan, encoded: Encoded, places: ChunkPlaces, digests: NDArray[np.uint64]
) -> ChunkPlaces:
    """The same, with the chunks that follow from others: a copy is where the other one is, a cast refers to it."""
    source, segment, offset, forms = plan.source_chunks(), places.segment.copy(), places.offset.copy(), places.forms
    copies, casts = (encoded.derived & (encoded.codec == codec) for codec in (CODEC_RAW, CAST.id))
    segment[copies], offset[copies] = segment[source[copies]], offset[source[copies]]
    if forms is None and casts.any():
        forms = raw_forms(plan.length, digests)
    if forms is not None:
        for column in (forms.length, forms.codec, forms.digest):
            column[copies] = column[source[copies]]
        forms.length[casts], forms.codec[casts], forms.digest[casts] = 0, CAST.id, digests[casts]
        segment[casts], offset[casts] = 0, source[casts]
    return ChunkPlaces(segment, offset, forms)


def raw_forms(length: NDArray[np.uint64], digests: NDArray[np.uint64]) -> ChunkForms:
    """The chunks of pieces that are stored as they are. `length`: of each piece, in bytes."""
    lengths = Chunks.to_come(np.zeros(len(length), np.uint32), length).stored_lengths()
    return ChunkForms(lengths.copy(), np.zeros(len(lengths), np.uint8), digests.copy())


def captured_digests(plan: WritePlan, receipt: Receipt) -> NDArray[np.uint64]:
    """Of each chunk as it was captured, whether it is encoded or not."""
    if receipt.encoded is None:
        return receipt.digests
    return np.where(plan.of_chunks(plan.apart), receipt.encoded.captured, receipt.digests)


def unneeded(plan: WritePlan, referred: Referred | None, segments: Sequence[SegmentRow]) -> list[str]:
    """Names of files that were made for a save and are none of its segments: of the base, without a chunk that is the
    same; of chunks, without any.
    """
    if referred is None:
        return []
    known = {row.name for row in segments}
    made = [*(segment.name for segment in plan.segments), *(row.name for row in referred.segments)]
    return [name for name in made if name not in known]


def places_of(plan: WritePlan, offsets: NDArray[np.uint64]) -> ChunkPlaces:
    """Where the chunks are if all pieces lie as planned. `offsets`: of each piece, in its segment."""
    return planned_places(plan.segment, offsets, plan.length)


def planned_places(
    segment: NDArray[np.uint32], offset: NDArray[np.uint64], length: NDArray[np.uint64]
) -> ChunkPlaces:
    """Where the chunks are of pieces that are stored as they are, from the piece's segment, offset and length."""
    first = first_chunks(length)
    counts = np.diff(first)
    number = (np.arange(int(first[-1])) - np.repeat(first[:-1], counts)).astype(np.uint64)
    return ChunkPlaces(np.repeat(segment, counts), np.repeat(offset, counts) + number * np.uint64(CHUNK_BYTES))
