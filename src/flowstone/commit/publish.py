"""Publication: the order of writes that makes a checkpoint exist (docs/ORDERING.md, Save)."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from flowstone.commit.durable import sync
from flowstone.commit.entries import new_temporary_file, saving_directory, step_directory
from flowstone.commit.manifests import inside, read_manifest, read_marker
from flowstone.errors import FlowstoneError, StorageError
from flowstone.format.codec import BLOCK_BOUND, QUANTIZED, RELATIVE_BOUND
from flowstone.format.digest import chunk_digests
from flowstone.format.index import Totals
from flowstone.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    OBJECTS_NAME,
    PATHS,
    FileRow,
    IoRecord,
    LossyRow,
    Manifest,
    Marker,
    SegmentRow,
    encode_manifest,
    encode_marker,
)
from flowstone.format.segment import path_of
from flowstone.store.at_once import at_once
from flowstone.store.base import Store


class Draft(msgspec.Struct, frozen=True):
    """A checkpoint in progress, in a directory that readers ignore: its own, or the step's without a manifest.

    is_in_place  the directory is already the step's: only the manifest is missing
    """

    step: int
    id: str
    directory: str
    is_in_place: bool = False


class Publication(msgspec.Struct, frozen=True):
    """The parts of a checkpoint.

    segments  with their files' names, already durable
    totals    of the index
    io        how the segments were written
    writer    the program that wrote them
    ranks     of the job that saved
    critical  features that a reader must know
    """

    segments: Sequence[SegmentRow]
    index: bytes
    totals: Totals
    objects: bytes
    io: IoRecord
    writer: str
    ranks: int
    critical: tuple[str, ...] = ()


def open_store(store: Store, identity: str | None = None) -> str:
    """Create the store's marker if it is missing. Returns the store's identity. Needs the lock.

    A directory of checkpoints without a marker is adopted: it gets one.

    identity  of a new store: of another one whose checkpoints come here, since both are one run's; None: a new one
    """
    if not store.exists(MARKER_NAME):
        marker = encode_marker(Marker(flowstone=1, store=identity or secrets.token_hex(16), created=_now()))
        if store.capabilities.conditional_put:
            store.put(MARKER_NAME, marker)
        else:
            temporary = new_temporary_file(MARKER_NAME)
            store.put(temporary, marker)
            store.rename(temporary, MARKER_NAME)
        sync(store)
    return read_marker(store).store


def begin(store: Store, step: int, identity: str) -> Draft:
    """Create the directory for the save's files; of N ranks, the first one that comes does.

    identity  the checkpoint's identity; different for each try, so an existing directory is from this very try
    """
    if store.capabilities.atomic_rename:
        draft = Draft(step, identity, saving_directory(step, identity))
    else:
        draft = Draft(step, identity, step_directory(step), is_in_place=True)
    try:
        store.make_directory(draft.directory)
    except StorageError as error:
        if error.errno != errno.EEXIST or _is_committed(store, draft):
            raise
    return draft


def _is_committed(store: Store, draft: Draft) -> bool:
    """Whether the draft was committed, though its save may not know."""
    return draft.is_in_place and store.exists(inside(draft.directory, MANIFEST_NAME))


def remove_own(store: Store, draft: Draft, names: Sequence[str]) -> None:
    """Remove a rank's files of a draft that no rank publishes; the directory goes with the last of them.

    Each rank removes its own files by name: other ranks may not know yet, and may still write.
    """
    try:
        if _is_committed(store, draft):
            return
    except FlowstoneError:
        return  # safe, for the reason below
    for path in (*(inside(draft.directory, name) for name in names), draft.directory):
        try:
            store.remove(path)
        except FlowstoneError:
            continue  # safe: it is gone, or other ranks still have files here; a draft is never read, and is swept


def publish(store: Store, draft: Draft, store_id: str, made: Publication) -> Manifest:
    """Commit: write index and objects, then the manifest, sync, rename the directory, sync. Durable on return.

    If the store cannot rename a directory atomically, putting the manifest, as the last file, is the commit.

    raises  LockedError if the store's lock was lost in the meantime
    """
    manifest = record(store, draft, store_id, made)
    if draft.is_in_place:
        _put_last(store, draft, encode_manifest(manifest))
        return manifest
    # Only the one writer may go on: this job may have been frozen for longer than it keeps its lock.
    store.check_lock()
    store.rename(draft.directory, step_directory(draft.step))
    # And the new name: without this sync a power loss can undo the rename.
    sync(store)
    return manifest


def published(store: Store, draft: Draft) -> Manifest | None:
    """The manifest of a draft that somebody else has published, durably by now; None where that cannot be told."""
    directory = step_directory(draft.step)
    try:
        manifest = read_manifest(store, directory)
        if manifest.id != draft.id:
            return None
        sync(store, directory if draft.is_in_place else "")  # they may not have come to that
    except FlowstoneError:  # not there, or not legible: whether it will be, only they know
        return None
    return manifest


def record(store: Store, draft: Draft, store_id: str, made: Publication) -> Manifest:
    """All that makes a draft a checkpoint but its name, durably; of a draft in place, all but its manifest."""
    index, objects, totals = made.index, made.objects, made.totals
    _put_both(store, draft, index, objects)
    manifest = Manifest(
        step=draft.step, id=draft.id, store=store_id, created=_now(), writer=made.writer, ranks=made.ranks,
        segments=tuple(made.segments), critical=_critical(made),
        index=FileRow(INDEX_NAME, len(index), chunk_digests(index)),
        objects=FileRow(OBJECTS_NAME, len(objects), chunk_digests(objects)),
        tensors=totals.tensors, pieces=totals.pieces, data_bytes=totals.data_bytes, io=made.io,
        lossy=_lossy(made.critical),
    )
    if not draft.is_in_place:
        store.put(inside(draft.directory, MANIFEST_NAME), encode_manifest(manifest))
        # The entries too: a file whose name is not durable can vanish with a power loss.
        sync(store, draft.directory)
    return manifest


def _put_both(store: Store, draft: Draft, index: bytes, objects: bytes) -> None:
    both = ((inside(draft.directory, INDEX_NAME), index), (inside(draft.directory, OBJECTS_NAME), objects))
    at_once(store, [partial(store.put, path, data) for path, data in both])


def publish_copy(
    store: Store, draft: Draft, manifest: bytes, index: bytes, objects: bytes, check: Callable[[], None] | None = None
) -> None:
    """Commit a draft as a copy of another store's checkpoint: the same bytes, in the order of `publish`.

    Its segments are durable. Durable on return.

    check   called once only the manifest is missing; what it raises ends the commit

    raises  LockedError if the store's lock was lost in the meantime
    """
    _put_both(store, draft, index, objects)
    if check is not None:
        check()
    if draft.is_in_place:
        _put_last(store, draft, manifest)
        return
    store.put(inside(draft.directory, MANIFEST_NAME), manifest)
    sync(store, draft.directory)
    store.check_lock()
    store.rename(draft.directory, step_directory(draft.step))
    sync(store)


def _critical(made: Publication) -> tuple[str, ...]:
    return (*made.critical, PATHS) if any(path_of(row.name) for row in made.segments) else made.critical


def _lossy(critical: Sequence[str]) -> tuple[LossyRow, ...] | msgspec.UnsetType:
    if QUANTIZED.feature not in critical:
        return msgspec.UNSET
    return (LossyRow(QUANTIZED.name, RELATIVE_BOUND, BLOCK_BOUND),)


def _put_last(store: Store, draft: Draft, manifest: bytes) -> None:
    """Commit a draft that is already in the step's directory. See `publish`."""
    sync(store, draft.directory)
    sync(store)
    store.check_lock()
    store.put(inside(draft.directory, MANIFEST_NAME), manifest)
    sync(store, draft.directory)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
