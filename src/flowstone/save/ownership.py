"""Hands pending saves over from the caller of `save` to the threads that finish them.

pending_save.py draws the states of a save. A signal handler may raise an exception at any point of `save`. So a call
that no handler can interrupt (a shielded call, runtime/signal_shield.py) begins the save and registers it with the
threads that finish saves. They wait until the caller has done its part. Then a second shielded call hands the save
over, or abandons it. If the caller was interrupted before that second call, the thread that finishes saves notices that
`save` has ended, and abandons the pending save.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from flowstone.config import BLOCKED_CALLER_WAIT_S
from flowstone.errors import CancelledError
from flowstone.events.phases import Event
from flowstone.runtime.verb_lock import VerbLock
from flowstone.save.in_flight import InFlight
from flowstone.save.pacing import Captures
from flowstone.save.pending_save import PendingSave, SaveState
from flowstone.store.base import Store

if TYPE_CHECKING:
    from flowstone.save.pending_plan import PendingPlan

_RECHECK_S = 1.0  # time between two checks of whether the call of `save` has ended


class SaveOwnership:
    """Decides which thread must finish or abandon each pending save of one Checkpointer."""

    def __init__(
        self, store: Store, verb_lock: VerbLock, in_flight: InFlight, captures: Captures, emit: Callable[[Event], None]
    ) -> None:
        self._store, self._verb_lock, self._in_flight = store, verb_lock, in_flight
        self._captures, self._emit = captures, emit

    # On the caller's thread

    def do_callers_part(self, pending: PendingSave, short_wait: Callable[[], AbstractContextManager[None]]) -> None:
        """Do the caller's part: encode values that are not tensors, and wait until everything is captured except what
        is captured lazily. Then hand the save over to the writer's thread.

        short_wait  RankGroup.short_wait
        """
        plan = pending.pending_plan
        if plan is None:
            pending.encode()
            pending.note_blocked(pending.spans.all_laps("blocked"))
            if pending.outlasts_save:
                self._captures.begin_overlap(pending)
            else:
                self._verb_lock.uninterrupted(partial(self._complete_captured, pending))
            pending.hand_over()
        elif plan.holds_caller:
            self.await_release(plan, short_wait)
            pending.note_blocked(pending.spans.since_begin("blocked"))
            pending.hand_over()
            if pending.capture is None or not pending.outlasts_save:  # the save failed, or everything is captured
                pending.save.captured.await_end()

    def await_release(self, plan: PendingPlan, short_wait: Callable[[], AbstractContextManager[None]]) -> None:
        """Wait until the tensors that may change once `save` returns are captured or copied, or the save has failed."""
        if not plan.released.wait(BLOCKED_CALLER_WAIT_S):
            with short_wait():
                plan.released.wait()

    def abandon(self, pending: PendingSave) -> None:
        """Abandon the save after the caller's part was interrupted or failed, unless it was handed over."""
        plan = pending.pending_plan
        if plan is None:
            if pending.capture is not None:
                self._verb_lock.uninterrupted(partial(self._abandon, pending))
            pending.unwatch()
        elif pending.state is SaveState.CALLED:
            plan.release()
        elif plan.holds_caller:
            self._verb_lock.uninterrupted(partial(self.forget, pending))

    # On the thread that finishes saves

    def await_caller(self, pending: PendingSave) -> bool:
        """Wait until the caller has done its part of the save. False if the save was abandoned."""
        while not pending.caller_done.wait(_RECHECK_S):
            if not self._verb_lock.counter.is_in(pending.call):
                self._abandon(pending)
        return pending.state is SaveState.HANDED_OVER

    def release_caller(self, pending: PendingSave) -> None:
        """Let `save` return, if it waits because there was no plan and no room for copies.

        raises  CancelledError  the caller was interrupted, so the state may have changed before it was captured
        """
        plan = pending.pending_plan
        assert plan is not None, "the save waits for its plan"
        if not plan.holds_caller:
            pending.hand_over()
        plan.released.open()
        while not pending.caller_done.wait(_RECHECK_S):
            if not self._verb_lock.counter.is_in(pending.call):
                self.forget(pending)
        self.check_not_abandoned(pending)

    def check_not_abandoned(self, pending: PendingSave) -> None:
        """Raise CancelledError if the caller was interrupted while it waited."""
        if pending.state is SaveState.ABANDONED:
            raise CancelledError("save() was interrupted", next="save again")

    # On any of these threads

    def forget(self, pending: PendingSave) -> None:
        """Record that the caller was interrupted while it waited for a plan, so that the state may change. The thread
        that finishes saves then ends the save.
        """
        if not pending.abandon():
            return
        pending.save.captured.complete()
        self._in_flight.forget(pending.save)
        pending.caller_done.open()

    def watch(self, pending: PendingSave) -> None:
        """Complete `captured` when the last lazy byte is captured. On the watcher's thread, or the writer's."""
        try:
            pending.writing.wait_captured()
        finally:
            pending.caller_done.wait()
            if pending.state is SaveState.HANDED_OVER:
                self._complete_captured(pending)

    def _complete_captured(self, pending: PendingSave) -> None:
        try:
            self._emit(pending.end_capture())
        finally:  # always completed, as a thread may wait for it
            pending.save.captured.complete()

    def _abandon(self, pending: PendingSave) -> None:
        """Unless the save was handed over: close and remove its files, and complete its futures."""
        if not pending.abandon():
            return
        try:
            pending.begun.abandon(self._store)
        finally:
            pending.release_memory()
            pending.fail(CancelledError("save() was interrupted", next="save again"))
            self._in_flight.forget(pending.save)
            pending.caller_done.open()
