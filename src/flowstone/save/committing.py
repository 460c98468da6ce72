"""The stages of a save on the writer's thread: agree, write, commit. conductor.py has their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flowstone.commit import publish
from flowstone.commit.manifests import path_inside
from flowstone.coordination.messages import Assignment, Contribution
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.errors import RankError
from flowstone.events.phases import Event
from flowstone.format.manifest import Manifest, SegmentRow
from flowstone.log import log
from flowstone.save.pending_save import PendingSave
from flowstone.store.base import Store, sync_further_paths

if TYPE_CHECKING:
    from flowstone.delta.baselines import Baselines


def agree(pending: PendingSave, coordinator: SaveCoordinator, store: Store) -> Assignment:
    """Agree with all ranks to save this step, and on a plan by which exactly one rank writes each element. Returns
    which pieces this rank writes.
    """
    if pending.agreed is not None:
        return pending.agreed
    begun = pending.begun.assignment
    try:
        return coordinator.assign(pending.save.step, begun.layout, begun=begun)
    except Exception:
        pending.begun.abandon(store)  # even if the outcome is unknown: without agreement nothing is committed
        raise


def write(
    pending: PendingSave, assignment: Assignment, store: Store, baselines: Baselines | None,
    emit: Callable[[Event], None],
) -> Contribution | Exception:
    """Wait until this rank's segment files are durable. Returns the description of these files for the commit. If they
    could not be written, returns the error, which is sent to the other ranks.

    baselines  decide which chunks later saves need not write; None: all chunks are written
    """
    try:
        before = None if baselines is None else baselines.current()
        receipt = pending.receipt()
        emit(pending.written(receipt))
        begun, places = pending.begun, None
        segments: Sequence[SegmentRow] = begun.segments
        if baselines is not None:
            plan, referred = begun.plan, begun.referred
            stored = baselines.stored_chunks(segments, plan, begun.sources.offsets, referred, receipt)
            segments, places = stored.segments, stored.places
            for name in stored.unneeded:
                store.remove(path_inside(begun.draft.directory, name))
            if stored.unneeded:
                sync_further_paths(store, begun.draft.directory)
            base = baselines.base_of(begun.draft, begun.assignment, plan, referred, stored, receipt, pending.loads)
            same = None if receipt.encoded is None else receipt.encoded.same
            pending.note_base(base.compared(before, plan.length, same))
        written = pending.contribution(receipt, segments, places)
        if assignment.buffers:
            from flowstone.events.rare_events import BuffersFromOneRank  # imported here: few jobs have such buffers

            emit(BuffersFromOneRank(pending.save.step, assignment.buffers))
        return written
    except Exception as error:
        return error


def commit(
    pending: PendingSave, assignment: Assignment, written: Contribution | Exception, coordinator: SaveCoordinator,
    store: Store, store_id: str,
) -> Manifest:
    """Publish the files of all ranks. The checkpoint is durable when this returns.

    If a rank can no longer reach the job's key-value store, it checks whether the checkpoint exists: rank 0's process,
    which may host the key-value store, may have published the checkpoint and then ended.
    """
    try:
        return coordinator.commit(pending.attempt, written, assignment, store, pending.begun.draft, store_id)
    except Exception as error:
        if not (isinstance(error, RankError) and error.undecided):
            pending.begun.remove(store)
            raise
        is_cut_off = isinstance(error.__cause__, RuntimeError)  # the key-value store failed; a timeout has no cause
        published = publish.find_published(store, pending.begun.draft) if is_cut_off else None
        if published is None or isinstance(written, Exception):
            raise
        log.info("step %d is committed, although the agreement of the ranks failed: %s", pending.save.step, error)
        return published
