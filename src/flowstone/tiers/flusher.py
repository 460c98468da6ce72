"""One farther tier: what waits for it, and how it gets there, in order, again and again until it succeeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import cast

import msgspec

from flowstone.commit import catalog, publish, removal
from flowstone.commit.durable import sync
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
from flowstone.store.base import Pace, Store
from flowstone.tier_events import FlushDropped, Flushed, TierEvent, TierFailed
from flowstone.tiers import lineage
from flowstone.tiers.copying import SourceFailedError
from flowstone.tiers.flush import flush
from flowstone.tiers.policy import Placed
from flowstone.tiers.restore import check_same_run
from flowstone.tiers.worker import Worker

_PAUSE_S = 0.01  # while a flush gives way to a save


class Waiting(msgspec.Struct, frozen=True):
    """A checkpoint that a tier is to get. `bytes`: of its segments."""

    step: int
    id: str
    bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Waiting:
        return cls(manifest.step, manifest.id, sum(row.bytes for row in manifest.segments))


class Around(msgspec.Struct, frozen=True, eq=False):
    """What a tier knows of the others, and of the Checkpointer. All are called on the tier's thread.

    nearer     the stores that are nearer, nearest first
    joined     what every other tier that takes part holds
    awaited    steps that any tier is still to get
    is_saving  whether a save is under way
    emit       takes events; `on_removed`, `on_left`: what retention and sweeps report
    on_flushed is told of each checkpoint that has come, and on_dropped of each that will not
    """

    nearer: Sequence[Store]
    joined: Callable[[Store], list[lineage.Held]]
    awaited: Callable[[], Collection[int]]
    is_saving: Callable[[], bool]
    emit: Callable[[TierEvent], None]
    on_removed: Callable[[str, str, StorageError | None], None]
    on_left: Callable[[str, str], None]
    on_flushed: Callable[[Store, Manifest], None]
    on_dropped: Callable[[Store, int, str], None]


class Flusher:
    """One farther tier. `act` and `join` run on its worker's thread, the other methods on any.

    identity   of the run's stores; "" before the first save
    is_joined  this job holds its lock, and it has all notes of rewinds
    newest     the newest step that it has, once it was joined; None: none
    is_ending  set to end the flush under way, whose step still waits
    """

    def __init__(self, placed: Placed, around: Around, first: Callable[[], None] = lambda: None) -> None:
        """`first` is called on its thread, before anything else."""
        self.tier, self.store, self.is_volatile = placed.tier, placed.store, placed.is_volatile
        self._around = around
        self._changed = threading.Condition()
        self._waiting: dict[int, Waiting] = {}
        self._under_way: int | None = None
        self._is_cancelled = False
        self.is_ending = False
        self._last: int | None = None  # the newest step that it has, or that is to come
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
        """This job is the run's writer from now on."""
        self.identity, self._holder = identity, holder

    def note(self, one: Waiting) -> bool:
        """A save was committed into the first tier. Whether it is to come here."""
        with self._changed:
            if not self._wants(one.step):
                return False
            self._last = one.step
            self._waiting[one.step] = one
            dropped = self._over()
            self._changed.notify_all()
        self._tell_dropped(dropped, self._why_over())
        self.worker.wake()
        return True

    def _wants(self, step: int) -> bool:
        return self._last is None or step - self._last >= self.tier.every

    def _over(self) -> list[int]:
        """Take out what waits beyond the bounds, oldest first; never the newest. Call with the lock held."""
        dropped = []
        for step in sorted(self._waiting)[:-1]:
            many = len(self._waiting) > self.tier.lag
            limit = self.tier.lag_bytes
            large = limit is not None and sum(one.bytes for one in self._waiting.values()) > limit
            if not many and not large:
                break
            if step != self._under_way:
                del self._waiting[step]
                dropped.append(step)
        return dropped

    def _why_over(self) -> str:
        limit = "" if self.tier.lag_bytes is None else f" or {self.tier.lag_bytes} bytes"
        return f"more than {self.tier.lag} checkpoints{limit} waited"

    @property
    def waiting(self) -> tuple[int, ...]:
        """Steps that wait, oldest first, with the one under way."""
        with self._changed:
            return tuple(sorted(self._waiting))

    def call_off(self, above: int) -> list[int]:
        """Steps above that one are set aside: they are not to come. Returns those that waited."""
        with self._changed:
            called_off = sorted(step for step in self._waiting if step > above)
            for step in called_off:
                del self._waiting[step]
            self._is_cancelled = self._under_way is not None and self._under_way > above
            self._last = None if self._last is None else min(self._last, above)
        return called_off

    def press(self) -> int:
        """Try again now, whatever the last try came to. Returns a number for `has_failed_since`."""
        with self._changed:
            self._retry_at = 0.0
            tries = self._tries
        self.worker.wake()
        return tries

    def await_idle(self, tries: int, timeout_s: float) -> bool:
        """Wait until nothing waits any more, or a try after number `tries` has failed. Whether one of these holds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting or (self._failures > 0 and self._tries > tries), timeout_s
            )

    # On the worker's thread

    def marker(self) -> str | None:
        """The identity of the store that is there; None: there is none. Raises StorageError."""
        return read_marker(self.store).store if self.store.exists(MARKER_NAME) else None

    def join(self) -> None:
        """Take part: lock, sweep, set aside what a rewind has superseded, and plan what is to come.

        raises  NotAStoreError  it is a store of another run
                LockedError     another job writes there
                StorageError
        """
        store = self.store
        self.is_joined = False
        check_no_checkpoint(store)
        if not store.exists(MARKER_NAME):
            store.make_directory()
        with suppress(FlowstoneError):  # a lock that is lost, or whose file is gone
            store.unlock()
        store.lock(self._holder)
        try:
            check_same_run(store, publish.open_store(store, self.identity), self.identity)
            catalog.sweep(store, self._around.on_removed, self._around.on_left)
            others = self._around.joined(store)
            held = align(store, others)
        except BaseException:
            store.unlock()
            raise
        keep = cast("Keep | KeepRule | None", self.tier.keep)  # a number was made a Keep
        self._retention = Retention(store, self.identity, keep, self._around.on_removed, self._around.on_left)
        self._retention.awaited = self._around.awaited
        self.newest = held.steps[-1] if held.steps else None
        self.is_joined = True
        self._catch_up()

    def _catch_up(self) -> None:
        """Plan what nearer tiers have, and this one should."""
        found: dict[int, Waiting] = {}
        for store in self._around.nearer:
            with suppress(FlowstoneError):  # it is down: what only that one has cannot come now
                for step in catalog.steps(store):
                    if (self.newest is None or step > self.newest) and step not in found:
                        with suppress(FormatError, NoCheckpointError):  # there, it is damaged or gone
                            found[step] = Waiting.of(read_manifest(store, step_directory(step)))
        with self._changed:
            kept = self._waiting if self._last is not None else {}
            self._last = self.newest
            self._waiting = {}
            for step in sorted({*found, *kept}):
                if step in kept or self._wants(step):
                    self._waiting[step] = found.get(step) or kept[step]
                    self._last = step
            self._waiting = {s: one for s, one in self._waiting.items() if self.newest is None or s > self.newest}
            dropped = self._over()
            self._changed.notify_all()
        self._tell_dropped(dropped, self._why_over())

    def act(self) -> float | None:
        """Do what is due. Returns in how many seconds the next try is due; None: once there is something new."""
        if not self.identity:
            return None
        while True:
            left = self._retry_at - self.worker.now()
            if left > 0:
                return left
            with self._changed:
                one = self._waiting[min(self._waiting)] if self._waiting else None
                self._under_way, self._is_cancelled = None if one is None else one.step, False
            if one is None and self.is_joined:
                self._failures = 0  # that it could be opened says nothing about a flush
                return None
            try:
                if not self.is_joined:
                    self.join()
                else:
                    assert one is not None, "something waits"
                    self._flush(one)
                    self._failures = 0
            except CancelledError:
                pass  # who has called it off knows; what still waits is looked at again
            except FlowstoneError as error:
                self.fail(error, one)
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()
            if self.worker.is_asked or self._is_cancelled or self.is_ending:
                return 0.0

    def fail(self, error: FlowstoneError, one: Waiting | None = None) -> None:
        """Note a failure, and when to try again."""
        if one is not None and isinstance(error, StepExistsError):
            self._drop(one, str(error.message))
            return
        with self._changed:
            self._failures += 1
            delay = min(TIER_RETRY_S_MAX, TIER_RETRY_S * 2.0 ** min(self._failures - 1, 30))
            self._retry_at = self.worker.now() + delay
            self.is_joined = False  # whatever it was, the next try looks at the tier anew
        level = log.warning if self._failures == 1 else log.info
        level("tier %s: %s; trying again in %g s", self.store.location, error.message, delay)
        step = None if one is None else one.step
        self._around.emit(TierFailed(step, self.store.location, str(error), delay, self.waiting))
        with self._changed:  # last: what waits for this goes on once it is told
            self._tries += 1
            self._changed.notify_all()

    def _drop(self, one: Waiting, reason: str) -> None:
        if self._take_out(one):
            self._tell_dropped([one.step], reason)

    def _take_out(self, one: Waiting) -> bool:
        """Remove it from the queue. False: it was cancelled, and another checkpoint of its step may wait by now."""
        with self._changed:
            waits = self._waiting.get(one.step)
            is_it = waits is not None and waits.id == one.id
            if is_it:
                del self._waiting[one.step]
            self._changed.notify_all()
        return is_it

    def _tell_dropped(self, steps: Sequence[int], reason: str) -> None:
        for step in steps:
            log.warning("step %d will not come to %s: %s", step, self.store.location, reason)
            self._around.emit(FlushDropped(step, self.store.location, reason))
            self._around.on_dropped(self.store, step, reason)

    def _flush(self, one: Waiting) -> None:
        """Copy a checkpoint from the nearest tier that has it whole. Raises what the tier itself refuses."""
        began = self.worker.now()
        self.store.check_lock()
        reasons: list[str] = []
        is_lost = True
        for source in self._around.nearer:
            try:
                made = flush(source, self.store, one.step, Pace(cap=self.tier.bytes_per_s), self._rest(), one.id)
            except SourceFailedError as failure:
                is_lost = is_lost and (is_damage(failure.error) or is_absence(failure.error))
                if not is_absence(failure.error):
                    reasons.append(failure.error.message)
                continue
            break
        else:
            reason = "; ".join(reasons) or "no tier has it any more"
            if is_lost:
                self._drop(one, reason)
                return
            raise NoCheckpointError(f"step {one.step} cannot be read now: {reason}")
        self.newest = one.step
        left = len(self.waiting) - 1
        seconds = self.worker.now() - began
        log.info("step %d has come to %s: %d bytes in %.2f s", one.step, self.store.location, made.bytes, seconds)
        self._around.emit(Flushed(one.step, self.store.location, made.bytes, seconds, left))
        self._around.on_flushed(self.store, made.manifest)
        if not self._is_cancelled:  # else it is set aside next, and what came before it has to stay
            self._retain(one.step)
        self._take_out(one)

    def _retain(self, step: int) -> None:
        assert self._retention is not None, "it is joined"
        try:
            self._retention.run(step)
        except FlowstoneError as error:  # the next one that comes tries again
            log.warning("retention of %s stopped: %s", self.store.location, error)

    def _rest(self) -> Callable[[], None]:
        """What a flush calls before each batch: give way to a save under way, but not for ever; end it if asked to."""
        last = self.worker.now()

        def rest() -> None:
            nonlocal last
            spent = self.worker.now() - last
            waited_since = self.worker.now()
            while self._around.is_saving() and self.worker.now() - waited_since < FLUSH_YIELD * spent:
                self.worker.pause(_PAUSE_S)
                if self._is_cancelled or self.is_ending:
                    break
            if self._is_cancelled or self.is_ending:
                raise CancelledError("the flush was called off")
            last = self.worker.now()

        return rest

    def rewind(self, step: int, note: str) -> None:
        """Set steps above that one aside, and note it. Raises what the tier refuses; it is joined anew then."""
        if not self.is_joined:
            return  # it lacks the note when it joins
        try:
            catalog.rewind(self.store, step)
            catalog.put_note(self.store, note)
        except FlowstoneError as error:
            self.fail(error)
            return
        steps = catalog.steps(self.store)
        self.newest = steps[-1] if steps else None

    def add_note(self, note: str) -> None:
        if self.is_joined:
            try:
                catalog.put_note(self.store, note)
            except FlowstoneError as error:
                self.fail(error)

    def leave(self) -> None:
        """Give the store back."""
        self.is_joined = False
        with suppress(FlowstoneError):  # it is down: its lock ends with the process, or with its time
            self.store.close()


def align(store: Store, others: Sequence[lineage.Held]) -> lineage.Held:
    """Set aside what a rewind has superseded in which this tier took no part, then add the notes that it lacks.

    returns  what it holds then. The caller holds the store's lock
    """
    held = lineage.look(store)
    for step in reversed(lineage.superseded(held, others)):
        store.check_lock()
        directory = new_superseded_directory(step)
        removal.move(store, step_directory(step), directory)
        log.warning(
            "%s: step %d was saved before a rewind to an earlier step, so it is set aside as %s; no load reads that "
            "directory, and you may delete it", store.location, step, directory,
        )
    sync(store)
    for note in lineage.missing_notes(held, others):
        catalog.put_note(store, note)
    return lineage.look(store)
