"""Publication: the order of writes that makes a checkpoint exist (docs/ORDERING.md, Save)."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from flowstone.commit.entries import new_temporary_file, saving_directory, step_directory
from flowstone.commit.manifests import path_inside, read_manifest, read_marker
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
from flowstone.store.base import Store, sync_names
from flowstone.store.run_concurrently import run_concurrently


class Draft(msgspec.Struct, frozen=True):
    """A checkpoint that is being written. Readers ignore its directory, as that has a temporary name or no manifest
    yet.

    is_in_place  whether the directory already has the step's name, so that writing the manifest commits the checkpoint
    """

    step: int
    id: str
    directory: str
    is_in_place: bool = False


class Publication(msgspec.Struct, frozen=True):
    """The parts of a checkpoint.

    segments  the segments, which are already durable
    totals    how many tensors, pieces and bytes the index lists
    io        how the segments were written
    writer    the program that wrote them
    ranks     number of ranks of the job that saved
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
    """Create the store's marker file if it is missing. Returns the store's identity. The caller must hold the store's
    lock.

    identity  for a new store: the identity of another tier (store) of the same run; None: a new identity
    """
    if not store.exists(MARKER_NAME):
        marker = encode_marker(Marker(flowstone=1, store=identity or secrets.token_hex(16), created=_now()))
        if store.capabilities.conditional_put:
            store.put(MARKER_NAME, marker)
        else:
            temporary = new_temporary_file(MARKER_NAME)
            store.put(temporary, marker)
            store.rename(temporary, MARKER_NAME)
        sync_names(store)
    return read_marker(store).store


def begin_draft(store: Store, step: int, identity: str) -> Draft:
    """Create the directory for the save's files. All ranks call this; the first call creates the directory.

    identity  the checkpoint's id. Each attempt to save has its own, so an existing directory is from another rank of
              this attempt
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
    """Whether the draft was committed, even if its save has reported a failure."""
    return draft.is_in_place and store.exists(path_inside(draft.directory, MANIFEST_NAME))


def remove_own_files(store: Store, draft: Draft, names: Sequence[str]) -> None:
    """Remove a rank's files from the directory of a checkpoint that will not be published, and the directory once it is
    empty.

    Each rank removes its own files by name: other ranks may still be writing.
    """
    try:
        if _is_committed(store, draft):
            return
    except FlowstoneError:
        return  # the reason is given below
    for path in (*(path_inside(draft.directory, name) for name in names), draft.directory):
        try:
            store.remove(path)
        except FlowstoneError:
            continue  # the directory was removed, or has other ranks' files; readers ignore it, and a sweep removes it


def publish(store: Store, draft: Draft, store_id: str, made: Publication) -> Manifest:
    """Commit a checkpoint: write index and objects, then the manifest, sync, rename the directory, sync again. Durable
    on return.

    If the store cannot rename a directory atomically, the manifest is written last, directly into the step's directory.

    raises  LockedError if the store's lock was lost in the meantime
    """
    manifest = write_draft(store, draft, store_id, made)
    if draft.is_in_place:
        _put_last(store, draft, encode_manifest(manifest))
        return manifest
    # Only the holder of the lock may continue. This job may have been frozen until its lock expired.
    store.check_lock()
    store.rename(draft.directory, step_directory(draft.step))
    # Sync the new name: without this a power loss can undo the rename.
    sync_names(store)
    return manifest


def find_published(store: Store, draft: Draft) -> Manifest | None:
    """Find out whether another process published this draft. If so, sync it and return its manifest; None if the
    manifest is missing or unreadable.
    """
    directory = step_directory(draft.step)
    try:
        manifest = read_manifest(store, directory)
        if manifest.id != draft.id:
            return None
        # the publisher may have died before it synced the directory
        sync_names(store, directory if draft.is_in_place else "")
    except FlowstoneError:  # the manifest is missing or unreadable; the draft may still be published later
        return None
    return manifest


def write_draft(store: Store, draft: Draft, store_id: str, made: Publication) -> Manifest:
    """Write all files durably, but do not rename the directory. If the directory already has the step's name, do not
    write the manifest.
    """
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
        store.put(path_inside(draft.directory, MANIFEST_NAME), encode_manifest(manifest))
        # Sync the directory too: a file whose name is not durable can vanish after a power loss.
        sync_names(store, draft.directory)
    return manifest


def _put_both(store: Store, draft: Draft, index: bytes, objects: bytes) -> None:
    both = ((path_inside(draft.directory, INDEX_NAME), index), (path_inside(draft.directory, OBJECTS_NAME), objects))
    run_concurrently(store, [partial(store.put, path, data) for path, data in both])


def publish_copy(
    store: Store, draft: Draft, manifest: bytes, index: bytes, objects: bytes, check: Callable[[], None] | None = None
) -> None:
    """Commit a draft that is a copy of another store's checkpoint. The bytes of manifest, index and objects are given,
    and written in the order of `publish`.

    Its segments are already durable. Durable on return.

    check   called when only the manifest is missing; an exception from it aborts the commit
    raises  LockedError if the store's lock was lost in the meantime
    """
    _put_both(store, draft, index, objects)
    if check is not None:
        check()
    if draft.is_in_place:
        _put_last(store, draft, manifest)
        return
    store.put(path_inside(draft.directory, MANIFEST_NAME), manifest)
    sync_names(store, draft.directory)
    store.check_lock()
    store.rename(draft.directory, step_directory(draft.step))
    sync_names(store)


def _critical(made: Publication) -> tuple[str, ...]:
    return (*made.critical, PATHS) if any(path_of(row.name) for row in made.segments) else made.critical


def _lossy(critical: Sequence[str]) -> tuple[LossyRow, ...] | msgspec.UnsetType:
    if QUANTIZED.feature not in critical:
        return msgspec.UNSET
    return (LossyRow(QUANTIZED.name, RELATIVE_BOUND, BLOCK_BOUND),)


def _put_last(store: Store, draft: Draft, manifest: bytes) -> None:
    """Commit a draft that is already in the step's directory, by writing the manifest. See `publish`."""
    sync_names(store, draft.directory)
    sync_names(store)
    store.check_lock()
    store.put(path_inside(draft.directory, MANIFEST_NAME), manifest)
    sync_names(store, draft.directory)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
