"""The order of a save's phases, in a group of N ranks. A single process is a group of one.

    state --StateDescription--> plan --WritePlan--> stage --CaptureSources--> store --Receipt--> commit --Manifest-->

On the caller's thread   `save`: list the state, plan, watch for changes, begin capture; without a plan, copy tensors
On `flowstone-act`       shielded calls, which no signal handler may interrupt; the caller waits for them
On the engine's threads  `fs-write`, `fs-worker`, ...: memory is copied, digested and written; `save` returns meanwhile
On `flowstone-reserve`   the space of segments is allocated, if the caller does not do that
On `flowstone-capture`   `SaveOwnership.watch`: waits for a capture that outlasts `save`, then completes `captured`
On `flowstone-remove`    files of steps that retention expires are removed
On `flowstone-commit`    `_finish`: plan and begin the capture, unless `save` did; agree, write, commit, retention. One
                         save after the other, in the order of steps

pending_save.py draws the states of one save; docs/ARCHITECTURE.md lists every thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from flowstone.commit.entries import step_directory
from flowstone.coordination.messages import Contribution
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.errors import ClosedError
from flowstone.events.phases import Committed, SaveFailed
from flowstone.extensions import extension
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.ranks import error_for_others
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.exit_hook import without_frames
from flowstone.runtime.threads import call_keeping_alive
from flowstone.save.capture_start import CaptureStarter
from flowstone.save.committing import agree, commit, write
from flowstone.save.fencing import Fencing
from flowstone.save.ownership import SaveOwnership
from flowstone.save.pending_save import PendingSave
from flowstone.save.plan_cache import FenceMode
from flowstone.save.planning import Planner
from flowstone.save.skip_notifier import SkipNotifier
from flowstone.save.sole_writer import SoleWriter
from flowstone.session.futures import ExpeditingFuture, FutureHooks, ReportedFuture, Save
from flowstone.session.shared import SaveHooks, SaveOptions, Shared
from flowstone.stage.device import check_not_recording
from flowstone.stage.fence import SAVE_OUTSIDE
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.commit.writer import StoreWriter
    from flowstone.runtime.threads import Threads
    from flowstone.save.collapsing import PageCollapser
    from flowstone.save.in_flight import InFlight
    from flowstone.save.pacing import Captures


class SaveConductor:
    """Makes the saves of one Checkpointer.

    captures      the captures that run during training
    fencing       makes optimizer steps wait for these captures
    in_flight     saves that were started and not waited for yet
    sole_writer   makes this job the store's only writer
    newest_draft  id of the checkpoint of the last call of `save`
    """

    def __init__(
        self, shared: Shared, options: SaveOptions, hooks: SaveHooks, store_writer: StoreWriter, captures: Captures,
        in_flight: InFlight, threads: Threads,
    ) -> None:
        self._store, self._options, self._group = shared.store, shared.options, shared.group
        self._verb_lock, self._emit, self._outcome = shared.verb_lock, shared.emit, shared.outcome
        self._saves_in_flight, self._hooks = options.saves_in_flight, hooks
        self._threads, self._store_writer, self.captures, self.in_flight = threads, store_writer, captures, in_flight
        unmatched = extension("codecs.unmatched_rules")(options.quantize) if options.quantize else None
        self._coordinator = SaveCoordinator(shared.group.agreement, socket.gethostname(), unmatched)
        self.sole_writer = SoleWriter(shared, store_writer, threads, in_flight, hooks)
        self.fencing = Fencing(self.captures, shared.verb_lock, shared.emit)
        self.newest_draft = ""
        self._skips = SkipNotifier(self._coordinator, self._verb_lock)
        self._planner = Planner(shared, options, self._coordinator, unmatched, self.captures, self.fencing)
        self._ownership = SaveOwnership(shared.store, shared.verb_lock, self.in_flight, self.captures, shared.emit)
        self._starter = CaptureStarter(
            shared, self._planner, self._coordinator, self.captures, self.fencing, self._ownership, self._threads
        )

    @cached_property
    def collapsing(self) -> PageCollapser:
        """Collapses into huge pages the memory that saves capture lazily (after `save` returns)."""
        from flowstone.save.collapsing import PageCollapser  # imported here: a load needs none of it

        return PageCollapser(self._options, self._emit)

    # On the caller's thread

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """The phases on the caller's thread. Returns when all tensors but the lazy ones are captured."""
        save = self._new_save(step)
        try:
            attempt = self._coordinator.begin_attempt(step)  # counted before anything can fail
            pending = PendingSave(save, attempt, spans, call=self._verb_lock.counter.calls, loads=self._outcome.loads)
            check_not_recording("save", SAVE_OUTSIDE)
            self._await_turn(pending)
            with self.fencing.state_lock:
                self.collapsing.pause(save)
                self._planner.describe_state(pending, state, fence)
                plan = self._planner.plan_now(pending)
                if plan is None:  # the ranks have to agree first; this thread does not wait for the agreement
                    self._starter.copy(pending)
                else:
                    self._planner.emit_started(pending)
                    self.sole_writer.await_room(plan.plan.file_bytes)
                    self._starter.watch(pending)
                self._start(pending)
            return save
        except BaseException as error:
            self._skips.notify(save, error_for_others("save", error), self._submit)
            raise

    def _new_save(self, step: int) -> Save:
        check, captures = partial(self._verb_lock.check_thread, "result"), self.captures
        return self._hooks.on_new_save(
            step, ExpeditingFuture(FutureHooks(check, partial(captures.expedite_captured, step))),
            ReportedFuture(FutureHooks(check, self.in_flight.expedite)),
        )

    def _await_turn(self, pending: PendingSave) -> None:
        """Wait until fewer saves are in flight than the limit, become the store's only writer, and check the step."""
        step = pending.save.step
        self._group.announce_step(step)
        self._outcome.check_whole()
        with self._group.short_wait():  # the training loop waits: do not wait long for ranks that never call
            self.in_flight.await_saves(leave=self._saves_in_flight - 1)
        self.newest_draft = self._coordinator.draft_name(pending.attempt)
        pending.note_waited()
        self.sole_writer.check()
        self.in_flight.check_new(step, looks=self._group.rank == 0)

    def _start(self, pending: PendingSave) -> None:
        """Begin the capture, or let the writer's thread begin it later. On failure no file is left."""
        try:
            if pending.holds_caller:  # the caller waits until the writer's thread begins it, after earlier captures
                self.in_flight.expedite()
            self._verb_lock.uninterrupted(partial(self._begin, pending))
            self._ownership.do_callers_part(pending, self._group.short_wait)
        except BaseException:
            self._ownership.abandon(pending)
            raise

    def _begin(self, pending: PendingSave) -> None:
        """Begin the capture, and register the save with the threads that finish it, shielded from signal handlers."""
        if pending.plan is None:
            pending.await_plan()
            self.captures.add(pending)
        else:
            self._starter.begin(pending)
        try:
            if pending.plan is not None and pending.outlasts_save:
                self.captures.add(pending)
                self._threads.watcher.submit(self._ownership.watch, pending)
            self._submit(self._finish, pending)
        except RuntimeError as error:
            raise ClosedError(
                f"cannot save step {pending.save.step}: Python is shutting down", reason=str(error),
                next="save before the script ends, not in an exit handler",
            ) from error
        self.in_flight.add(pending.save)

    def _submit(self, act: Callable[..., None], *arguments: object) -> None:
        """Run `act` on the writer's thread. The Checkpointer is kept alive until `act` is done."""
        self._threads.writer.submit(call_keeping_alive, self._hooks.owner(), act, *arguments)

    # On the writer's thread

    def _finish(self, pending: PendingSave) -> None:
        """The phases of a save on the writer's thread. The future `committed` gets the outcome."""
        try:
            if pending.pending_plan is not None:
                self._skips.mark_finishing(pending.save)
                self._capture_later(pending)
            elif self._ownership.await_caller(pending):
                self._skips.mark_finishing(pending.save)
            else:
                return  # the save was abandoned, and no file of it is left
            with pending.spans.phase("agreed"):
                assignment = agree(pending, self._coordinator, self._store)
            written = write(pending, assignment, self._store, self._planner.baselines, self._emit)
            store_id = self._store_writer.store_id or ""  # only rank 0 needs it
            with pending.spans.phase("published"):
                manifest = commit(pending, assignment, written, self._coordinator, self._store, store_id)
        except BaseException as error:
            self._fail(pending, error)
            return
        assert not isinstance(written, Exception), "a failed write is not committed"
        self._conclude(pending, written, manifest)

    def _capture_later(self, pending: PendingSave) -> None:
        """For a save that had no plan: agree on one, begin the capture, and wait until everything is captured."""
        step, described, pending_plan = pending.save.step, pending.request.described, pending.pending_plan
        assert pending_plan is not None, "the save waited for its plan"
        try:
            total_bytes = int(described.pieces.lengths().sum()) * self._group.size  # estimate for all ranks
            self.sole_writer.await_swept(total_bytes)
            assignment = self._coordinator.assign(step, described.layout, is_far=bool(described.places.devices))
            pending.agree(assignment)
            try:
                self._planner.plan_later(pending, assignment)
                self._ownership.check_not_abandoned(pending)
                self._planner.emit_started(pending)
                self._starter.begin_later(pending)
            except BaseException as error:
                self._coordinator.report_abandoned(step, error_for_others("save", error))
                raise
        except BaseException:  # after any error, as the caller may be waiting
            pending.unwatch()
            pending_plan.release()
            pending.save.captured.complete()
            raise
        pending.expedite()
        self._ownership.watch(pending)
        pending_plan.release()

    def _conclude(self, pending: PendingSave, written: Contribution, manifest: Manifest) -> None:
        """After the commit of a save: report it, prepare the next save, and run retention."""
        step, plan = pending.save.step, pending.begun.plan
        try:
            self._planner.note_written(pending, written)
        except Exception:  # the checkpoint exists even if this bookkeeping fails
            if self._planner.baselines is not None:
                self._planner.baselines.forget()
            log.exception("step %d is saved, but the next save cannot refer to it, and writes everything", step)
        file_bytes = sum(row.bytes for row in written.segments if row.home is None)
        self._emit(Committed(step, file_bytes, pending.end_span(file_bytes).seconds))
        if pending.begun.sources.streams and self.captures.preparation.is_unreported:
            self._emit(self.captures.preparation.report(self.captures.arena))
        pending.commit(Checkpoint(self._store, step_directory(step), self._options, manifest))
        # A larger arena shortens the capture of a save. It grows here because touching new pages is slow.
        self.captures.grow(plan.file_bytes - plan.lazy_bytes)
        if pending.late is not None:
            self.collapsing.begin(step, pending.late, outlives_save=pending.outlives_save)
        self._store_writer.run_retention(step)

    def _fail(self, pending: PendingSave, error: BaseException) -> None:
        pending.save.captured.await_end()  # the watcher completes it
        pending.end_span()
        self._emit(SaveFailed(pending.save.step, str(error)))
        pending.fail(without_frames(error))
