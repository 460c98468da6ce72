"""Makes a Checkpointer its store's only writer: before the first save, after the lock was lost, and after a load that
skipped damaged steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.writer import StoreWriter
from flowstone.runtime.signal_shield import Latch
from flowstone.runtime.threads import Threads
from flowstone.runtime.writer_lock import lock_as_writer
from flowstone.save.in_flight import InFlight
from flowstone.session.shared import SaveHooks, Shared


class SoleWriter:
    """Holds the lock by which this job is the store's only writer. In a group of several ranks, rank 0 takes the lock
    and sets steps aside (renames their directories, so that they are no checkpoints); each rank starts its own threads.
    """

    def __init__(
        self, shared: Shared, store_writer: StoreWriter, threads: Threads, in_flight: InFlight,
        hooks: SaveHooks,
    ) -> None:
        self._store, self._verb_lock, self._outcome = shared.store, shared.verb_lock, shared.outcome
        self._is_first = shared.group.rank == 0
        self._store_writer, self._threads, self._in_flight = store_writer, threads, in_flight
        self._hooks = hooks

    def check(self) -> None:
        """Before anything is written, become the only writer. If the last load skipped damaged steps, set aside all
        steps after the one that it loaded.
        """
        lost = self._is_first and self._store_writer.has_lost_the_lock()
        unlocked = self._is_first and self._store_writer.store_id is None
        if lost or unlocked or not self._threads.are_started or self._outcome.superseded_above is not None:
            self._verb_lock.uninterrupted(partial(self._become_writer, lost))

    def _become_writer(self, lost: bool) -> None:
        """At the first save, or after the lock was `lost`: take the store's lock, remove leftovers of dead jobs, and
        find the newest step.
        """
        if not self._threads.are_started:
            self._threads.start()
            self._hooks.on_threads_start()
        if self._is_first:
            if lost:
                self._in_flight.await_all()
                self.drain()
                self._store_writer.release_lost_lock()
            if self._store_writer.store_id is None:
                check_no_checkpoint(self._store)
                owner = self._hooks.owner()
                assert owner is not None, "a save keeps its Checkpointer alive"
                self._in_flight.note_newest(lock_as_writer(owner, self._store.location, self._store_writer.begin))
                self._store_writer.sweep()
        if self._outcome.superseded_above is not None:
            self.drain()
            if self._is_first:
                self._store_writer.rewind(self._outcome.superseded_above)
            self._in_flight.note_newest(self._outcome.superseded_above)
            self._outcome.settle_fallback()

    def rewind(self, step: int) -> Sequence[int]:
        """Set every step above `step` aside, on rank 0. Returns those steps."""
        self._store_writer.check_step_exists(step)
        self.check()
        self.drain()
        # Checked first: retention may have removed `step`, and with newer steps set aside none would be left.
        self._store_writer.check_step_exists(step)
        aside = self._store_writer.rewind(step)
        self._in_flight.note_newest(step)
        return aside

    def drain(self) -> None:
        """Wait for the retention that runs after a commit."""
        done = Latch()
        self._verb_lock.uninterrupted(lambda: self._threads.writer.submit(done.open))
        done.wait()
        self._threads.await_removals()

    def await_room(self, needed_bytes: int) -> None:
        """If the store has less free space than a save needs, wait until expired steps and leftovers of dead jobs are
        removed.
        """
        if not self._lacks_room(needed_bytes):
            return
        if all(save.committed.done() for save in self._in_flight):
            self.drain()
        else:  # do not wait for further tasks of the commit thread: the next one may take as long as a save
            self._threads.await_removals()

    def await_swept(self, needed_bytes: int) -> None:
        """Like `await_room`, but on the commit thread, and waits only for removals that have already started."""
        if self._lacks_room(needed_bytes):
            self._threads.await_removals()

    def _lacks_room(self, needed_bytes: int) -> bool:
        store = self._store
        return self._is_first and not store.capabilities.checks_room and store.free_bytes() < needed_bytes

    def await_retention(self) -> None:
        """Wait for retention, if it runs and its thread still exists."""
        if self._threads.are_started:
            with suppress(RuntimeError):  # Python is ending, and has waited for retention
                self.drain()

    def drain_at_end(self) -> None:
        """At the end, wait for retention and for flushes to farther tiers."""
        self.await_retention()
        self._store_writer.finish()
