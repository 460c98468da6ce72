"""THE ORDER of the operations of a flush: copy a committed checkpoint into another store, and commit it there.

    manifest, index, objects --verified--> draft --> segments --verified, linked or written, synced--> index, objects
    [--> all read again and verified] --> manifest, sync --> rename, or the put of the manifest

The copy has the same manifest, byte for byte, so the checkpoint has the same id, step and store identity in every tier.
The copy has all chunks that its index refers to. A *draft* is the directory of an unfinished checkpoint.
docs/ORDERING.md (Tiers) describes crashes at each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from flowstone._native import Arena
from flowstone.commit import catalog, publish, removal
from flowstone.commit import read as contents
from flowstone.commit.entries import new_superseded_directory, step_directory
from flowstone.commit.manifests import lacks_manifest, path_inside, read_manifest
from flowstone.commit.verify import CheckedFiles, VerifyShare, check_share, segment_bytes
from flowstone.config import MANIFEST_BYTES_MAX, READ_ARENA_BYTES
from flowstone.errors import (
    DamagedError,
    FlowstoneError,
    FormatError,
    NoCheckpointError,
    StepExistsError,
    StorageError,
)
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest, SegmentRow, decode_manifest
from flowstone.format.segment import original_name
from flowstone.log import log
from flowstone.store.base import Names, Pace, Store, sync_names
from flowstone.tiered.copying import Buffers, Copy, copy_segment, source_errors
from flowstone.tiered.runs import ChunkRuns, runs_of

_LINK_STEPS_MAX = 4  # how many of the target's newest steps are searched for an earlier checkpoint's file


class FlushedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was flushed. `bytes`: how many bytes were copied. All other bytes are in files that were
    hard-linked.
    """

    manifest: Manifest
    bytes: int


def flush(
    source: Store, target: Store, step: int, pace: Pace, on_batch: Callable[[], None], expected: str | None = None, *,
    reads_back: bool = False,
) -> FlushedCheckpoint:
    """Copy the checkpoint of `step`. The caller holds the target's lock. Blocks. Durable on return.

    pace        limits the rate of writes into the target
    on_batch    see Copy; also called before the copy is published, unless `reads_back`
    expected    the checkpoint's id; None: any id
    reads_back  before publication, read every byte from the target, past its cache, and verify it

    raises      SourceFailedError  the source no longer has the checkpoint, has another one of that step, or has it
                                   damaged or unreadable
                StepExistsError    the target has another checkpoint of that step
                DamagedError       the target returns bytes that differ from the bytes written
                StorageError, LockedError, BudgetError, CancelledError, ...

    After an error the draft is removed, at the latest by the next writer.
    """
    directory = step_directory(step)
    with source_errors():
        manifest, record = _record(source, directory, expected)
    if has_checkpoint(target, manifest):
        sync_names(target)  # an earlier flush may have died after its rename and before this sync
        return FlushedCheckpoint(manifest, 0)
    with source_errors():
        text = contents.read_index_bytes(source, directory, manifest)
        index = contents.decode_index_bytes(source, directory, manifest, text)
        objects = contents.read_objects_bytes(source, directory, manifest)
    draft = _draft(target, manifest)
    try:
        copied = _segments(source, target, draft, manifest, index, pace, on_batch)
        check = partial(_read_back, target, draft.directory, manifest) if reads_back else on_batch
        publish.publish_copy(target, draft, record, bytes(text), bytes(objects), check)
    except BaseException:
        with suppress(FlowstoneError):  # readers ignore the unfinished copy, and the next writer removes it
            if not has_checkpoint(target, manifest):
                removal.empty_directory(target, draft.directory)
        raise
    return FlushedCheckpoint(manifest, copied)


def _read_back(target: Store, draft: str, manifest: Manifest) -> None:
    """Read back from the target a copy that is complete except for its manifest, and verify it. Raises DamagedError if
    the target returns wrong bytes.
    """
    index = contents.read_index(target, draft, manifest)
    contents.read_objects(target, draft, manifest)
    block_bytes = target.settings("read").tuning.request_bytes
    arena = Arena(budget_bytes=READ_ARENA_BYTES, block_bytes=block_bytes, background=True)
    try:
        findings = check_share(
            CheckedFiles(target, draft, manifest, index), VerifyShare(0, segment_bytes(manifest)), arena
        )
    finally:
        arena.close()
    if findings:
        raise DamagedError(
            f"{target.location} returns bytes that differ from the bytes written for step {manifest.step}",
            found="; ".join(f"{finding.file}: {finding.what}" for finding in findings[:5]),
            next="check that disk; no checkpoint of this step was created there",
        )


def _record(source: Store, directory: str, expected: str | None) -> tuple[Manifest, bytes]:
    """The manifest of the source's checkpoint, decoded and as bytes. Raises NoCheckpointError if the checkpoint's id is
    not `expected`.
    """
    manifest = read_manifest(source, directory)
    record = source.read(path_inside(directory, MANIFEST_NAME), bytes_max=MANIFEST_BYTES_MAX)
    decoded = decode_manifest(record, path=f"{source.location}/{directory}")
    if decoded != manifest or expected not in (None, manifest.id):
        raise NoCheckpointError(
            f"{source.location} has another checkpoint in {directory}", expected=f"id {expected or manifest.id}",
            found=f"id {decoded.id}", next="do nothing: the step was saved again meanwhile",
        )
    return manifest, record


def has_checkpoint(target: Names, manifest: Manifest) -> bool:
    """Whether the target has this checkpoint. Raises StepExistsError if it has another one of the same step."""
    directory = step_directory(manifest.step)
    if not target.exists(path_inside(directory, MANIFEST_NAME)):
        return False
    existing = read_manifest(target, directory)
    if (existing.id, existing.store) == (manifest.id, manifest.store):
        return True
    raise StepExistsError(
        f"{target.location} has another checkpoint of step {manifest.step}", expected=f"id {manifest.id}",
        found=f"id {existing.id} of store {existing.store}",
        next="call rewind() to set that step aside, or give another directory",
    )


def _draft(target: Store, manifest: Manifest) -> publish.Draft:
    """Create an empty directory for the copy, and remove the one of an earlier attempt. If the target has a directory
    of that step without a manifest, which is a damaged checkpoint, it is set aside.
    """
    directory = step_directory(manifest.step)
    if lacks_manifest(target, directory):
        aside = new_superseded_directory(manifest.step)
        log.warning("%s/%s has no manifest: it is damaged, and was set aside as %s", target.location, directory, aside)
        removal.move_directory(target, directory, aside)
    draft = publish.begin_draft(target, manifest.step, manifest.id)
    if target.names(draft.directory):
        leftovers = removal.empty_directory(target, draft.directory)
        if leftovers:
            raise StorageError(
                f"{target.location}/{draft.directory} holds {catalog.foreign_files_text(leftovers)}",
                next="move these files elsewhere; the flush is tried again",
            )
        draft = publish.begin_draft(target, manifest.step, manifest.id)
    return draft


def _segments(
    source: Store, target: Store, draft: publish.Draft, manifest: Manifest, index: Index, pace: Pace,
    on_batch: Callable[[], None],
) -> int:
    """Hard-link or copy every segment into the draft. Returns the number of bytes that were copied."""
    runs = runs_of(index, len(manifest.segments))
    linked = _linkable(target, manifest, runs) if target.capabilities.links else {}
    directory, copied = step_directory(manifest.step), 0
    buffers = Buffers(source, target)
    copy = Copy(source, target, buffers, pace, on_batch)
    try:
        for row, part in zip(manifest.segments, runs, strict=True):
            path = path_inside(draft.directory, row.name)
            if row.id in linked and _is_linked(target, linked[row.id], path):
                continue
            copy_segment(copy, row, (path_inside(directory, row.name), path), part)
            copied += row.bytes
    finally:
        buffers.close()
    return copied


def _is_linked(target: Store, existing: str, path: str) -> bool:
    """Hard-link an earlier checkpoint's file into the draft. Returns False if the store has no hard links, or the file
    is gone.
    """
    try:
        target.link(existing, path)
    except StorageError:
        return False  # then the file is copied
    return True


def _linkable(target: Store, manifest: Manifest, runs: Sequence[ChunkRuns]) -> dict[int, str]:
    """The files of earlier checkpoints, in the target, that can be linked instead of copied: segment number -> path.

    A file that was flushed earlier has only the chunks that its own checkpoint refers to. It can be linked only if it
    has all chunks in `runs`.
    """
    rows = {_origin(manifest, row): row for row in manifest.segments if row.home is not None}
    paths: dict[int, str] = {}
    earlier = [step for step in catalog.steps(target) if step < manifest.step] if rows else []
    for step in reversed(earlier[-_LINK_STEPS_MAX:]):
        directory = step_directory(step)
        try:
            other_manifest = read_manifest(target, directory)
            shared = [
                (rows[_origin(other_manifest, row)], row) for row in other_manifest.segments
                if _origin(other_manifest, row) in rows
            ]
            shared = [(row, other) for row, other in shared if row.id not in paths]
            if not shared:
                continue
            other_index = contents.read_index(target, directory, other_manifest)
            other_runs = runs_of(other_index, len(other_manifest.segments))
        except (NoCheckpointError, FormatError):
            continue  # that checkpoint was removed, is damaged, or of a later release, so the segment is copied
        for row, other in shared:
            if other_runs[other.id].has(runs[row.id]):
                paths[row.id] = path_inside(directory, other.name)
    return paths


def _origin(manifest: Manifest, row: SegmentRow) -> tuple[str, str, int, str]:
    """Identifies a file in all checkpoints that share it, by the file's writer and content. Its name may differ between
    them.
    """
    return row.home or manifest.id, original_name(row.name), row.bytes, row.header_digest
