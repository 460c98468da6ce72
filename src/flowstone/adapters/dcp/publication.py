"""The coordinator's part of a save: commit the segments (files of tensors) of all ranks as one checkpoint, in the order
of docs/ORDERING.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._version import __version__
from flowstone.adapters.dcp.segments import RankReceipt
from flowstone.adapters.dcp.target import Target
from flowstone.commit import publish, removal
from flowstone.commit.entries import new_superseded_directory, step_of
from flowstone.commit.manifests import read_marker
from flowstone.commit.read import encode_sections, join_objects
from flowstone.coordination.rank_zero import check_visible, io_of
from flowstone.errors import StorageError
from flowstone.format.manifest import MARKER_NAME, Manifest, SegmentRow
from flowstone.log import log
from flowstone.plan.global_index import global_index
from flowstone.plan.write import check_tensors
from flowstone.store.local import LocalStore
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias, Pieces, TensorColumns


def begin(store: LocalStore, target: Target) -> None:
    """Create an empty directory for the unfinished checkpoint, in which the ranks write. The parent directory exists.
    Removes the directory of a dead save.
    """
    check_lock(store, target)
    if store.exists(target.draft_directory):
        removal.empty_directory(store, target.draft_directory)
    publish.begin_draft(store, target.step, _identity(target))


def discard(store: LocalStore, target: Target) -> None:
    """Remove the directory of an unfinished checkpoint that will not be published."""
    if store.exists(target.draft_directory):
        removal.empty_directory(store, target.draft_directory)


def _identity(target: Target) -> str:
    return target.draft_directory.rpartition(f"{target.step:08d}-")[2]


def check_lock(store: LocalStore, target: Target) -> None:
    """Raise LockedError if the target is in a store that a Checkpointer is writing to."""
    if store.exists(MARKER_NAME):
        store.lock(_holder(target))
        store.unlock()


def _holder(target: Target) -> str:
    return f"dcp.save to {target.name}"


def commit(
    store: LocalStore, target: Target, receipts: Sequence[RankReceipt], sections: Mapping[str, object],
    aliases: Sequence[Alias] = (), *, identity: str | None = None,
) -> Manifest:
    """Publish the segments of all ranks as a checkpoint, which replaces an earlier one at the same target. Durable on
    return.

    sections  all values other than tensors
    identity  the checkpoint's unique id; None: a new one
    aliases   further names of the tensors
    raises    CoverageError, CollisionError, StorageError, LockedError
    """
    layouts = [_pieces_of(receipt) for receipt in receipts]
    _check_complete(layouts)
    segments: list[SegmentRow] = []
    columns: list[NDArray[np.uint32]] = []
    for receipt in receipts:
        check_visible(store, target.draft_directory, receipt.rank, receipt.segments)
        columns.append((receipt.segment + len(segments)).astype(np.uint32))
        segments += [replace(row, id=len(segments) + number) for number, row in enumerate(receipt.segments)]
    frame, piece_order, chunk_order = global_index(
        [pieces.compact() for pieces in layouts], [np.arange(len(pieces)) for pieces in layouts], aliases,
        np.concatenate(columns),
    )
    offsets = np.concatenate([receipt.offsets for receipt in receipts])
    digests = np.concatenate([receipt.digests for receipt in receipts])
    made = publish.Publication(
        segments, frame.fill(offsets[piece_order], digests[chunk_order]), frame.totals,
        join_objects(encode_sections(sections), {}), io_of([receipt.io for receipt in receipts]),
        writer=f"flowstone {__version__}", ranks=len(receipts),
    )
    return _publish(store, target, made, identity or secrets.token_hex(8))


def _publish(store: LocalStore, target: Target, made: publish.Publication, identity: str) -> Manifest:
    """Commit the checkpoint. If the target is in a store, the store's lock is held meanwhile."""
    is_store = store.exists(MARKER_NAME)
    if is_store:
        store.lock(_holder(target))
    try:
        owner = read_marker(store).store if is_store and step_of(target.name) is not None else ""
        draft = publish.Draft(target.step, identity, target.draft_directory)
        manifest = publish.write_draft(store, draft, owner, made)
        replaced = store.replace(target.draft_directory, target.name, new_superseded_directory(target.step))
        store.sync_directory()
        if replaced is not None:  # removed only now, as a power loss could undo a rename that is not durable
            _remove(store, replaced)
        return manifest
    finally:
        if is_store:
            store.unlock()


def _remove(store: LocalStore, replaced: str) -> None:
    """Remove the replaced checkpoint. An error is only logged, since the new checkpoint is already committed."""
    try:
        removal.empty_directory(store, replaced)
    except StorageError as error:
        log.warning("could not remove the replaced checkpoint %s/%s: %s", store.location, replaced, error)


def _pieces_of(receipt: RankReceipt) -> Pieces:
    dtypes = tuple(DTYPES[name] for name in receipt.dtypes)
    return Pieces(TensorColumns(receipt.names, dtypes, receipt.shapes), receipt.parts, receipt.boxes)


def _check_complete(layouts: Sequence[Pieces]) -> None:
    """Raise an error unless all ranks together write each element of each tensor exactly once."""
    boxes: dict[int, Box] = {}
    row = 0
    for pieces in layouts:
        boxes |= {row + position: box for position, box in pieces.part_boxes()}
        row += len(pieces)
    columns = [(p.names, p.dtypes, p.shapes) for p in layouts]
    names, dtypes, shapes = (tuple(value for part in column for value in part) for column in zip(*columns, strict=True))
    joined = Pieces.cut(TensorColumns(names, dtypes, shapes), boxes)
    check_tensors(joined, boxes, is_complete=True)
