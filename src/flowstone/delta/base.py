"""The base of the next save: the newest committed save, as this rank has written it. The next save may refer to chunks
of its base. The base of a first save comes from adopted_base.py.

A piece is *unchanged* if it is expected to have the same data as in the base: a frozen parameter, or a piece that was
mostly equal in two successive saves. Unchanged pieces are captured and digested like all others, but only chunks that
differ from the base are written (docs/decisions/015).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import BaseCache
from flowstone.commit import publish
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.coordination.messages import Assignment
from flowstone.errors import FlowstoneError, NoCheckpointError, StorageError
from flowstone.format.codec import CAST, PLANES
from flowstone.format.digest import digest
from flowstone.format.index import ChunkForms, ChunkPlaces
from flowstone.format.manifest import SegmentRow
from flowstone.format.segment import CHUNKS_HEADER_BYTES, encode_chunks_header, linked_name
from flowstone.log import log
from flowstone.plan.write import WritePlan
from flowstone.stage.encode import BaseChunks, NearChunks
from flowstone.store.base import EncodedChunks, Receipt, Store
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, Chunks, first_chunks, spread
from flowstone.table.pieces import Pieces

# Error numbers by which a file system refuses hard links
_REFUSALS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
_BASE_CODECS = (CODEC_RAW, PLANES.id)  # a chunk with one of these codecs may be the base of another chunk
_UNCHANGED_SHARE = 0.25  # a piece is written in full if a smaller share of its chunks was equal in two saves


class Base(msgspec.Struct, frozen=True, eq=False):
    """A committed step, as this rank has written it.

    pieces     the pieces that this rank has written, in plan order
    lazy       for each piece, whether the layout marks it as lazy (to be captured after `save` returns)
    digest     digest of each captured chunk's data; or, where `codec` is not raw, of the data encoded with that codec
    places     where the chunks are stored; `segment` is the number of a file in `segments`
    unchanged  for each piece, whether it was mostly equal to the base of this step; None: it was not compared
    loads      number of loads before this step was saved
    known      for each chunk, whether a save may refer to it; None: it may refer to all chunks
    roots      for each chunk the digest of its root's data. The root is the chunk itself; or, if the chunk is stored as
               a difference (codec xor), the chunk from which it differs. None: each chunk is its own root
    codec      the codec to which each `digest` belongs, if the base was read from a checkpoint's index; None: all raw
    """

    step: int
    id: str
    pieces: Pieces
    lazy: NDArray[np.bool_]
    digest: NDArray[np.uint64]
    segments: Sequence[SegmentRow]
    places: ChunkPlaces
    unchanged: NDArray[np.bool_] | None
    loads: int
    known: NDArray[np.bool_] | None = None
    roots: NDArray[np.uint64] | None = None
    codec: NDArray[np.uint8] | None = None

    def has(self, pieces: Pieces) -> bool:
        """Whether the pieces of this base are exactly these, in the same order."""
        return self.pieces is pieces or self.pieces == pieces

    def unchanged_pieces(self, pieces: Pieces, assignment: Assignment) -> NDArray[np.bool_] | None:
        """For each piece of a new plan, whether it is expected to be unchanged; None: no piece is.

        If no two saves have been compared yet, these are the parameters that were found to be frozen since the last
        save: the layout marks them as lazy now, but did not at the last save.
        """
        if not self.has(pieces):
            return None
        unchanged = assignment.lazy() & ~self.lazy if self.unchanged is None else self.unchanged
        return unchanged if unchanged.any() else None

    def compared(
        self, before: Base | None, length: NDArray[np.uint64], same: NDArray[np.bool_] | None = None
    ) -> Base:
        """This base, with `unchanged` set by a comparison with `before`, the base to which this step's save could
        refer.

        length  length of each piece, in bytes
        same    for each chunk, whether its data was the same in `before`; None: determine that from the digests
        """
        if before is None or not before.has(self.pieces):
            return self
        equal = self.digest == before.digest
        return replace(self, unchanged=find_unchanged(equal if same is None else equal | same, length))


def find_unchanged(equal: NDArray[np.bool_], length: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """For each piece, whether enough of its chunks are `equal` to count as unchanged. `length`: length of each piece,
    in bytes.
    """
    first, total = first_chunks(length), np.concatenate([[0], np.cumsum(equal)])
    counts, number = np.diff(first), total[first[1:]] - total[first[:-1]]
    enough: NDArray[np.bool_] = (counts > 0) & (number >= _UNCHANGED_SHARE * counts)
    return enough


class BaseReferences(msgspec.Struct, frozen=True, eq=False):
    """The files of the base to which a save may refer, hard-linked into the save's directory.

    segments  the manifest's rows for these files
    chunks    for each chunk of the plan, the chunk of the base at the same position, to which the save may refer
    places    where these chunks are stored; `segment` is the number of a file in `segments`
    refused   whether the store refuses links; then the next save does not try again
    roots     for each chunk, the chunk from which it may be encoded as a difference; `segment` is the number of a file
              in `segments`, `data` the digest of that chunk's data; None: there are none
    """

    segments: Sequence[SegmentRow]
    chunks: BaseChunks
    places: ChunkPlaces
    refused: bool = False
    roots: ChunkBases | None = None

    @classmethod
    def nothing(cls, chunks: int, *, refused: bool = False) -> BaseReferences:
        """No references, for a plan of `chunks` chunks."""
        none = np.zeros(chunks, np.uint64)
        places = ChunkPlaces(none.astype(np.uint32), none)
        return cls((), BaseChunks(none, np.zeros(chunks, np.bool_)), places, refused)


def refer(
    store: Store, draft: publish.Draft, base: Base | None, plan: WritePlan, kept: BaseCache | None = None
) -> BaseReferences:
    """Link the files of the base that contain unchanged pieces of the plan, or chunks to which differences may be
    stored. If the store refuses links, the save refers to no chunk.

    kept    the chunks whose data is in memory, so that differences to them can be encoded; None: this save encodes no
            differences
    raises  StorageError: the device fails, or is full; no link is left
    """
    if base is None or not base.has(plan.pieces):
        return _with_kept(BaseReferences.nothing(plan.chunks), kept, None)
    numbers, near = _worth_referring(base, plan, kept)
    roots = None if kept is None else roots_of(base)
    needed = sorted(_files_of(base.places, numbers) | (set() if roots is None else set(roots.segment[near].tolist())))
    rows = [_as_linked(base.segments[number], base.id) for number in needed]
    linked: list[str] = []
    try:
        for number, row in zip(needed, rows, strict=True):
            path = path_inside(draft.directory, row.name)
            store.link(path_inside(step_directory(base.step), base.segments[number].name), path)
            linked.append(path)
        # Checked after linking: the linked files belong to this checkpoint, whatever happens to the base's directory.
        if read_manifest(store, step_directory(base.step)).id != base.id:
            raise NoCheckpointError(f"step {base.step} was saved again", next="do nothing: this save writes all data")
    except FlowstoneError as error:
        for path in linked:
            store.remove(path)
        code = error.errno if isinstance(error, StorageError) else None
        if code not in (None, errno.ENOENT, *_REFUSALS):
            raise
        log.info("step %d refers to no earlier checkpoint, and is written in full: %s", draft.step, error)
        return _with_kept(BaseReferences.nothing(plan.chunks, refused=code in _REFUSALS), kept, None)
    known = np.zeros(plan.chunks, np.bool_)
    known[numbers] = True
    position = np.zeros(len(base.segments), np.uint32)
    position[needed] = np.arange(len(needed))
    referred = BaseReferences(rows, BaseChunks(base.digest, known, base.codec), _moved(base.places, position))
    if roots is None:
        return referred
    is_near = np.zeros(plan.chunks, np.bool_)
    is_near[near] = True
    return _with_kept(replace(referred, roots=replace(roots, segment=position[roots.segment])), kept, is_near)


def _with_kept(
    referred: BaseReferences, kept: BaseCache | None, is_base: NDArray[np.bool_] | None
) -> BaseReferences:
    """Return `referred` with the earlier contents of chunks that are kept in memory, from which the encoder computes
    differences. `is_base`: for each chunk, whether a linked file contains that earlier content; only then may the save
    store the chunk as a difference from it. None: no chunk has such a file.
    """
    if kept is None:
        return referred
    digest = np.zeros_like(referred.chunks.digest) if referred.roots is None else referred.roots.data
    is_base = np.zeros(len(digest), np.bool_) if is_base is None else is_base
    return replace(referred, chunks=replace(referred.chunks, near=NearChunks(kept, digest, is_base)))


def _files_of(places: ChunkPlaces, numbers: NDArray[np.int64]) -> set[int]:
    """The numbers of the segment files with these chunks, or with chunks from which they are stored as differences."""
    segments = set(places.segment[numbers].tolist())
    if places.forms is not None and places.forms.bases is not None:
        segments |= set(places.forms.bases.segment[numbers[places.forms.codec[numbers] == CODEC_XOR]].tolist())
    return segments


def _moved(places: ChunkPlaces, position: NDArray[np.uint32]) -> ChunkPlaces:
    """The same places, with the number n of each segment file replaced by `position[n]`."""
    forms = places.forms
    if forms is not None and forms.bases is not None:
        forms = replace(forms, bases=replace(forms.bases, segment=position[forms.bases.segment]))
    return replace(places, segment=position[places.segment], forms=forms)


def roots_of(base: Base) -> ChunkBases:
    """For each chunk its root, from which later saves may encode differences: the chunk itself; or, if the chunk is
    stored as a difference, the chunk from which it differs. `data` is the digest of the root's data.
    """
    places, forms, root = base.places, base.places.forms, base.roots
    if forms is None:
        forms = ChunkForms.of_raw(base.pieces.lengths(), base.digest)
    roots = ChunkBases(
        places.segment.copy(), places.offset.copy(), forms.length.copy(), forms.codec.copy(), forms.digest.copy(),
        base.digest.copy(),
    )
    near = forms.codec == CODEC_XOR
    if forms.bases is not None and root is not None:
        roots.fill(near, forms.bases)
        roots.data[near] = root[near]
    else:
        roots.data[near] = 0  # 0: unknown, as an earlier process has written these chunks
    return roots


def _worth_referring(
    base: Base, plan: WritePlan, kept: BaseCache | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of two kinds of chunks: chunks of unchanged pieces, except chunks that compaction writes again; and
    chunks that may be encoded as differences to a chunk of the base.
    """
    from flowstone.delta.compaction import chunks_to_rewrite  # imported here: only with unchanged pieces

    first = first_chunks(plan.length)
    unchanged = np.flatnonzero(plan.unchanged)
    numbers = spread(first[:-1][unchanged], np.diff(first)[unchanged])
    if base.known is not None:
        numbers = numbers[base.known[numbers]]
    forms = base.places.forms
    length = (Chunks.unwritten(plan.segment, plan.length).stored_lengths() if forms is None else forms.length)[numbers]
    segment, near = base.places.segment[numbers], np.zeros(0, np.int64)
    if kept is not None:
        roots = roots_of(base)
        digests = kept.digests
        is_near = (digests == roots.data) & (digests != 0) & np.isin(roots.codec, _BASE_CODECS)
        is_near &= plan.per_chunk(plan.width > 0)
        if base.known is not None:
            is_near &= base.known
        near = np.flatnonzero(is_near)
        segment, length = np.append(segment, roots.segment[near]), np.append(length, roots.length[near])
    file_bytes = np.array([row.bytes for row in base.segments], np.int64)
    again = chunks_to_rewrite(segment, length, file_bytes)
    if again.any():
        log.info(
            "compaction: %d bytes in mostly unused files are written again, so that these files can be removed",
            int(length[again].sum()),
        )
    return numbers[~again[: len(numbers)]], near[~again[len(numbers) :]]


def _as_linked(row: SegmentRow, home: str) -> SegmentRow:
    """The row for a file of the base in the manifest of a checkpoint that links to this file: with the linked name, and
    the id of the checkpoint that wrote the file. `home`: that id, for a row that does not have one yet.
    """
    if row.home is not None:
        return row
    return replace(row, home=home, name=linked_name(home, row.name))


def stored_chunks(
    segments: Sequence[SegmentRow], plan: WritePlan, offsets: NDArray[np.uint64], referred: BaseReferences | None,
    receipt: Receipt,
) -> tuple[Sequence[SegmentRow], ChunkPlaces | None]:
    """The segment files of a save, and where its chunks are stored; None: all are where the plan has put their pieces.

    segments  the manifest's rows for those of this rank's segment files whose headers list pieces. The result also has
              the files with the entry `__chunks__` (docs/FORMAT.md, Delta), and files of the base
    offsets   offset of each piece in its segment file, in bytes
    """
    encoded = receipt.encoded
    if encoded is None:
        return segments, None
    referred = referred or BaseReferences.nothing(plan.chunks)
    rows, same = list(segments), encoded.same
    new = plan.per_chunk(plan.in_chunk_segment) & ~same & ~encoded.derived
    planned = places_of(plan, offsets)
    segment, offset = planned.segment.astype(np.int64), planned.offset.copy()
    for number, file in enumerate(plan.segments):  # one segment for each path, if the store has several paths
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
    rows += [replace(referred.segments[old_id], id=len(rows) + number) for number, old_id in enumerate(used)]
    segment[same], offset[same] = position[referred.places.segment[same]], referred.places.offset[same]
    forms = _forms(plan, encoded, referred.places.forms, receipt.digests)
    if forms is not None:
        forms = replace(forms, bases=_bases(encoded, referred, forms, position))
    places = ChunkPlaces(segment.astype(np.uint32), offset, forms)
    return rows, _with_derived(plan, encoded, places, receipt.digests) if encoded.derived.any() else places


def _bases(
    encoded: EncodedChunks, referred: BaseReferences, forms: ChunkForms, position: NDArray[np.int64]
) -> ChunkBases | None:
    """For all chunks that are stored as differences (codec xor), new ones and chunks of the base: the chunks from which
    they differ. None: there are no such chunks. `position`: for each file of `referred`, its number among the
    checkpoint's segment files.
    """
    near = forms.codec == CODEC_XOR
    if not near.any():
        return None
    bases, theirs = ChunkBases.empty(len(near)), referred.places.forms
    if referred.roots is not None:
        bases.fill(near & ~encoded.same, replace(referred.roots, data=encoded.captured))
    if theirs is not None and theirs.bases is not None:
        bases.fill(near & encoded.same, theirs.bases)
    bases.segment[near] = position[bases.segment[near]]
    return bases


def root_digests(
    receipt: Receipt, referred: BaseReferences | None, captured: NDArray[np.uint64]
) -> NDArray[np.uint64] | None:
    """The `roots` of a save's Base. `captured`: the digests of its chunks' data."""
    encoded = receipt.encoded
    if encoded is None or referred is None or referred.roots is None:
        return None
    theirs = referred.places.forms
    near = np.where(encoded.same, False if theirs is None else theirs.codec == CODEC_XOR, encoded.codec == CODEC_XOR)
    digests = np.where(near, referred.roots.data, captured)
    digests[encoded.derived] = 0  # derived chunks are not stored; only the chunk from which they derive may have a base
    return digests


def _forms(
    plan: WritePlan, encoded: EncodedChunks, of_base: ChunkForms | None, digests: NDArray[np.uint64]
) -> ChunkForms | None:
    """How each chunk is stored: its codec and lengths. Chunks of the base are stored as in the base. None: all chunks
    are stored unencoded.
    """
    same = encoded.same
    new = plan.per_chunk(plan.is_encoded) & ~same & ~encoded.derived
    if not encoded.codec[new].any() and (of_base is None or not of_base.codec[same].any()):
        return None
    forms = ChunkForms.of_raw(plan.length, digests)
    forms.length[new], forms.codec[new] = encoded.length[new], encoded.codec[new]
    if of_base is not None:
        forms.length[same], forms.codec[same] = of_base.length[same], of_base.codec[same]
        forms.digest[same] = of_base.digest[same]
    return forms


def _with_derived(
    plan: WritePlan, encoded: EncodedChunks, places: ChunkPlaces, digests: NDArray[np.uint64]
) -> ChunkPlaces:
    """The same places, with those of derived chunks (which are not stored) filled in. A copy, which equals its source,
    gets the place of its source. A cast, which is rounded from its source, has no place in a file: its `segment` is 0,
    and its `offset` is the number of its (first) source chunk.
    """
    source, segment, offset, forms = plan.source_chunks(), places.segment.copy(), places.offset.copy(), places.forms
    copies, casts = (encoded.derived & (encoded.codec == codec) for codec in (CODEC_RAW, CAST.id))
    segment[copies], offset[copies] = segment[source[copies]], offset[source[copies]]
    if forms is None and casts.any():
        forms = ChunkForms.of_raw(plan.length, digests)
    if forms is not None:
        columns: Sequence[NDArray[np.unsignedinteger]] = (forms.length, forms.codec, forms.digest)
        for column in (*columns, *(forms.bases.columns() if forms.bases else ())):
            column[copies] = column[source[copies]]
        forms.length[casts], forms.codec[casts], forms.digest[casts] = 0, CAST.id, digests[casts]
        segment[casts], offset[casts] = 0, source[casts]
    return ChunkPlaces(segment, offset, forms)


def captured_digests(plan: WritePlan, receipt: Receipt) -> NDArray[np.uint64]:
    """The digest of the data of each captured chunk, before encoding."""
    if receipt.encoded is None:
        return receipt.digests
    return np.where(plan.per_chunk(plan.in_chunk_segment), receipt.encoded.captured, receipt.digests)


def unneeded(plan: WritePlan, referred: BaseReferences | None, segments: Sequence[SegmentRow]) -> list[str]:
    """Names of files that were created for a save but are not among its segments: links to files of the base from which
    no chunk is used, and files that stay empty because all their chunks are derived.
    """
    used = {row.name for row in segments}
    made = [segment.name for segment in plan.segments]
    if referred is not None:
        made += [row.name for row in referred.segments]
    return [name for name in made if name not in used]


def places_of(plan: WritePlan, offsets: NDArray[np.uint64]) -> ChunkPlaces:
    """Where each chunk is stored if all pieces are stored as planned. `offsets`: offset of each piece in its segment
    file, in bytes.
    """
    return ChunkPlaces.of_raw(plan.segment, offsets, plan.length)
