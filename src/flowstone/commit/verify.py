"""Verification: checks every byte of every file of a checkpoint, padding included, without a tensor library.

In files of earlier checkpoints, only the bytes that this checkpoint refers to are checked. The bytes of all segments
are divided into shares; each process, possibly on another machine, checks one share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import Arena, ReadExtents
from flowstone.commit import read as contents
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.config import CHUNK_BYTES
from flowstone.errors import FlowstoneError, FormatError, StorageError, is_damage
from flowstone.format.codec import CAST
from flowstone.format.derived import cast_chunks, source_chunk_counts, stored_columns
from flowstone.format.digest import digest, zero_digest
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest, SegmentRow
from flowstone.format.segment import CHUNKS_ENTRY, PAD_PREFIX, HeaderEntry, entry_name, parse_header
from flowstone.store.base import Store, finish_reading
from flowstone.table.chunks import CODEC_XOR, BaseColumns, Chunks, spread


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a file: what is wrong, and where."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying one checkpoint. `extra`: files that the manifest does not mention; they are harmless."""

    step: int
    findings: tuple[Finding, ...]
    checked_bytes: int
    extra: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.findings


class _Runs(msgspec.Struct, frozen=True, eq=False):
    """The ranges of a segment's bytes that are checked: its chunks and the padding between them, each at most
    CHUNK_BYTES long. Each array has one entry for each range; `digest` is the expected one.

    length      stored length
    piece       position, in the index, of the piece to which the chunk belongs; -1 for padding
    chunk       number of the chunk in that piece
    data_bytes  length before encoding by `codec`
    """

    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    digest: NDArray[np.uint64]
    piece: NDArray[np.int64]
    chunk: NDArray[np.int64]
    data_bytes: NDArray[np.int64]
    codec: NDArray[np.uint8]

    def within(self, begin: int, end: int) -> _Runs:
        """The ranges that begin in bytes `begin` to `end` - 1 of the segment."""
        first, last = np.searchsorted(self.offset, (begin, end)).tolist()
        return _Runs(*(getattr(self, name)[first:last] for name in self.__struct_fields__))

    def describe(self, row: int, index: Index) -> str:
        """The text of a finding about the range number `row`: it names the tensor and the chunk, or says that it is
        padding.
        """
        begin, piece = int(self.offset[row]), int(self.piece[row])
        reach = f"bytes {begin}..{begin + int(self.length[row])}"
        if piece < 0:
            return f"padding, {reach}"
        return f"tensor {index.tensors.names[int(index.pieces.tensor[piece])]!r}, chunk {int(self.chunk[row])}, {reach}"


class VerifyShare(msgspec.Struct, frozen=True):
    """The part of a checkpoint that one process checks: bytes `begin` to `end` - 1 of its segments, as if they were
    concatenated. A segment's header, and each chunk, belongs to the share in which it begins.
    """

    begin: int
    end: int

    def owns(self, offset: int) -> bool:
        """Whether a header or chunk that begins at this byte belongs to the share."""
        return self.begin <= offset < self.end


Findings: TypeAlias = tuple[Finding, ...]


def verify(
    store: Store, directory: str, check_all: Callable[[Manifest, Index | None], Iterable[Finding]]
) -> Verified:
    """Check every byte that the manifest in `directory` lists. Blocks.

    check_all  checks the segments, by calling `check_share` for one share or several
    raises     NoCheckpointError; DamagedError if the manifest itself is damaged; StorageError if a file could not be
               read for a reason other than damage
    """
    manifest = read_manifest(store, directory)
    findings: list[Finding] = []
    index = _gather(findings, "index.safetensors", lambda: contents.read_index(store, directory, manifest))
    _gather(findings, "objects.json", lambda: contents.read_objects(store, directory, manifest))
    order = {row.name: number for number, row in enumerate(manifest.segments)}
    differences = check_all(manifest, index)
    findings += sorted(differences, key=lambda finding: order.get(finding.file, len(order)))
    listed = {row.name for row in manifest.segments} | {manifest.index.name, manifest.objects.name, MANIFEST_NAME}
    extra = tuple(name for name in store.names(directory) if name not in listed)
    return Verified(manifest.step, tuple(findings), _bytes(store, directory, manifest), extra)


def segment_bytes(manifest: Manifest) -> int:
    """The length of all segments together, in bytes. A share from 0 to this length covers all of them."""
    return sum(row.bytes for row in manifest.segments)


class CheckedFiles(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint that is checked: its directory, manifest and index. `index` is None if the index is damaged: then
    only the segments' headers can be checked.
    """

    store: Store
    directory: str
    manifest: Manifest
    index: Index | None


def check_share(
    checked: CheckedFiles, share: VerifyShare, arena: Arena, on_progress: Callable[[int], None] | None = None
) -> Findings:
    """Check a share (a part) of the segments, and return the faults that were found. Blocks.

    on_progress  called with the number of bytes checked
    raises       StorageError if a file could not be read for a reason other than damage
    """
    findings: list[Finding] = []
    store, directory, index = checked.store, checked.directory, checked.index
    begins = [0, *accumulate(row.bytes for row in checked.manifest.segments)]
    sound: list[tuple[SegmentRow, int]] = []
    for row, begin, end in zip(checked.manifest.segments, begins[:-1], begins[1:], strict=True):
        if end <= share.begin or share.end <= begin:
            continue
        own: list[Finding] = []  # reported only by the share in which the header begins
        if _segment_is_whole(store, directory, row, own):
            sound.append((row, begin))
            # the header of an earlier checkpoint's file lists that checkpoint's tensors
            if index is not None and row.home is None and share.owns(begin):
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
    """The finding for an error that means damage of a file. Raises any other error again."""
    if not is_damage(error):
        raise error
    return Finding(file, str(error))


def _segment_is_whole(store: Store, directory: str, row: SegmentRow, findings: list[Finding]) -> bool:
    """Check a segment's size and header, and add faults to `findings`. Returns whether the segment's chunks can be
    checked.
    """
    path = path_inside(directory, row.name)
    if not store.exists(path):
        findings.append(Finding(row.name, "is missing"))
        return False
    try:
        size = store.size(path)
        if size != row.bytes:
            findings.append(Finding(row.name, f"has {size} bytes instead of {row.bytes}"))
            return False
        header_digest = digest(store.read(path, length=row.header_bytes))
    except StorageError as error:
        findings.append(_finding(row.name, error))
        return False
    if header_digest != row.header_digest:
        findings.append(Finding(row.name, f"header, bytes 0..{row.header_bytes}: does not match its digest"))
    return True


def _check_entries(store: Store, directory: str, row: SegmentRow, index: Index, findings: list[Finding]) -> None:
    """Check that a segment's header and the index agree, so that other readers of safetensors files see the same
    tensors.
    """
    path = path_inside(directory, row.name)
    try:
        entries, _, start = parse_header(store.read(path, length=row.header_bytes), path=path)
    except (FormatError, StorageError) as error:
        findings.append(_finding(row.name, error))
        return
    expected, chunks = {}, index.chunks
    if chunks.stored is not None:  # pieces without elements are not stored
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
    actual = {e.name: (e.dtype, e.shape, e.begin, e.end) for e in entries.values() if not e.name.startswith(PAD_PREFIX)}
    differing = [name for name in sorted(expected.keys() | actual.keys()) if expected.get(name) != actual.get(name)]
    listed = {place[2:] for name, place in actual.items() if expected.get(name) == place}
    # A tensor without an entry of its own is a copy of another tensor, if the header lists that tensor's bytes under
    # the expected name.
    differing = [name for name in differing if name in actual or expected[name][2:] not in listed]
    findings += [Finding(row.name, f"entry {name!r} differs between header and index") for name in differing]
    if entries and start + max(entry.end for entry in entries.values()) != row.bytes:
        findings.append(Finding(row.name, "its header does not describe the end of the file"))


def _check_whole_entry(row: SegmentRow, entry: HeaderEntry, start: int, findings: list[Finding]) -> None:
    """Check the only entry of a segment that stores chunks in any order instead of whole pieces."""
    bytes_ = row.bytes - start
    if (entry.dtype, entry.shape, entry.begin, entry.end) != ("U8", (bytes_,), 0, bytes_):
        findings.append(Finding(row.name, f"entry {CHUNKS_ENTRY!r} does not reach the end of the file"))


def _check_runs(
    checked: CheckedFiles, segments: Sequence[SegmentRow], runs: Sequence[_Runs], arena: Arena,
    on_progress: Callable[[int], None] | None, findings: list[Finding],
) -> None:
    assert checked.index is not None, "there are no runs without an index"
    counts = [len(run.offset) for run in runs]
    none = np.zeros(0, np.int64)  # used if no undamaged segment is in the share
    offset, length, digests = (
        np.concatenate([none.astype(np.uint64), *(getattr(run, name).astype(np.uint64) for run in runs)])
        for name in ("offset", "length", "digest")
    )
    count, file = len(offset), np.repeat(np.arange(len(segments), dtype=np.uint32), counts)
    codec = np.concatenate([none.astype(np.uint8), *(run.codec for run in runs)])
    data_bytes = np.concatenate([none.astype(np.uint64), *(run.data_bytes.astype(np.uint64) for run in runs)])
    bases, lacking = _bases(checked, checked.index.chunks, runs, len(segments))
    # checked without decoding; a missing base file has its own finding
    codec[lacking], data_bytes[lacking] = 0, length[lacking]
    # encoded chunks are checked after decoding, too
    stored = (file, offset, length.astype(np.uint32), codec) if codec.any() else None
    rows = ReadExtents(
        file=file, offset=offset, length=data_bytes, chunk=np.arange(count, dtype=np.uint64),
        first=np.zeros(count, np.uint64), last=np.ones(count, np.uint64), digests=digests,
    )
    rows.locate_chunks(stored, bases)
    paths = [path_inside(checked.directory, row.name) for row in [*segments, *checked.manifest.segments]]
    reading = checked.store.read_extents(
        paths, rows, arena, wanted_bytes=int(length.sum()), stop_at_bad=False, past_cache=True
    )
    receipt = finish_reading(reading, on_progress)
    ends = np.cumsum(counts)
    for position in receipt.bad.tolist():
        segment = int(np.searchsorted(ends, position, side="right"))
        run_row = position - (int(ends[segment]) - counts[segment])
        description = runs[segment].describe(run_row, checked.index)
        findings.append(Finding(segments[segment].name, f"{description}: does not match its digest"))
    if receipt.error is not None:
        findings.append(_finding(checked.directory, receipt.error))


def _bases(
    checked: CheckedFiles, chunks: Chunks, runs: Sequence[_Runs], first_file: int
) -> tuple[BaseColumns | None, NDArray[np.int64]]:
    """For the engine: the bases of the chunks in these ranges (a chunk may be stored as its difference from a base),
    and the numbers of the ranges whose base is in a missing file.
    """
    none = np.zeros(0, np.int64)
    if chunks.stored is None or chunks.stored.bases is None:
        return None, none
    piece, chunk = (np.concatenate([none, *(getattr(run, name) for run in runs)]) for name in ("piece", "chunk"))
    rows = np.flatnonzero(piece >= 0)
    numbers = chunks.first[piece[rows]] + chunk[rows]
    there = np.array([_is_there(checked, row) for row in checked.manifest.segments], np.bool_)
    is_near = chunks.stored.codec[numbers] == CODEC_XOR
    is_lacking = is_near & ~there[chunks.stored.bases.segment[numbers]]
    bases = chunks.bases_of(numbers[~is_lacking], first_file=first_file)
    if bases is not None:
        bases = rows[~is_lacking][bases[0].astype(np.int64)].astype(np.uint64), *bases[1:]
    return bases, rows[is_lacking]


def _is_there(checked: CheckedFiles, row: SegmentRow) -> bool:
    path = path_inside(checked.directory, row.name)
    return checked.store.exists(path) and checked.store.size(path) == row.bytes


def _check_casts(checked: CheckedFiles, index: Index, arena: Arena, findings: list[Finding]) -> None:
    """Check the chunks that are stored only as roundings of other chunks, their sources: rounding a source must give
    the saved values. Damage of the sources is found elsewhere.
    """
    chunks = index.chunks
    numbers = _with_sources(checked, chunks, cast_chunks(chunks))
    if not len(numbers):
        return
    piece, within = chunks.locate(numbers)
    count = len(numbers)
    rows = ReadExtents(
        file=np.zeros(count, np.uint32), offset=np.zeros(count, np.uint64), length=chunks.length[piece],
        chunk=chunks.first[piece].astype(np.uint64), first=within.astype(np.uint64),
        last=within.astype(np.uint64) + np.uint64(1), digests=chunks.digest,
    )
    rows.locate_chunks(stored_columns(chunks, index.pieces), chunks.bases_of(np.arange(int(chunks.first[-1]))))
    paths = [path_inside(checked.directory, row.name) for row in checked.manifest.segments]
    read_bytes = 2 * int(chunks.logical_bytes(piece, within, within + 1).sum())
    receipt = finish_reading(checked.store.read_extents(
        paths, rows, arena, wanted_bytes=read_bytes, stop_at_bad=False, past_cache=True
    ))
    if receipt.error is not None:  # the engine has stopped early, so some chunks may not have been checked
        findings.append(_finding(checked.directory, receipt.error))
    for number in np.intersect1d(receipt.bad.astype(np.int64), numbers).tolist():
        owner, chunk = chunks.locate(np.array([number]))
        name = index.tensors.names[int(index.pieces.tensor[int(owner[0])])]
        description = f"tensor {name!r}, chunk {int(chunk[0])}: rounding the float32 tensor gives other bytes"
        findings.append(Finding(checked.manifest.index.name, description))


def _with_sources(checked: CheckedFiles, chunks: Chunks, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the chunks `numbers` whose source chunks, and the bases of the source chunks, are in existing files."""
    if chunks.stored is None or not len(numbers):
        return numbers
    there = np.array([_is_there(checked, row) for row in checked.manifest.segments], np.bool_)
    is_readable = there[chunks.stored.segment]
    if chunks.stored.bases is not None:
        is_near = chunks.stored.codec == CODEC_XOR
        is_readable[is_near] &= there[chunks.stored.bases.segment[is_near]]
    piece, within = chunks.locate(numbers)
    first = chunks.stored.offset[numbers].astype(np.int64)
    last = first + source_chunk_counts(chunks.logical_bytes(piece, within, within + 1)) - 1
    readable: NDArray[np.int64] = numbers[is_readable[first] & is_readable[last]]
    return readable


def _runs(chunks: Chunks, segments: Sequence[SegmentRow]) -> list[_Runs]:
    """For each segment, the ranges to check, ascending: every chunk and, between chunks, the padding. For segments of
    earlier checkpoints: only the chunks.
    """
    piece, chunk = chunks.locate(np.arange(int(chunks.first[-1])))
    segment, offset = chunks.stored_locations(piece, chunk)
    codecs = chunks.codecs()
    length: NDArray[np.uint32] = chunks.stored_lengths()
    order = np.lexsort((chunks.digest, length, codecs, offset, segment))
    order = order[codecs[order] != CAST.id]
    alike = segment, offset, codecs, length, chunks.digest  # chunks for which all of these are equal are checked once
    is_new = np.any([column[order][1:] != column[order][:-1] for column in alike], axis=0)
    order = order[np.append(np.ones(min(1, len(order)), np.bool_), is_new)]
    ids = np.array([row.id for row in segments], np.int64)
    starts, stops = (np.searchsorted(segment[order], ids, side=side).tolist() for side in ("left", "right"))
    runs: list[_Runs] = []
    data_bytes = chunks.logical_bytes(piece, chunk, chunk + 1)
    for row, start, stop in zip(segments, starts, stops, strict=True):
        here = order[start:stop]
        stored = _Runs(
            offset[here], length[here].astype(np.int64), chunks.digest[here], piece[here], chunk[here],
            data_bytes[here], codecs[here],
        )
        runs.append(_with_padding(stored, row) if row.home is None else stored)
    return runs


def _with_padding(stored: _Runs, row: SegmentRow) -> _Runs:
    """Add the padding between a segment's chunks to the ranges `stored`."""
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
    return listed + store.size(path_inside(directory, MANIFEST_NAME))
