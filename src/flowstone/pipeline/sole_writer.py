"""A Checkpointer as the store's one writer: what its first save does before anything is written; and what a later save
does if the lock was lost, or a load fell back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.writer import StoreWriter
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.shared import Shared
from flowstone.runtime.threads import Threads
from flowstone.runtime.uninterrupted import Latch
from flowstone.runtime.writer_lock import Owner, as_writer


class SoleWriter:
    """In a group of N ranks, rank 0 holds the lock and sets steps aside; each rank starts its own threads."""

    def __init__(
        self, shared: Shared, store_writer: StoreWriter, threads: Threads, in_flight: InFlight,
        owner: Callable[[], Owner | None], on_start: Callable[[], None],
    ) -> None:
        """`owner`: the Checkpointer that locks the store. `on_start`: called once the threads run.
        """
        self._store, self._turn, self._outcome = shared.store, shared.turn, shared.outcome
        self._is_first = shared.group.rank == 0
        self._store_writer, self._threads, self._in_flight = store_writer, threads, in_flight
        self._owner, self._on_start = owner, on_start

    def check(self) -> None:
        """Before anything is written: become the writer, and set aside the steps that a fallback has superseded."""
        lost = self._is_first and self._store_writer.has_lost_the_lock()
        unlocked = self._is_first and self._store_writer.store_id is None
        if lost or unlocked or not self._threads.are_started or self._outcome.superseded_above is not None:
            self._turn.uninterrupted(partial(self._become, lost))

    def _become(self, lost: bool) -> None:
        """At the first save, or after the lock was `lost`: lock, sweep, find the newest step."""
        if not self._threads.are_started:
            self._threads.start()
            self._on_start()
        if self._is_first:
            if lost:
                self._in_flight.await_all()
                self.drain()
                self._store_writer.give_up()
            if self._store_writer.store_id is None:
                check_no_checkpoint(self._store)
                owner = self._owner()
                assert owner is not None, "what saves holds it"
                self._in_flight.newest = as_writer(owner, self._store.location, self._store_writer.begin)
                self._store_writer.sweep()
        if self._outcome.superseded_above is not None:
            self.drain()
            if self._is_first:
                self._store_writer.rewind(self._outcome.superseded_above)
            self._in_flight.newest, self._outcome.superseded_above = self._outcome.superseded_above, None

    def rewind(self, step: int) -> Sequence[int]:
        """Set every step above `step` aside, on rank 0. Returns those steps."""
        self._store_writer.find(step)
        self.check()
        self.drain()
        self._store_writer.find(step)  # retention may have given it up: with newer ones set aside nothing would be left
        aside = self._store_writer.rewind(step)
        self._in_flight.newest = step
        return aside

    def drain(self) -> None:
        """Wait for retention too, which runs after a commit."""
        done = Latch()
        self._turn.uninterrupted(lambda: self._threads.writer.submit(done.open))
        done.wait()
        self._threads.await_removals()

    def await_room(self, needed_bytes: int) -> None:
        """If there is less room than a save needs, wait until retention has freed what earlier saves have given up, and
        the sweep what dead jobs have left.
        """
        if not self._lacks_room(needed_bytes):
            return
        if all(save.committed.done() for save in self._in_flight):
            self.drain()
        else:  # what the thread of commits does next may take as long as a save
            self._threads.await_removals()

    def await_swept(self, needed_bytes: int) -> None:
        """The same on the thread of commits, for what has been removed so far."""
        if self._lacks_room(needed_bytes):
            self._threads.await_removals()

    def _lacks_room(self, needed_bytes: int) -> bool:
        store = self._store
        return self._is_first and not store.capabilities.checks_room and store.free_bytes() < needed_bytes

    def await_retention(self) -> None:
        """The same when there may be nothing to wait for, or no thread left."""
        if self._threads.are_started:
            with suppress(RuntimeError):  # Python is ending, and has waited for it
                self.drain()

    def drain_at_end(self) -> None:
        """The same at the end, and what goes on from there to farther tiers."""
        self.await_retention()
        self._store_writer.finish()
