"""THE ORDER of a flush: a committed checkpoint of one store becomes one of another, by that store's own commit.

    manifest, index, objects --verified--> draft --> segments --verified, linked or written, synced--> index, objects
    [--> all read again and verified] --> manifest, sync --> rename, or the put of the manifest

The copy has the same manifest, byte for byte, and of each file all that it refers to: id, step and store are what
tells a checkpoint in every tier. docs/ORDERING.md (Tiers) says what a crash at each operation leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from flowstone import _native
from flowstone.commit import catalog, publish, removal
from flowstone.commit import read as contents
from flowstone.commit.durable import sync
from flowstone.commit.entries import new_superseded_directory, step_directory
from flowstone.commit.manifests import inside, lacks_manifest, read_manifest
from flowstone.commit.verify import Checked, Share, check_share, segment_bytes
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
from flowstone.format.segment import written_as
from flowstone.log import log
from flowstone.store.base import Names, Pace, Store
from flowstone.tiers.copying import Buffers, Copy, copy_segment, reading
from flowstone.tiers.runs import Runs, runs_of

_LOOKED_AT_MAX = 4  # of the target's steps, the newest, in which an earlier checkpoint's file is looked for


class Flushed(msgspec.Struct, frozen=True):
    """What a flush has made, or found there already. `bytes`: that were copied, others were linked."""

    manifest: Manifest
    bytes: int


def flush(
    source: Store, target: Store, step: int, pace: Pace, rest: Callable[[], None], expected: str | None = None, *,
    reads_back: bool = False,
) -> Flushed:
    """Copy the checkpoint of `step`. The caller holds the target's lock. Blocks. Durable on return.

    pace        of writes into the target
    rest        see Copy; also called before the copy is published, unless it is read back
    expected    the checkpoint's id; None: whichever it is
    reads_back  before it is published, read every byte from the target, past its cache, and verify it

    raises      SourceFailedError  the source has it no more, or another one of that step; or its bytes are not what
                                   was written; or it refuses
                StepExistsError    the target has another checkpoint of that step
                DamagedError       the target gives back other bytes than were written
                StorageError, LockedError, BudgetError, CancelledError, ...; what was made of the draft is removed
                then, unless the target refuses that as well: the next writer sweeps it
    """
    directory = step_directory(step)
    with reading():
        manifest, record = _record(source, directory, expected)
    if is_there(target, manifest):
        sync(target)  # an earlier flush may have died before its own
        return Flushed(manifest, 0)
    with reading():
        text = contents.index_text(source, directory, manifest)
        index = contents.decoded_index(source, directory, manifest, text)
        objects = contents.objects_text(source, directory, manifest)
    draft = _draft(target, manifest)
    try:
        copied = _segments(source, target, draft, manifest, index, pace, rest)
        check = partial(_read_back, target, draft.directory, manifest) if reads_back else rest
        publish.publish_copy(target, draft, record, bytes(text), bytes(objects), check)
    except BaseException:
        with suppress(FlowstoneError):  # safe: a draft is never read, and is swept
            if not is_there(target, manifest):
                removal.empty(target, draft.directory)
        raise
    return Flushed(manifest, copied)


def _read_back(target: Store, draft: str, manifest: Manifest) -> None:
    """Verify a draft that lacks nothing but its manifest, as the target gives it back. Raises DamagedError."""
    index = contents.read_index(target, draft, manifest)
    contents.read_objects(target, draft, manifest)
    block_bytes = target.settings("read").tuning.request_bytes
    arena = _native.Arena(budget_bytes=READ_ARENA_BYTES, block_bytes=block_bytes, background=True)
    try:
        findings = check_share(Checked(target, draft, manifest, index), Share(0, segment_bytes(manifest)), arena)
    finally:
        arena.close()
    if findings:
        raise DamagedError(
            f"{target.location} does not give back what was written of step {manifest.step}",
            found="; ".join(f"{one.file}: {one.what}" for one in findings[:5]),
            next="check that disk; nothing was published there",
        )


def _record(source: Store, directory: str, expected: str | None) -> tuple[Manifest, bytes]:
    """The manifest, and its bytes."""
    manifest = read_manifest(source, directory)
    record = source.read(inside(directory, MANIFEST_NAME), bytes_max=MANIFEST_BYTES_MAX)
    found = decode_manifest(record, path=f"{source.location}/{directory}")
    if found != manifest or expected not in (None, manifest.id):
        raise NoCheckpointError(
            f"{source.location} has another checkpoint in {directory}", expected=f"id {expected or manifest.id}",
            found=f"id {found.id}", next="nothing: the step was saved again meanwhile",
        )
    return manifest, record


def is_there(target: Names, manifest: Manifest) -> bool:
    """Whether the target has this checkpoint. Raises StepExistsError if it has another one of the same step."""
    directory = step_directory(manifest.step)
    if not target.exists(inside(directory, MANIFEST_NAME)):
        return False
    found = read_manifest(target, directory)
    if (found.id, found.store) == (manifest.id, manifest.store):
        return True
    raise StepExistsError(
        f"{target.location} has another checkpoint of step {manifest.step}", expected=f"id {manifest.id}",
        found=f"id {found.id} of store {found.store}",
        next="call rewind() to set it aside there, or give another directory",
    )


def _draft(target: Store, manifest: Manifest) -> publish.Draft:
    """Create an empty draft, after removing what an earlier attempt of the same flush has left. A damaged step of that
    number, which has lost its manifest, is set aside.
    """
    taken = step_directory(manifest.step)
    if lacks_manifest(target, taken):
        aside = new_superseded_directory(manifest.step)
        log.warning("%s/%s has no manifest: it is damaged, and was set aside as %s", target.location, taken, aside)
        removal.move(target, taken, aside)
    draft = publish.begin(target, manifest.step, manifest.id)
    if target.names(draft.directory):
        left = removal.empty(target, draft.directory)
        if left:
            raise StorageError(
                f"{target.location}/{draft.directory} holds {catalog.listed(left)}",
                next="move these files away; the flush is tried again",
            )
        draft = publish.begin(target, manifest.step, manifest.id)
    return draft


def _segments(
    source: Store, target: Store, draft: publish.Draft, manifest: Manifest, index: Index, pace: Pace,
    rest: Callable[[], None],
) -> int:
    """Link or copy every segment. Returns the bytes that were copied."""
    runs = runs_of(index, len(manifest.segments))
    linked = _linkable(target, manifest, runs) if target.capabilities.links else {}
    directory, copied = step_directory(manifest.step), 0
    buffers = Buffers(source, target)
    copy = Copy(source, target, buffers, pace, rest)
    try:
        for row, part in zip(manifest.segments, runs, strict=True):
            path = inside(draft.directory, row.name)
            if row.id in linked and _is_linked(target, linked[row.id], path):
                continue
            copy_segment(copy, row, (inside(directory, row.name), path), part)
            copied += row.bytes
    finally:
        buffers.close()
    return copied


def _is_linked(target: Store, known: str, path: str) -> bool:
    """Give an earlier checkpoint's file a further name; False where the store refuses, or the file is gone."""
    try:
        target.link(known, path)
    except StorageError:
        return False  # safe: it is copied then
    return True


def _linkable(target: Store, manifest: Manifest, runs: Sequence[Runs]) -> dict[int, str]:
    """Which earlier checkpoints' files the target has: by the number of the segment, the path there.

    Another checkpoint's copy has the chunks that it refers to itself, and no others: all of ours must be among them.
    """
    wanted = {_origin(manifest, row): row for row in manifest.segments if row.home is not None}
    found: dict[int, str] = {}
    earlier = [step for step in catalog.steps(target) if step < manifest.step] if wanted else []
    for step in reversed(earlier[-_LOOKED_AT_MAX:]):
        directory = step_directory(step)
        try:
            known = read_manifest(target, directory)
            same = [
                (wanted[_origin(known, row)], row) for row in known.segments if _origin(known, row) in wanted
            ]
            same = [(row, other) for row, other in same if row.id not in found]
            if not same:
                continue
            theirs = runs_of(contents.read_index(target, directory, known), len(known.segments))
        except (NoCheckpointError, FormatError):
            continue  # it goes away, is damaged, or of a later release: it is not linked to, and ours is copied whole
        for row, other in same:
            if theirs[other.id].has(runs[row.id]):
                found[row.id] = inside(directory, other.name)
    return found


def _origin(manifest: Manifest, row: SegmentRow) -> tuple[str, str, int, str]:
    """What tells a file in every checkpoint that has it: who wrote it, and what it holds; its name may differ."""
    return row.home or manifest.id, written_as(row.name), row.bytes, row.header_digest
