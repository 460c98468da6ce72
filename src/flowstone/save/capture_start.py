"""Starts captures: from the state's memory, or from copies of the state if the ranks had to agree on a plan first."""

from __future__ import annotations

from flowstone.commit import publish
from flowstone.config import FIRST_ARENA_BYTES
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.runtime.threads import Threads, run_on_thread
from flowstone.save.capturing import Capture, begin_capture, watch
from flowstone.save.fencing import Fencing
from flowstone.save.ownership import SaveOwnership
from flowstone.save.pacing import Captures
from flowstone.save.pending_save import PendingSave
from flowstone.save.planning import Planner
from flowstone.session.shared import Shared
from flowstone.stage.capture import CaptureSources, WriteTarget
from flowstone.state import StateDescription


class CaptureStarter:
    """Begins the captures of one Checkpointer's saves."""

    def __init__(
        self, shared: Shared, planner: Planner, coordinator: SaveCoordinator, captures: Captures, fencing: Fencing,
        ownership: SaveOwnership, threads: Threads,
    ) -> None:
        self._store, self._watch, self._verb_lock = shared.store, shared.options.watch, shared.verb_lock
        self._planner, self._coordinator, self._captures, self._fencing = planner, coordinator, captures, fencing
        self._ownership, self._threads = ownership, threads

    # On the caller's thread

    def watch(self, pending: PendingSave) -> CaptureSources | None:
        """Detect changes of the tensors from now on. Returns None if some are on devices: their watch begins with the
        capture.

        Host memory is watched on the caller's thread, which already has a core. Another thread would wait for a core
        while torch's threads still spin.
        """
        return None if pending.request.described.places.devices else self._watched(pending, pending.request.described)

    def _watched(self, pending: PendingSave, described: StateDescription) -> CaptureSources:
        sources = watch(pending.planned, described, self._watch, pending.save.step)
        pending.note_watched(sources)
        return sources

    def copy(self, pending: PendingSave) -> None:
        """Copy the tensors that may change once `save` returns. If the budget has no room for copies, the caller waits.
        If an optimizer step begins before the plan exists, the step copies all other tensors first.
        """
        from flowstone.save.pending_plan import copy_until_planned  # imported here: a group of one has a plan at once

        request, samples = pending.request, pending.samples
        assert samples is not None, "replicas are sampled with the description"
        described = request.described
        self._verb_lock.uninterrupted(lambda: self._fencing.hooks.guard(described.optimizers))
        self._captures.open_for(described.places.devices)
        with pending.spans.phase("copied"):
            pending.note_pending_plan(copy_until_planned(
                pending.save.step, described, samples.sampled[1], fence=request.fence, watch=self._watch,
                room_bytes=self._captures.room_for_copies,
            ))
        if not pending.holds_caller:
            pending.note_blocked(pending.spans.since_begin("blocked"))

    def begin(self, pending: PendingSave) -> Capture:
        """Begin to capture the state. Must be called shielded from signal handlers. On failure no file is left."""
        with pending.request.streams():
            return self._begin(pending, pending.request.described)

    # On the writer's thread

    def begin_later(self, pending: PendingSave) -> Capture:
        """Capture the state, or its copies, and encode the values that are not tensors. Then `save` may return.

        raises  StateChangedError  the state has changed since `save` was called
                CancelledError     the caller was interrupted while it waited
        """
        kept = pending.pending_plan
        assert kept is not None, "the save waited for its plan"
        with pending.request.streams():
            described = kept.take()
            capture = self._begin(pending, described)
            try:
                kept.check_unwritten()
                pending.encode(described)
                self._ownership.release_caller(pending)
            except BaseException:
                pending.begun.abandon(self._store)
                raise
            return capture

    def _begin(self, pending: PendingSave, described: StateDescription) -> Capture:
        devices, step = described.places.devices, pending.save.step
        planned, arena = pending.planned, self._captures.open_for(devices)
        plan = planned.plan
        if planned.waiter == "optimizers" and plan.lazy_bytes:
            self._fencing.hooks.guard(described.optimizers)
        if devices:
            self._captures.preparation.pin_for(arena, devices)
        compress = self._planner.compress
        sources = pending.watched or self._watched(pending, described)
        pace = self._captures.pace(plan, self._store.settings("write").tuning)
        draft = publish.begin_draft(self._store, step, self._coordinator.draft_name(pending.attempt))
        target = WriteTarget(self._store, draft.directory, arena)
        capture = begin_capture(target, draft, planned, described, sources, pace, self._planner.baselines)
        try:
            arena.grow(min(capture.arena_bytes, FIRST_ARENA_BYTES, self._captures.arena_bytes_max))
            if not capture.is_reserved:
                run_on_thread(self._threads.reserver, capture.writing.reserve)
            if capture.sources.streams:  # grows when no save runs; otherwise, optimizer steps would wait for it
                self._captures.grow(capture.arena_bytes)
        except BaseException:
            capture.abandon(self._store)
            raise
        pending.begin(capture, compress)
        return capture
