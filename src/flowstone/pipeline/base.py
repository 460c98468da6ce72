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

from flowstone import _native
from flowstone.commit import publish
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import CHUNK_BYTES
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError
from flowstone.format.codec import CAST, PLANES
from flowstone.format.digest import digest
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.format.manifest import SegmentRow
from flowstone.format.segment import CHUNKS_HEADER_BYTES, encode_chunks_header, linked_name
from flowstone.log import log
from flowstone.pipeline.messages import Assignment
from flowstone.plan.write import WritePlan
from flowstone.stage.encode import BaseChunks, NearChunks
from flowstone.store.base import Encoded, Receipt, Store
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, Chunks, first_chunks, spread
from flowstone.table.pieces import Pieces

_REFUSALS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)  # of links
_BASE_CODECS = (CODEC_RAW, PLANES.id)  # that a base may have
_RESTING_SHARE = 0.25  # of a piece's chunks; below, the saved bytes are not worth a segment that lists no tensors


class Base(msgspec.Struct, frozen=True, eq=False):
    """What this rank has of a committed step.

    pieces    that it has written, in plan order; `lazy`: which of them its layout has as lazy
    digest    of each of their chunks, as it was captured; where there is a `codec`, of its stored bytes
    places    where they lie, `segment` being a position among `segments`
    rests     pieces of which enough was in the base of that step; None: that was not compared
    loads     how many loads there had been before that save
    known     chunks that may be referred to; None: all
    roots     for each chunk the digest of the data of what lies there by itself: its own, or its base's if it has one
              (codec xor); None: all have their own
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
    roots: NDArray[np.uint64] | None = None
    codec: NDArray[np.uint8] | None = None

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

    def compared(
        self, before: Base | None, length: NDArray[np.uint64], same: NDArray[np.bool_] | None = None
    ) -> Base:
        """The same, knowing what rests; `before`: the base of that step. `length`: of each piece, in bytes. `same`:
        chunks that were found to be those of the base.
        """
        if before is None or not before.has(self.pieces):
            return self
        equal = self.digest == before.digest
        return replace(self, rests=mostly(equal if same is None else equal | same, length))


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
    roots     what chunks may have as base, `segment` being a position among `segments`, `data` the digest of the base's
              own data; None: nothing
    """

    segments: Sequence[SegmentRow]
    chunks: BaseChunks
    places: ChunkPlaces
    refused: bool = False
    roots: ChunkBases | None = None

    @classmethod
    def nothing(cls, chunks: int, *, refused: bool = False) -> Referred:
        """For a plan of so many chunks."""
        none = np.zeros(chunks, np.uint64)
        places = ChunkPlaces(none.astype(np.uint32), none)
        return cls((), BaseChunks(none, np.zeros(chunks, np.bool_)), places, refused)


def refer(
    store: Store, draft: publish.Draft, base: Base | None, plan: WritePlan, kept: _native.KeptChunks | None = None
) -> Referred:
    """Link the files of the base that the plan's resting pieces need, and those of chunks that may be coded with what
    was `kept`. Where that is refused, nothing is referred to.

    raises  StorageError: the device fails, or is full; no link is left
    """
    if base is None or not base.has(plan.pieces):
        return _with_kept(Referred.nothing(plan.chunks), kept, None)
    numbers, near = _worth_referring(base, plan, kept)
    roots = None if kept is None else roots_of(base)
    needed = sorted(_files_of(base.places, numbers) | (set() if roots is None else set(roots.segment[near].tolist())))
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
        return _with_kept(Referred.nothing(plan.chunks, refused=code in _REFUSALS), kept, None)
    known = np.zeros(plan.chunks, np.bool_)
    known[numbers] = True
    position = np.zeros(len(base.segments), np.uint32)
    position[needed] = np.arange(len(needed))
    found = Referred(rows, BaseChunks(base.digest, known, base.codec), _moved(base.places, position))
    if roots is None:
        return found
    is_near = np.zeros(plan.chunks, np.bool_)
    is_near[near] = True
    return _with_kept(replace(found, roots=replace(roots, segment=position[roots.segment])), kept, is_near)


def _with_kept(
    found: Referred, kept: _native.KeptChunks | None, is_base: NDArray[np.bool_] | None
) -> Referred:
    """The same, for an encoder that keeps what chunks are; `is_base`: those whose roots are linked."""
    if kept is None:
        return found
    digest = np.zeros_like(found.chunks.digest) if found.roots is None else found.roots.data
    is_base = np.zeros(len(digest), np.bool_) if is_base is None else is_base
    return replace(found, chunks=replace(found.chunks, near=NearChunks(kept, digest, is_base)))


def _files_of(places: ChunkPlaces, numbers: NDArray[np.int64]) -> set[int]:
    """The segments in which these chunks are, with what they are decoded with."""
    found = set(places.segment[numbers].tolist())
    if places.forms is not None and places.forms.bases is not None:
        found |= set(places.forms.bases.segment[numbers[places.forms.codec[numbers] == CODEC_XOR]].tolist())
    return found


def _moved(places: ChunkPlaces, position: NDArray[np.uint32]) -> ChunkPlaces:
    """The same places, segments having other numbers."""
    forms = places.forms
    if forms is not None and forms.bases is not None:
        forms = replace(forms, bases=replace(forms.bases, segment=position[forms.bases.segment]))
    return replace(places, segment=position[places.segment], forms=forms)


def roots_of(base: Base) -> ChunkBases:
    """For each chunk, what lies in a file by itself and may be a base: the chunk, or what it has as base itself. `data`
    is the digest of that one's own data.
    """
    places, forms, root = base.places, base.places.forms, base.roots
    if forms is None:
        forms = raw_forms(base.pieces.lengths(), base.digest)
    found = ChunkBases(
        places.segment.copy(), places.offset.copy(), forms.length.copy(), forms.codec.copy(), forms.digest.copy(),
        base.digest.copy(),
    )
    near = forms.codec == CODEC_XOR
    if forms.bases is not None and root is not None:
        found.fill(near, forms.bases)
        found.data[near] = root[near]
    else:
        found.data[near] = 0  # an earlier process has written them: nothing is known of their bases' data
    return found


def _worth_referring(
    base: Base, plan: WritePlan, kept: _native.KeptChunks | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the chunks of resting pieces that the base has, without those that are written again to free a file;
    and of those that may be coded with what lies there as base.
    """
    from flowstone.plan.compaction import to_write_again  # imported here: only where something rests

    first = first_chunks(plan.length)
    rests = np.flatnonzero(plan.rests)
    numbers = spread(first[:-1][rests], np.diff(first)[rests])
    if base.known is not None:
        numbers = numbers[base.known[numbers]]
    forms = base.places.forms
    length = (Chunks.to_come(plan.segment, plan.length).stored_lengths() if forms is None else forms.length)[numbers]
    segment, near = base.places.segment[numbers], np.zeros(0, np.int64)
    if kept is not None:
        roots = roots_of(base)
        digests = kept.digests
        is_near = (digests == roots.data) & (digests != 0) & np.isin(roots.codec, _BASE_CODECS)
        is_near &= plan.of_chunks(plan.width > 0)
        if base.known is not None:
            is_near &= base.known
        near = np.flatnonzero(is_near)
        segment, length = np.append(segment, roots.segment[near]), np.append(length, roots.length[near])
    file_bytes = np.array([row.bytes for row in base.segments], np.int64)
    again = to_write_again(segment, length, file_bytes)
    if again.any():
        log.info("%d bytes that are in little used files are written again", int(length[again].sum()))
    return numbers[~again[: len(numbers)]], near[~again[len(numbers) :]]


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
    for number, file in enumerate(plan.segments):  # one for each path, if the store has several
        here = new & (planned.segment == number)
        if file.chunks and here.any():
            segment[here], offset[here] = len(rows), encoded.offset[here]
            size, header = encoded.file_bytes[number], digest(encode_chunks_header(encoded.file_bytes[number]))
            rows.append(SegmentRow(len(rows), None, file.name, size, CHUNKS_HEADER_BYTES, header))
    fresh = ~same & (encoded.codec == CODEC_XOR)
    roots = () if referred.roots is None else referred.roots.segment[fresh].tolist()
    used = sorted(_files_of(referred.places, np.flatnonzero(same)) | set(roots))
    position = np.full(len(referred.segments), -1, np.int64)
    position[used] = len(rows) + np.arange(len(used))
    rows += [replace(referred.segments[at], id=len(rows) + number) for number, at in enumerate(used)]
    segment[same], offset[same] = position[referred.places.segment[same]], referred.places.offset[same]
    forms = _forms(plan, encoded, referred.places.forms, receipt.digests)
    if forms is not None:
        forms = replace(forms, bases=_bases(encoded, referred, forms, position))
    places = ChunkPlaces(segment.astype(np.uint32), offset, forms)
    return rows, _with_derived(plan, encoded, places, receipt.digests) if encoded.derived.any() else places


def _bases(
    encoded: Encoded, referred: Referred, forms: ChunkForms, position: NDArray[np.int64]
) -> ChunkBases | None:
    """Of the chunks with codec xor, new ones and those that are the base's; None: there are none. `position`: of each
    referred segment among those of the checkpoint.
    """
    near = forms.codec == CODEC_XOR
    if not near.any():
        return None
    found, theirs = ChunkBases.none(len(near)), referred.places.forms
    if referred.roots is not None:
        found.fill(near & ~encoded.same, replace(referred.roots, data=encoded.captured))
    if theirs is not None and theirs.bases is not None:
        found.fill(near & encoded.same, theirs.bases)
    found.segment[near] = position[found.segment[near]]
    return found


def root_digests(
    receipt: Receipt, referred: Referred | None, captured: NDArray[np.uint64]
) -> NDArray[np.uint64] | None:
    """See Base.roots, of a save; `captured`: the digests of its chunks' data."""
    encoded = receipt.encoded
    if encoded is None or referred is None or referred.roots is None:
        return None
    theirs = referred.places.forms
    near = np.where(encoded.same, False if theirs is None else theirs.codec == CODEC_XOR, encoded.codec == CODEC_XOR)
    found = np.where(near, referred.roots.data, captured)
    found[encoded.derived] = 0  # what they follow from has a base of its own
    return found


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
        columns: Sequence[NDArray[np.unsignedinteger]] = (forms.length, forms.codec, forms.digest)
        for column in (*columns, *(forms.bases.columns() if forms.bases else ())):
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
    same; of chunks, without any, as all follow from others.
    """
    known = {row.name for row in segments}
    made = [segment.name for segment in plan.segments]
    if referred is not None:
        made += [row.name for row in referred.segments]
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
