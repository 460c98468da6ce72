"""The flusher of one farther tier: it copies queued checkpoints into the tier in order, each until it succeeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import cast

import msgspec

from flowstone.commit import catalog, publish, removal
from flowstone.commit.entries import new_superseded_directory, step_directory
from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.retention import Retention
from flowstone.config import FLUSH_YIELD, TIER_RETRY_S, TIER_RETRY_S_MAX, Keep, KeepRule
from flowstone.errors import (
    CancelledError,
    FlowstoneError,
    FormatError,
    NoCheckpointError,
    StepExistsError,
    StorageError,
    is_absence,
    is_damage,
)
from flowstone.format.manifest import MARKER_NAME, Manifest
from flowstone.log import log
from flowstone.store.base import Pace, Store, sync_names
from flowstone.tiered import lineage
from flowstone.tiered.copying import SourceFailedError
from flowstone.tiered.flush import flush
from flowstone.tiered.policy import PlacedTier
from flowstone.tiered.restore import check_same_run
from flowstone.tiered.tier_events import FlushDropped, Flushed, TierEvent, TierFailed
from flowstone.tiered.worker import Worker

_PAUSE_S = 0.01  # pause between two checks, while a flush waits for a save


class QueuedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in the queue of a tier. `bytes`: the size of its segments."""

    step: int
    id: str
    bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> QueuedCheckpoint:
        return cls(manifest.step, manifest.id, sum(row.bytes for row in manifest.segments))


class TierContext(msgspec.Struct, frozen=True, eq=False):
    """A tier's callbacks to the other tiers and the Checkpointer, called on the tier's thread.

    nearer      the stores of all nearer tiers, the nearest first
    contents_of_others  returns the contents of all other tiers that this job has joined
    awaited     returns the steps that wait for a flush to any tier
    is_saving   whether a save is running
    emit        emits an event
    on_removed, on_left  called when retention or a sweep removes or keeps a directory; see StoreWriter
    on_flushed  called for each flushed checkpoint
    on_dropped  called for each checkpoint that will not be flushed
    """

    nearer: Sequence[Store]
    contents_of_others: Callable[[Store], list[lineage.TierContents]]
    awaited: Callable[[], Collection[int]]
    is_saving: Callable[[], bool]
    emit: Callable[[TierEvent], None]
    on_removed: Callable[[str, str, StorageError | None], None]
    on_left: Callable[[str, str], None]
    on_flushed: Callable[[Store, Manifest], None]
    on_dropped: Callable[[Store, int, str], None]


class Flusher:
    """Flushes checkpoints to one farther tier. `act` and `join` run on the tier's thread, other methods on any thread.

    identity   the identity of the run's stores; "" before the first save
    is_joined  whether this job holds the tier's lock, and the tier has the notes of all rewinds (tiered/lineage.py)
    newest     the tier's newest step, once joined; None: it has no step
    """

    def __init__(self, placed: PlacedTier, around: TierContext, first: Callable[[], None] = lambda: None) -> None:
        """`first` is called once on the tier's thread, before anything else."""
        self.tier, self.store, self.is_volatile = placed.tier, placed.store, placed.is_volatile
        self._around = around
        self._changed = threading.Condition()
        self._waiting: dict[int, QueuedCheckpoint] = {}
        self._under_way: int | None = None
        self._is_cancelled = False
        self._is_ending = False
        self._last: int | None = None  # the newest step in the tier or in its queue
        self._failures, self._retry_at = 0, 0.0
        self._tries = 0
        self._retention: Retention | None = None
        self._holder = ""
        self.identity = ""
        self.is_joined = False
        self.newest: int | None = None
        self.worker = Worker("flowstone-flush", self.act, first)

    # From other threads

    def begin(self, identity: str, holder: str) -> None:
        """Start to flush: this job is now the run's writer."""
        self.identity, self._holder = identity, holder

    def enqueue(self, waiting: QueuedCheckpoint) -> bool:
        """Queue a checkpoint that the first tier has committed. Returns False if this tier does not get this step."""
        with self._changed:
            if not self._should_flush(waiting.step):
                return False
            self._last = waiting.step
            self._waiting[waiting.step] = waiting
            dropped = self._drop_excess()
            self._changed.notify_all()
        self._report_dropped(dropped, self._excess_reason())
        self.worker.wake()
        return True

    def _should_flush(self, step: int) -> bool:
        return self._last is None or step - self._last >= self.tier.every

    def _drop_excess(self) -> list[int]:
        """Remove the oldest checkpoints from the queue while it exceeds its limits; never the newest one. Returns the
        removed steps. The caller holds the lock of `_changed`.
        """
        dropped = []
        for step in sorted(self._waiting)[:-1]:
            is_too_many = len(self._waiting) > self.tier.lag
            limit = self.tier.lag_bytes
            is_too_large = limit is not None and sum(waiting.bytes for waiting in self._waiting.values()) > limit
            if not is_too_many and not is_too_large:
                break
            if step != self._under_way:
                del self._waiting[step]
                dropped.append(step)
        return dropped

    def _excess_reason(self) -> str:
        limit = "" if self.tier.lag_bytes is None else f" or {self.tier.lag_bytes} bytes"
        return f"more than {self.tier.lag} checkpoints{limit} waited"

    @property
    def waiting(self) -> tuple[int, ...]:
        """The steps in the queue, oldest first. The first one may be being flushed."""
        with self._changed:
            return tuple(sorted(self._waiting))

    def cancel_above(self, above: int) -> list[int]:
        """Remove all steps above `above` from the queue, since a rewind sets them aside. Returns the removed steps."""
        with self._changed:
            removed = sorted(step for step in self._waiting if step > above)
            for step in removed:
                del self._waiting[step]
            self._is_cancelled = self._under_way is not None and self._under_way > above
            self._last = None if self._last is None else min(self._last, above)
        return removed

    def end(self) -> None:
        """Cancel the running flush. Its step stays in the queue."""
        self._is_ending = True

    def retry_now(self) -> int:
        """Start the next attempt now, even after a failure. Returns how many attempts have failed so far, for
        `await_idle`.
        """
        with self._changed:
            self._retry_at = 0.0
            tries = self._tries
        self.worker.wake()
        return tries

    def await_idle(self, tries: int, timeout_s: float) -> bool:
        """Wait until the queue is empty, or more than `tries` attempts have failed. Returns False after `timeout_s`.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting or (self._failures > 0 and self._tries > tries), timeout_s
            )

    # On the worker's thread

    def marker(self) -> str | None:
        """The identity of the tier's store; None if it does not exist. Raises StorageError."""
        return read_marker(self.store).store if self.store.exists(MARKER_NAME) else None

    def join(self) -> None:
        """Join the tier: lock it, remove leftovers of dead writers, set aside steps from before a rewind that the tier
        missed, and fill the queue.

        raises  NotAStoreError  the store belongs to another run
                LockedError     another job writes there
                StorageError
        """
        store = self.store
        self.is_joined = False
        check_no_checkpoint(store)
        if not store.exists(MARKER_NAME):
            store.make_directory()
        with suppress(FlowstoneError):  # the lock may be lost, or its file removed
            store.unlock()
        store.lock(self._holder)
        try:
            check_same_run(store, publish.open_store(store, self.identity), self.identity)
            catalog.sweep_leftovers(store, self._around.on_removed, self._around.on_left)
            others = self._around.contents_of_others(store)
            contents = apply_rewinds(store, others)
        except BaseException:
            store.unlock()
            raise
        keep = cast("Keep | KeepRule | None", self.tier.keep)  # `Tier` has turned a number into a Keep
        self._retention = Retention(store, self.identity, keep, self._around.on_removed, self._around.on_left)
        self.newest = contents.steps[-1] if contents.steps else None
        self.is_joined = True
        self._catch_up()

    def _catch_up(self) -> None:
        """Queue checkpoints of nearer tiers that this tier should get."""
        planned: dict[int, QueuedCheckpoint] = {}
        for store in self._around.nearer:
            with suppress(FlowstoneError):  # checkpoints that only an unreadable tier has cannot be flushed now
                for step in catalog.steps(store):
                    if (self.newest is None or step > self.newest) and step not in planned:
                        # the checkpoint is damaged in that tier, or removed from it
                        with suppress(FormatError, NoCheckpointError):
                            planned[step] = QueuedCheckpoint.of(read_manifest(store, step_directory(step)))
        with self._changed:
            previous = self._waiting if self._last is not None else {}
            self._last = self.newest
            self._waiting = {}
            for step in sorted({*planned, *previous}):
                if step in previous or self._should_flush(step):
                    self._waiting[step] = planned.get(step) or previous[step]
                    self._last = step
            if self.newest is not None:
                self._waiting = {step: waiting for step, waiting in self._waiting.items() if step > self.newest}
            dropped = self._drop_excess()
            self._changed.notify_all()
        self._report_dropped(dropped, self._excess_reason())

    def act(self) -> float | None:
        """Flush queued checkpoints. Returns the seconds until the next attempt; None: the next attempt is when the
        queue changes.
        """
        if not self.identity:
            return None
        while True:
            left = self._retry_at - self.worker.now()
            if left > 0:
                return left
            with self._changed:
                next_one = self._waiting[min(self._waiting)] if self._waiting else None
                self._under_way, self._is_cancelled = None if next_one is None else next_one.step, False
            if next_one is None and self.is_joined:
                self._failures = 0  # reset only after a flush: joining the tier is not enough
                return None
            try:
                if not self.is_joined:
                    self.join()
                else:
                    assert next_one is not None, "the queue is not empty"
                    self._flush(next_one)
                    self._failures = 0
            except CancelledError:
                pass  # the caller that cancelled the flush knows; the queue is checked again
            except FlowstoneError as error:
                self.fail(error, next_one)
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()
            if self.worker.is_asked or self._is_cancelled or self._is_ending:
                return 0.0

    def fail(self, error: FlowstoneError, waiting: QueuedCheckpoint | None = None) -> None:
        """Record a failure, emit its event, and set the time of the next attempt."""
        if waiting is not None and isinstance(error, StepExistsError):
            self._drop(waiting, str(error.message))
            return
        with self._changed:
            self._failures += 1
            delay = min(TIER_RETRY_S_MAX, TIER_RETRY_S * 2.0 ** min(self._failures - 1, 30))
            self._retry_at = self.worker.now() + delay
            self.is_joined = False  # so the next attempt joins the tier again
        level = log.warning if self._failures == 1 else log.info
        level("tier %s: %s; trying again in %g s", self.store.location, error.message, delay)
        step = None if waiting is None else waiting.step
        self._around.emit(TierFailed(step, self.store.location, str(error), delay, self.waiting))
        with self._changed:  # after the event, which a waiting thread must find emitted
            self._tries += 1
            self._changed.notify_all()

    def _drop(self, waiting: QueuedCheckpoint, reason: str) -> None:
        if self._take_out(waiting):
            self._report_dropped([waiting.step], reason)

    def _take_out(self, waiting: QueuedCheckpoint) -> bool:
        """Remove this checkpoint from the queue. Returns False if it was cancelled, even if another one of its step is
        queued.
        """
        with self._changed:
            current = self._waiting.get(waiting.step)
            is_it = current is not None and current.id == waiting.id
            if is_it:
                del self._waiting[waiting.step]
            self._changed.notify_all()
        return is_it

    def _report_dropped(self, steps: Sequence[int], reason: str) -> None:
        for step in steps:
            log.warning("step %d will not be flushed to %s: %s", step, self.store.location, reason)
            self._around.emit(FlushDropped(step, self.store.location, reason))
            self._around.on_dropped(self.store, step, reason)

    def _flush(self, waiting: QueuedCheckpoint) -> None:
        """Copy a checkpoint from the nearest tier that has it undamaged. Raises only errors of the tier that it is
        copied to.
        """
        began = self.worker.now()
        self.store.check_lock()
        reasons: list[str] = []
        is_lost = True
        for source in self._around.nearer:
            try:
                pace = Pace(cap=self.tier.bytes_per_s)
                flushed = flush(source, self.store, waiting.step, pace, self._on_batch(), waiting.id)
            except SourceFailedError as failure:
                is_lost = is_lost and (is_damage(failure.error) or is_absence(failure.error))
                if not is_absence(failure.error):
                    reasons.append(failure.error.message)
                continue
            break
        else:
            reason = "; ".join(reasons) or "no tier has it"
            if is_lost:
                self._drop(waiting, reason)
                return
            raise NoCheckpointError(f"step {waiting.step} cannot be read now: {reason}")
        self.newest = waiting.step
        left = len(self.waiting) - 1
        seconds = self.worker.now() - began
        location = self.store.location
        log.info("step %d was flushed to %s: %d bytes in %.2f s", waiting.step, location, flushed.bytes, seconds)
        self._around.emit(Flushed(waiting.step, self.store.location, flushed.bytes, seconds, left))
        self._around.on_flushed(self.store, flushed.manifest)
        # a rewind that cancelled the flush sets this step aside next, so earlier steps must stay
        if not self._is_cancelled:
            self._retain(waiting.step)
        self._take_out(waiting)

    def _retain(self, step: int) -> None:
        assert self._retention is not None, "it is joined"
        try:
            self._retention.run(step, awaited=self._around.awaited())
        except FlowstoneError as error:  # retention runs again after the next flush
            log.warning("retention of %s stopped: %s", self.store.location, error)

    def _on_batch(self) -> Callable[[], None]:
        """The function that a flush calls before each batch: it waits for a running save, for a limited time, and
        raises CancelledError to end the flush.
        """
        last = self.worker.now()

        def pause() -> None:
            nonlocal last
            spent = self.worker.now() - last
            waited_since = self.worker.now()
            while self._around.is_saving() and self.worker.now() - waited_since < FLUSH_YIELD * spent:
                self.worker.pause(_PAUSE_S)
                if self._is_cancelled or self._is_ending:
                    break
            if self._is_cancelled or self._is_ending:
                raise CancelledError("the flush was cancelled")
            last = self.worker.now()

        return pause

    def rewind(self, step: int, note: str) -> None:
        """Set aside steps above `step`, and write the rewind's note. After an error, the tier is joined again later."""
        if not self.is_joined:
            return  # the tier gets the note when this job joins it
        try:
            catalog.rewind(self.store, step)
            catalog.write_rewind_note(self.store, note)
        except FlowstoneError as error:
            self.fail(error)
            return
        steps = catalog.steps(self.store)
        self.newest = steps[-1] if steps else None

    def add_note(self, note: str) -> None:
        if self.is_joined:
            try:
                catalog.write_rewind_note(self.store, note)
            except FlowstoneError as error:
                self.fail(error)

    def leave(self) -> None:
        """Close the tier's store. The last call on the tier's thread."""
        self.is_joined = False
        with suppress(FlowstoneError):  # the tier does not answer; its lock ends with the process, or expires
            self.store.close()


def apply_rewinds(store: Store, others: Sequence[lineage.TierContents]) -> lineage.TierContents:
    """Repeat the rewinds that this tier missed while it was down: set aside its steps from before them, then write
    their notes.

    The caller holds the store's lock. Returns the tier's contents afterwards.
    """
    contents = lineage.read_contents(store)
    for step in reversed(lineage.superseded(contents, others)):
        store.check_lock()
        directory = new_superseded_directory(step)
        removal.move_directory(store, step_directory(step), directory)
        log.warning(
            "%s: step %d was saved before a rewind to an earlier step, so it is set aside as %s; no load reads that "
            "directory, and you may delete it", store.location, step, directory,
        )
    sync_names(store)
    for note in lineage.missing_notes(contents, others):
        catalog.write_rewind_note(store, note)
    return lineage.read_contents(store)
