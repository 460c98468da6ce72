"""Verification: every byte of every file of a checkpoint, padding included, without a tensor library.

Of a base's files, the bytes that the checkpoint refers to: the rest is another's.
Segments are checked in shares of bytes: one, or several by processes that need not be on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.commit import read as contents
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import CHUNK_BYTES
from flowstone.errors import FlowstoneError, FormatError, StorageError, is_damage
from flowstone.format.codec import CAST
from flowstone.format.derived import cast_chunks, halves_of, stored_columns
from flowstone.format.digest import digest, zero_digest
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest, SegmentRow
from flowstone.format.segment import CHUNKS_ENTRY, PAD_PREFIX, Entry, entry_name, parse_header
from flowstone.store.base import Store, finish_reading
from flowstone.table.chunks import CODEC_XOR, BaseColumns, Chunks, spread


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference from what was written."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for one checkpoint. `extra`: files that the manifest does not mention, which are harmless."""

    step: int
    findings: tuple[Finding, ...]
    checked_bytes: int
    extra: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.findings


class _Runs(msgspec.Struct, frozen=True, eq=False):
    """Runs of at most CHUNK_BYTES of a segment, as columns, each with its expected digest.

    length      as stored
    piece       index row of the piece that the run is a chunk of; -1 for padding
    chunk       number of the run in that piece
    data_bytes  length of the data that it is stored for, with `codec`
    """

    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    digest: NDArray[np.uint64]
    piece: NDArray[np.int64]
    chunk: NDArray[np.int64]
    data_bytes: NDArray[np.int64]
    codec: NDArray[np.uint8]

    def within(self, begin: int, end: int) -> _Runs:
        """Those that begin in bytes [begin, end) of the segment."""
        first, last = np.searchsorted(self.offset, (begin, end)).tolist()
        return _Runs(*(getattr(self, name)[first:last] for name in self.__struct_fields__))

    def told(self, at: int, index: Index) -> str:
        """A run, as text for a finding."""
        begin, piece = int(self.offset[at]), int(self.piece[at])
        reach = f"bytes {begin}..{begin + int(self.length[at])}"
        if piece < 0:
            return f"padding, {reach}"
        return f"tensor {index.tensors.names[int(index.pieces.tensor[piece])]!r}, chunk {int(self.chunk[at])}, {reach}"


class Share(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of a checkpoint's segments, as if these lay end to end. A segment's header, and each chunk,
    belongs to the share in which it begins."""

    begin: int
    end: int

    def owns(self, at: int) -> bool:
        """Whether what begins at that byte belongs to it."""
        return self.begin <= at < self.end


Findings: TypeAlias = tuple[Finding, ...]


def verify(
    store: Store, directory: str, check_all: Callable[[Manifest, Index | None], Iterable[Finding]]
) -> Verified:
    """Check every byte that the manifest in `directory` lists. Blocks.

    check_all  checks the segments: by `check_share`, of one share or several
    raises     NoCheckpointError; DamagedError if the manifest itself is damaged; StorageError if a file could not be
               read for a reason other than damage
    """
    manifest = read_manifest(store, directory)
    findings: list[Finding] = []
    index = _gather(findings, "index.safetensors", lambda: contents.read_index(store, directory, manifest))
    _gather(findings, "objects.json", lambda: contents.read_objects(store, directory, manifest))
    order = {row.name: number for number, row in enumerate(manifest.segments)}
    found = check_all(manifest, index)
    findings += sorted(found, key=lambda finding: order.get(finding.file, len(order)))
    known = {row.name for row in manifest.segments} | {manifest.index.name, manifest.objects.name, MANIFEST_NAME}
    extra = tuple(name for name in store.names(directory) if name not in known)
    return Verified(manifest.step, tuple(findings), _bytes(store, directory, manifest), extra)


def segment_bytes(manifest: Manifest) -> int:
    """The length of all segments: a share from 0 to there is all of them."""
    return sum(row.bytes for row in manifest.segments)


@dataclass(frozen=True, slots=True)
class Checked:
    """A checkpoint whose manifest and index were read; without an index, only headers can be checked."""

    store: Store
    directory: str
    manifest: Manifest
    index: Index | None


def check_share(
    checked: Checked, share: Share, arena: _native.Arena, on_progress: Callable[[int], None] | None = None
) -> Findings:
    """What differs in a share of the segments. Blocks.

    on_progress  is told the bytes done
    raises       StorageError if a file could not be read for a reason other than damage
    """
    findings: list[Finding] = []
    store, directory, index = checked.store, checked.directory, checked.index
    begins = [0, *accumulate(row.bytes for row in checked.manifest.segments)]
    sound: list[tuple[SegmentRow, int]] = []
    for row, begin, end in zip(checked.manifest.segments, begins[:-1], begins[1:], strict=True):
        if end <= share.begin or share.end <= begin:
            continue
        own: list[Finding] = []  # told once, by the share that the header belongs to
        if _segment_is_whole(store, directory, row, own):
            sound.append((row, begin))
            if index is not None and row.home is None and share.owns(begin):  # a base's header lists what that has
                _check_entries(store, directory, row, index, own)
        findings += own if share.owns(begin) else []
    if index is not None:
        if share.owns(0):
            _check_casts(checked, index, arena, findings)
        runs = [
            run.within(share.begin - begin, share.end - begin)
            for run, (_, begin) in zip(_runs(index.chunks, [row for row, _ in sound]), sound, strict=True)
        ]
        _check_runs(checked, [row for row, _ in sound], runs, arena, on_progress, findings)
    return tuple(findings)


def _gather(findings: list[Finding], file: str, check: Callable[[], Index | object]) -> Index | None:
    try:
        result = check()
    except (FormatError, StorageError) as error:
        findings.append(_finding(file, error))
        return None
    return result if isinstance(result, Index) else None


def _finding(file: str, error: FlowstoneError) -> Finding:
    """The finding for an error on a file. Raises the error again if it does not show damage."""
    if not is_damage(error):
        raise error
    return Finding(file, str(error))


def _segment_is_whole(store: Store, directory: str, row: SegmentRow, findings: list[Finding]) -> bool:
    """Check size and header; a difference is a finding, and the segment is not checked further."""
    path = inside(directory, row.name)
    if not store.exists(path):
        findings.append(Finding(row.name, "is missing"))
        return False
    try:
        size = store.size(path)
        if size != row.bytes:
            findings.append(Finding(row.name, f"has {size} bytes instead of {row.bytes}"))
            return False
        found = digest(store.read(path, length=row.header_bytes))
    except StorageError as error:
        findings.append(_finding(row.name, error))
        return False
    if found != row.header_digest:
        findings.append(Finding(row.name, f"header, bytes 0..{row.header_bytes}: not what was written"))
    return True


def _check_entries(store: Store, directory: str, row: SegmentRow, index: Index, findings: list[Finding]) -> None:
    """Check that header and index agree, so that other readers see the same tensors as ours."""
    path = inside(directory, row.name)
    try:
        entries, _, start = parse_header(store.read(path, length=row.header_bytes), path=path)
    except (FormatError, StorageError) as error:
        findings.append(_finding(row.name, error))
        return
    expected, chunks = {}, index.chunks
    if chunks.stored is not None:  # pieces without elements have no place
        entries = {name: entry for name, entry in entries.items() if entry.end > entry.begin}
    if list(entries) == [CHUNKS_ENTRY]:
        _check_whole_entry(row, entries[CHUNKS_ENTRY], start, findings)
        return
    segment, offset = chunks.extents()
    pieces = np.flatnonzero(segment == row.id)
    rows, length = index.pieces.tensor[pieces], chunks.length[pieces].astype(np.int64)
    whole = length == index.tensors.lengths[rows]
    begins = offset[pieces] - start
    columns = pieces, rows, whole, begins, begins + length
    for piece, tensor, is_whole, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        name, dtype, shape = index.tensors.names[tensor], index.tensors.dtypes[tensor], index.tensors.shapes[tensor]
        if not is_whole or 0 in shape:
            box = index.pieces.box(piece)
            name, shape = entry_name(name, box, shape), box.shape
        expected[name] = (dtype.stored, (*shape, dtype.item_bytes) if dtype.as_bytes else shape, begin, end)
    found = {e.name: (e.dtype, e.shape, e.begin, e.end) for e in entries.values() if not e.name.startswith(PAD_PREFIX)}
    differing = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    listed = {place[2:] for name, place in found.items() if expected.get(name) == place}
    differing = [name for name in differing if name in found or expected[name][2:] not in listed]  # others are copies
    findings += [Finding(row.name, f"entry {name!r} differs between header and index") for name in differing]
    if entries and start + max(entry.end for entry in entries.values()) != row.bytes:
        findings.append(Finding(row.name, "the header does not account for the whole file"))


def _check_whole_entry(row: SegmentRow, entry: Entry, start: int, findings: list[Finding]) -> None:
    """Check the entry of a segment that holds chunks, not pieces."""
    bytes_ = row.bytes - start
    if (entry.dtype, entry.shape, entry.begin, entry.end) != ("U8", (bytes_,), 0, bytes_):
        findings.append(Finding(row.name, f"entry {CHUNKS_ENTRY!r} does not account for the whole file"))


def _check_runs(
    checked: Checked, segments: Sequence[SegmentRow], runs: Sequence[_Runs], arena: _native.Arena,
    on_progress: Callable[[int], None] | None, findings: list[Finding],
) -> None:
    assert checked.index is not None, "runs come from the index"
    counts = [len(run.offset) for run in runs]
    none = np.zeros(0, np.int64)  # for a share without an undamaged segment
    offset, length, digests = (
        np.concatenate([none.astype(np.uint64), *(getattr(run, name).astype(np.uint64) for run in runs)])
        for name in ("offset", "length", "digest")
    )
    count, file = len(offset), np.repeat(np.arange(len(segments), dtype=np.uint32), counts)
    codec = np.concatenate([none.astype(np.uint8), *(run.codec for run in runs)])
    data_bytes = np.concatenate([none.astype(np.uint64), *(run.data_bytes.astype(np.uint64) for run in runs)])
    bases, lacking = _bases(checked, checked.index.chunks, runs, len(segments))
    codec[lacking], data_bytes[lacking] = 0, length[lacking]  # what is stored is checked, and told of the base's file
    stored = (file, offset, length.astype(np.uint32), codec) if codec.any() else None  # encoded chunks are decoded, too
    rows = _native.ReadExtents(
        file=file, offset=offset, length=data_bytes,
        address=np.full(count, _native.VERIFY_ONLY, np.uint64), chunk=np.arange(count, dtype=np.uint64),
        first=np.zeros(count, np.uint64), last=np.ones(count, np.uint64), layout=np.full(count, -1, np.int64),
        layouts=[], digests=digests, stored=stored, bases=bases,
    )
    paths = [inside(checked.directory, row.name) for row in [*segments, *checked.manifest.segments]]
    reading = checked.store.read_extents(
        paths, rows, arena, wanted_bytes=int(length.sum()), stop_at_bad=False, past_cache=True
    )
    receipt = finish_reading(reading, on_progress)
    ends = np.cumsum(counts)
    for position in receipt.bad.tolist():
        segment = int(np.searchsorted(ends, position, side="right"))
        at = position - (int(ends[segment]) - counts[segment])
        told = runs[segment].told(at, checked.index)
        findings.append(Finding(segments[segment].name, f"{told}: not what was written"))
    if receipt.error is not None:
        findings.append(_finding(checked.directory, receipt.error))


def _bases(
    checked: Checked, chunks: Chunks, runs: Sequence[_Runs], first_file: int
) -> tuple[BaseColumns | None, NDArray[np.int64]]:
    """The bases of runs, for the engine, and the numbers of runs whose base is in a file that is not there."""
    none = np.zeros(0, np.int64)
    if chunks.stored is None or chunks.stored.bases is None:
        return None, none
    piece, chunk = (np.concatenate([none, *(getattr(run, name) for run in runs)]) for name in ("piece", "chunk"))
    at = np.flatnonzero(piece >= 0)
    numbers = chunks.first[piece[at]] + chunk[at]
    there = np.array([_is_there(checked, row) for row in checked.manifest.segments], np.bool_)
    is_near = chunks.stored.codec[numbers] == CODEC_XOR
    is_lacking = is_near & ~there[chunks.stored.bases.segment[numbers]]
    found = chunks.bases_of(numbers[~is_lacking], first_file=first_file)
    if found is not None:
        found = at[~is_lacking][found[0].astype(np.int64)].astype(np.uint64), *found[1:]
    return found, at[is_lacking]


def _is_there(checked: Checked, row: SegmentRow) -> bool:
    path = inside(checked.directory, row.name)
    return checked.store.exists(path) and checked.store.size(path) == row.bytes


def _check_casts(checked: Checked, index: Index, arena: _native.Arena, findings: list[Finding]) -> None:
    """Check that what is rounded from other chunks is what was saved. Damage of these chunks is found elsewhere."""
    chunks = index.chunks
    numbers = _with_sources(checked, chunks, cast_chunks(chunks))
    if not len(numbers):
        return
    piece, within = chunks.locate(numbers)
    count = len(numbers)
    rows = _native.ReadExtents(
        file=np.zeros(count, np.uint32), offset=np.zeros(count, np.uint64), length=chunks.length[piece],
        address=np.full(count, _native.VERIFY_ONLY, np.uint64), chunk=chunks.first[piece].astype(np.uint64),
        first=within.astype(np.uint64), last=within.astype(np.uint64) + np.uint64(1),
        layout=np.full(count, -1, np.int64), layouts=[], digests=chunks.digest,
        stored=stored_columns(chunks, index.pieces), bases=chunks.bases_of(np.arange(int(chunks.first[-1]))),
    )
    paths = [inside(checked.directory, row.name) for row in checked.manifest.segments]
    read_bytes = 2 * int(chunks.logical_bytes(piece, within, within + 1).sum())
    receipt = finish_reading(checked.store.read_extents(
        paths, rows, arena, wanted_bytes=read_bytes, stop_at_bad=False, past_cache=True
    ))
    if receipt.error is not None:  # some may not have been looked at
        findings.append(_finding(checked.directory, receipt.error))
    for number in np.intersect1d(receipt.bad.astype(np.int64), numbers).tolist():
        of, at = chunks.locate(np.array([number]))
        name = index.tensors.names[int(index.pieces.tensor[int(of[0])])]
        told = f"tensor {name!r}, chunk {int(at[0])}: what it is rounded from gives something else"
        findings.append(Finding(checked.manifest.index.name, told))


def _with_sources(checked: Checked, chunks: Chunks, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of chunks that are rounded, those whose sources are in files that are there, and what these are decoded with."""
    if chunks.stored is None or not len(numbers):
        return numbers
    there = np.array([_is_there(checked, row) for row in checked.manifest.segments], np.bool_)
    is_readable = there[chunks.stored.segment]
    if chunks.stored.bases is not None:
        is_near = chunks.stored.codec == CODEC_XOR
        is_readable[is_near] &= there[chunks.stored.bases.segment[is_near]]
    piece, within = chunks.locate(numbers)
    first = chunks.stored.offset[numbers].astype(np.int64)
    last = first + halves_of(chunks.logical_bytes(piece, within, within + 1)) - 1
    found: NDArray[np.int64] = numbers[is_readable[first] & is_readable[last]]
    return found


def _runs(chunks: Chunks, segments: Sequence[SegmentRow]) -> list[_Runs]:
    """For each segment: every chunk, and every run of padding, after its header; ascending. Of a base's, its chunks."""
    piece, chunk = chunks.locate(np.arange(int(chunks.first[-1])))
    segment, offset = chunks.stored_at(piece, chunk)
    codecs = chunks.codecs()
    length: NDArray[np.uint32] = chunks.stored_lengths()
    order = np.lexsort((chunks.digest, length, codecs, offset, segment))
    order = order[codecs[order] != CAST.id]
    alike = segment, offset, codecs, length, chunks.digest  # only copies are checked once
    is_new = np.any([column[order][1:] != column[order][:-1] for column in alike], axis=0)
    order = order[np.append(np.ones(min(1, len(order)), np.bool_), is_new)]
    ids = np.array([row.id for row in segments], np.int64)
    starts, stops = (np.searchsorted(segment[order], ids, side=side).tolist() for side in ("left", "right"))
    found: list[_Runs] = []
    data_bytes = chunks.logical_bytes(piece, chunk, chunk + 1)
    for row, start, stop in zip(segments, starts, stops, strict=True):
        here = order[start:stop]
        stored = _Runs(
            offset[here], length[here].astype(np.int64), chunks.digest[here], piece[here], chunk[here],
            data_bytes[here], codecs[here],
        )
        found.append(_with_padding(stored, row) if row.home is None else stored)
    return found


def _with_padding(stored: _Runs, row: SegmentRow) -> _Runs:
    """The same chunks of a segment, and the padding between them."""
    begins, ends = np.append(row.header_bytes, stored.offset + stored.length), np.append(stored.offset, row.bytes)
    cuts = -(-(ends - begins) // CHUNK_BYTES)
    offset = np.repeat(begins, cuts) + spread(np.zeros(len(cuts), np.int64), cuts) * CHUNK_BYTES
    length = np.minimum(CHUNK_BYTES, np.repeat(ends, cuts) - offset)
    zeros = {length: zero_digest(length) for length in set(length.tolist())}
    digests = np.array([zeros[length] for length in length.tolist()], np.uint64)
    nothing = np.zeros(len(offset), np.int64)
    order = np.argsort(np.concatenate([stored.offset, offset]))
    return _Runs(
        np.concatenate([stored.offset, offset])[order], np.concatenate([stored.length, length])[order],
        np.concatenate([stored.digest, digests])[order], np.concatenate([stored.piece, nothing - 1])[order],
        np.concatenate([stored.chunk, nothing])[order],
        np.concatenate([stored.data_bytes, length])[order],
        np.concatenate([stored.codec, nothing.astype(np.uint8)])[order],
    )


def _bytes(store: Store, directory: str, manifest: Manifest) -> int:
    listed = manifest.index.bytes + manifest.objects.bytes + sum(row.bytes for row in manifest.segments)
    return listed + store.size(inside(directory, MANIFEST_NAME))
