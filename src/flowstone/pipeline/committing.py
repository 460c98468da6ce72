"""The stages of a save on the writer's thread: agree, receipts, commit. Pipeline/save.py shows their order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flowstone.commit import publish
from flowstone.commit.manifests import inside
from flowstone.errors import RankError
from flowstone.events import BuffersFromOneRank, Event
from flowstone.format.codec import CAST
from flowstone.format.index import ChunkPlaces
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.pipeline.base import Base, captured_digests, places_of, root_digests, unneeded
from flowstone.pipeline.messages import Assignment, Contribution
from flowstone.pipeline.save_coordinator import SaveCoordinator
from flowstone.pipeline.save_run import SaveRun
from flowstone.store.base import Store, sync_further_paths


def agree(run: SaveRun, coordinator: SaveCoordinator, store: Store) -> Assignment:
    """All ranks agree to save this step, by one plan in which each element is written once."""
    begun = run.begun.assignment
    if run.is_agreed:
        return begun
    try:
        return coordinator.assign(run.save.step, begun.layout, begun=begun)
    except Exception:
        run.begun.abandon(store)  # even if the outcome is unknown: nothing is committed without agreement
        raise


def write(
    run: SaveRun, assignment: Assignment, store: Store, before: Base | None, emit: Callable[[Event], None]
) -> Contribution | Exception:
    """This rank's part of the commit once its segments are durable; or its failure, which the other ranks get.

    before  the base of an earlier save, with which `run.base` is compared
    """
    try:
        receipt = run.receipt()
        emit(run.written(receipt))
        written = run.contribution(receipt)
        begun, plan = run.begun, run.begun.plan
        unwanted = unneeded(plan, begun.referred, written.segments)
        for name in unwanted:
            store.remove(inside(begun.draft.directory, name))
        if unwanted:
            sync_further_paths(store, begun.draft.directory)
        places = written.places or places_of(plan, begun.sources.offsets)
        run.base = Base(
            begun.draft.step, begun.draft.id, plan.pieces, begun.assignment.lazy(),
            captured_digests(plan, receipt), written.segments, places, None, run.loads, _stored(places),
            roots=root_digests(receipt, begun.referred, captured_digests(plan, receipt)),
        ).compared(before, plan.length, None if receipt.encoded is None else receipt.encoded.same)
        if assignment.buffers:
            emit(BuffersFromOneRank(run.save.step, assignment.buffers))
        return written
    except Exception as error:
        return error


def _stored(places: ChunkPlaces) -> NDArray[np.bool_] | None:
    """Which chunks have bytes that a later save may refer to; None: all."""
    if places.forms is None:
        return None
    stored: NDArray[np.bool_] = places.forms.codec != CAST.id
    return None if stored.all() else stored


def commit(
    run: SaveRun, assignment: Assignment, written: Contribution | Exception, coordinator: SaveCoordinator,
    store: Store, store_id: str,
) -> Manifest:
    """Publish what all ranks have written: the checkpoint is durable when this returns.

    A rank that is cut off looks into the store: rank 0's process may have ended once it had published, and the job's
    key-value store with it.
    """
    try:
        return coordinator.commit(run.this_try, written, assignment, store, run.begun.draft, store_id)
    except Exception as error:
        if not (isinstance(error, RankError) and error.undecided):
            run.begun.remove(store)
            raise
        is_cut_off = isinstance(error.__cause__, RuntimeError)  # of the key-value store; of silence: none
        found = publish.published(store, run.begun.draft) if is_cut_off else None
        if found is None or isinstance(written, Exception):
            raise
        log.info("step %d is committed, as the store says: %s", run.save.step, error)
        return found
