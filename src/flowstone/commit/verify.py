"""Verification: every byte of every file of a checkpoint, padding included, without a tensor library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flowstone import _native
from flowstone.commit import contents
from flowstone.commit.contents import inside
from flowstone.config import CHUNK_BYTES
from flowstone.errors import FormatError, StorageError
from flowstone.format.digest import digest, zero_digest
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest, SegmentRow
from flowstone.format.segment import PAD_PREFIX, entry_name, parse_header
from flowstone.store.base import Store, finish_reading


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was written."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The account of one checkpoint. `extra` names files that no manifest mentions: harmless, and told."""

    step: int
    findings: tuple[Finding, ...]
    checked_bytes: int
    extra: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of at most CHUNK_BYTES of a segment and the digest that it must have."""

    segment: int
    offset: int
    length: int
    digest: int
    what: str


def verify(
    store: Store, directory: str, arena: _native.Arena, on_progress: Callable[[int, int], None] | None = None
) -> Verified:
    """Check everything that the manifest in `directory` vouches for. Blocks.

    on_progress  is told the bytes done and the bytes in all
    raises       NoCheckpointError; DamagedError when even the manifest cannot be believed
    """
    manifest = contents.read_manifest(store, directory)
    findings: list[Finding] = []
    index = _gather(findings, "index.safetensors", lambda: contents.read_index(store, directory, manifest))
    _gather(findings, "objects.json", lambda: contents.read_objects(store, directory, manifest))
    healthy = [row for row in manifest.segments if _segment_is_whole(store, directory, row, findings)]
    if index is not None:
        for row in healthy:
            _check_entries(store, directory, row, index, findings)
        _check_runs(store, directory, healthy, index, arena, findings, on_progress)
    known = {row.name for row in manifest.segments} | {manifest.index.name, manifest.objects.name, MANIFEST_NAME}
    extra = tuple(name for name in store.names(directory) if name not in known)
    return Verified(manifest.step, tuple(findings), _bytes(store, directory, manifest), extra)


def _gather(findings: list[Finding], file: str, check: Callable[[], Index | object]) -> Index | None:
    try:
        result = check()
    except (FormatError, StorageError) as error:
        findings.append(Finding(file, str(error)))
        return None
    return result if isinstance(result, Index) else None


def _segment_is_whole(store: Store, directory: str, row: SegmentRow, findings: list[Finding]) -> bool:
    """Size and header; what fails is a finding, and the segment is looked at no further."""
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
        findings.append(Finding(row.name, str(error)))
        return False
    if found != row.header_digest:
        findings.append(Finding(row.name, f"header, bytes 0..{row.header_bytes}: not what was written"))
    return True


def _check_entries(store: Store, directory: str, row: SegmentRow, index: Index, findings: list[Finding]) -> None:
    """The header says the same as the index, so that other readers see the same tensors as ours."""
    path = inside(directory, row.name)
    try:
        entries, _, start = parse_header(store.read(path, length=row.header_bytes), path=path)
    except (FormatError, StorageError) as error:
        findings.append(Finding(row.name, str(error)))
        return
    expected = {}
    for piece in np.flatnonzero(index.segment == row.id).tolist():
        tensor = int(index.tensor[piece])
        dtype, box = index.dtypes[tensor], index.box(piece)
        shape = (*box.shape, dtype.item_bytes) if dtype.as_bytes else box.shape
        begin = int(index.offset[piece]) - start
        name = entry_name(index.names[tensor], box, index.shapes[tensor])
        expected[name] = (dtype.stored, shape, begin, begin + int(index.length[piece]))
    found = {e.name: (e.dtype, e.shape, e.begin, e.end) for e in entries.values() if not e.name.startswith(PAD_PREFIX)}
    differing = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    findings += [Finding(row.name, f"entry {name!r} differs between header and index") for name in differing]
    if entries and start + max(entry.end for entry in entries.values()) != row.bytes:
        findings.append(Finding(row.name, "the header does not account for the whole file"))


def _check_runs(
    store: Store,
    directory: str,
    segments: list[SegmentRow],
    index: Index,
    arena: _native.Arena,
    findings: list[Finding],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    runs = [run for at, row in enumerate(segments) for run in _runs(index, row, at)]
    count = len(runs)
    rows = _native.ReadRows(
        file=np.array([run.segment for run in runs], np.uint32),
        offset=np.array([run.offset for run in runs], np.uint64),
        length=np.array([run.length for run in runs], np.uint64),
        address=np.full(count, _native.VERIFY_ONLY, np.uint64), chunk=np.arange(count, dtype=np.uint64),
        first=np.zeros(count, np.uint64), last=np.ones(count, np.uint64), layout=np.full(count, -1, np.int64),
        layouts=[], digests=np.array([run.digest for run in runs], np.uint64),
    )
    paths = [inside(directory, row.name) for row in segments]
    total = sum(row.bytes for row in segments)
    tell = None if on_progress is None else lambda done: on_progress(done, total)
    reading = store.read_extents(paths, rows, arena, wanted_bytes=total, stop_at_bad=False, past_cache=True)
    receipt = finish_reading(reading, tell)
    for position in receipt.bad.tolist():
        run = runs[position]
        findings.append(Finding(segments[run.segment].name, f"{run.what}: not what was written"))
    if receipt.error is not None:
        findings.append(Finding(directory, str(receipt.error)))


def _runs(index: Index, row: SegmentRow, at: int) -> list[_Run]:
    """Every chunk, and every run of padding, of one segment behind its header; ascending."""
    pieces = np.flatnonzero((index.segment == row.id) & (index.length > 0))
    pieces = pieces[np.argsort(index.offset[pieces])]
    marks = [(row.header_bytes, 0), *((int(index.offset[p]), int(index.length[p])) for p in pieces), (row.bytes, 0)]
    runs = []
    for position, ((offset, length), (after, _)) in enumerate(pairwise(marks)):
        if position:
            runs += _chunks(index, int(pieces[position - 1]), at)
        for begin in range(offset + length, after, CHUNK_BYTES):
            size = min(CHUNK_BYTES, after - begin)
            runs.append(_Run(at, begin, size, zero_digest(size), f"padding, bytes {begin}..{begin + size}"))
    return runs


def _chunks(index: Index, piece: int, at: int) -> list[_Run]:
    name = index.names[int(index.tensor[piece])]
    runs, begin = [], int(index.offset[piece])
    for number, chunk in enumerate(range(int(index.first_chunk[piece]), int(index.first_chunk[piece + 1]))):
        size = int(index.stored[chunk])
        what = f"tensor {name!r}, chunk {number}, bytes {begin}..{begin + size}"
        runs.append(_Run(at, begin, size, int(index.digest[chunk]), what))
        begin += size
    return runs


def _bytes(store: Store, directory: str, manifest: Manifest) -> int:
    listed = manifest.index.bytes + manifest.objects.bytes + sum(row.bytes for row in manifest.segments)
    return listed + store.size(inside(directory, MANIFEST_NAME))
