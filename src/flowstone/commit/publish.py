"""Publication: the order of writes that makes a checkpoint exist (docs/ORDERING.md, Save)."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flowstone.commit.entries import new_temporary_file, saving_directory, step_directory
from flowstone.commit.manifests import inside, read_marker
from flowstone.errors import FlowstoneError, StorageError
from flowstone.format.digest import chunk_digests
from flowstone.format.index import Totals
from flowstone.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    OBJECTS_NAME,
    FileRow,
    Manifest,
    Marker,
    SegmentRow,
    encode_manifest,
    encode_marker,
)
from flowstone.store.base import Receipt, Store


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint in progress, in a directory that no reader looks at."""

    step: int
    id: str
    directory: str


def open_store(store: Store) -> str:
    """Create the store's directory and marker where they are missing; the store's identity. Needs the lock.

    A directory of checkpoints without a marker is adopted: it gets one.
    """
    if not store.exists(MARKER_NAME):
        temporary = new_temporary_file(MARKER_NAME)
        store.put(temporary, encode_marker(Marker(flowstone=1, store=secrets.token_hex(16), created=_now())))
        store.rename(temporary, MARKER_NAME)
        store.sync_directory()
    return read_marker(store).store


def begin(store: Store, step: int, identity: str | None = None) -> Draft:
    """Make the directory that the save's files are written into.

    identity  of the checkpoint to be, where several ranks make it: the first of them makes the directory
    """
    name = identity or secrets.token_hex(8)
    draft = Draft(step, name, saving_directory(step, name))
    try:
        store.make_directory(draft.directory)
    except StorageError as error:
        if identity is None or error.errno != errno.EEXIST:
            raise
    return draft


def discard(store: Store, draft: Draft) -> None:
    """Remove a draft that will not be published, if that can be done now; else the next writer sweeps it."""
    try:
        for name in store.names(draft.directory):
            store.remove(inside(draft.directory, name))
        store.remove(draft.directory)
    except FlowstoneError:
        return  # safe: a draft is never read, and is swept


def remove_own(store: Store, draft: Draft, names: Sequence[str]) -> None:
    """Remove files of a draft that no rank publishes; whoever removes the last one removes the directory, too."""
    for path in (*(inside(draft.directory, name) for name in names), draft.directory):
        try:
            store.remove(path)
        except FlowstoneError:
            continue  # safe: it is gone, or others have not gone yet; a draft is never read, and is swept


def publish(
    store: Store,
    draft: Draft,
    *,
    store_id: str,
    segments: Sequence[SegmentRow],
    index: bytes,
    totals: Totals,
    objects: bytes,
    receipt: Receipt,
    writer: str,
    ranks: int,
) -> Manifest:
    """Commit: index and objects, manifest, their directory, the rename, the store. Durable on return.

    The segments are durable already, which is what `receipt` says: it must carry no error.
    raises  LockedError where the store's lock was lost, by then
    """
    assert receipt.error is None, "a failed receipt must not be published"
    for name, data in ((INDEX_NAME, index), (OBJECTS_NAME, objects)):
        store.put(inside(draft.directory, name), data)
    manifest = Manifest(
        step=draft.step, id=draft.id, store=store_id, created=_now(), writer=writer, ranks=ranks,
        segments=tuple(segments),
        index=FileRow(INDEX_NAME, len(index), chunk_digests(index)),
        objects=FileRow(OBJECTS_NAME, len(objects), chunk_digests(objects)),
        tensors=totals.tensors, pieces=totals.pieces, data_bytes=totals.data_bytes, io=receipt.io,
    )
    store.put(inside(draft.directory, MANIFEST_NAME), encode_manifest(manifest))
    # The entries too: a file whose name is not durable can vanish with a power loss.
    store.sync_directory(draft.directory)
    # What follows only the one writer may do: this job may have stood still for longer than it keeps its lock.
    store.check_lock()
    store.rename(draft.directory, step_directory(draft.step))
    # And the new name: a rename that is not synced can vanish likewise.
    store.sync_directory()
    return manifest


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
