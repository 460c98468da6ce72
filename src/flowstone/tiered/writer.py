"""The writer of several tiers: saves go into the first tier, which is flushed to the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from time import monotonic
from typing import TypeVar

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import new_rewound_note, step_directory
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.writer import StoreWriter
from flowstone.config import LOCK_GRACE_S, STEP_MAX, TIER_ANSWER_S, TIER_DRAIN_S, Keep, KeepRule
from flowstone.errors import FlowstoneError, LockedError, NoCheckpointError, NotAStoreError, StorageError
from flowstone.format.manifest import MARKER_NAME, Manifest
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.tiered import lineage
from flowstone.tiered.flusher import Flusher, QueuedCheckpoint, TierContext, apply_rewinds
from flowstone.tiered.policy import PlacedTier
from flowstone.tiered.prefetch import TierPrefetcher
from flowstone.tiered.restore import TierSurvey, check_same_run
from flowstone.tiered.tier_events import TierEvent, TiersBehind

T = TypeVar("T")
_END_S = 10.0  # seconds that a thread may take to end; a thread whose tier does not answer is abandoned


class WriterHooks(msgspec.Struct, frozen=True, eq=False):
    """The callbacks of the writer of several tiers.

    on_removed, on_left, on_empty, before_journals_removed  as in StoreWriter
    on_flushed  called for each checkpoint that was flushed to a farther tier
    on_dropped  called for each checkpoint that will not be flushed to a tier, with the reason
    is_saving   whether a save is running: flushes pause meanwhile
    on_thread   called once on each tier's thread, before anything else
    """

    emit: Callable[[TierEvent], None]
    on_removed: Callable[[str, str, StorageError | None], None]
    on_left: Callable[[str, str], None]
    on_empty: Callable[[Sequence[Callable[[], None]]], None]
    before_journals_removed: Callable[[], None]
    on_flushed: Callable[[Flusher, Manifest], None]
    on_dropped: Callable[[Flusher, int, str], None]
    is_saving: Callable[[], bool]
    on_thread: Callable[[], None]


class TieredWriter(StoreWriter):
    """The writer of a run with several tiers. Creates, locks and reads nothing before `begin`.

    hooks  the callbacks of this writer
    """

    def __init__(self, placed: Sequence[PlacedTier], hooks: WriterHooks) -> None:
        super().__init__(
            placed[0].store, _keep_of(placed[0]), hooks.on_removed, hooks.on_left, hooks.on_empty,
            hooks.before_journals_removed,
        )
        self._emit, self.hooks = hooks.emit, hooks
        self.flushers = [self._flusher(placed, number) for number in range(1, len(placed))]
        self._are_started = False
        # flushers that did not answer in time; the value tells whether the answer has arrived by now
        self._unanswered: dict[Flusher, Callable[[], bool]] = {}
        self._rewinds: set[str] = set()  # names of the rewinds' notes that a load has seen
        holder = f"process {os.getpid()} on {socket.gethostname()}, which copies the loaded checkpoint"
        self.prefetch = TierPrefetcher(placed, hooks.emit, holder, hooks.on_thread)

    def _flusher(self, placed: Sequence[PlacedTier], number: int) -> Flusher:
        hooks = self.hooks

        def call(act: Callable[[Flusher], None]) -> None:
            act(next(entry for entry in self.flushers if entry.store is placed[number].store))

        return Flusher(placed[number], TierContext(
            nearer=[entry.store for entry in placed[:number]], contents_of_others=self._held_by_others,
            awaited=self._awaited,
            is_saving=hooks.is_saving, emit=self._emit, on_removed=hooks.on_removed, on_left=hooks.on_left,
            on_flushed=lambda _, manifest: call(lambda flusher: hooks.on_flushed(flusher, manifest)),
            on_dropped=lambda _, step, reason: call(lambda flusher: hooks.on_dropped(flusher, step, reason)),
        ), hooks.on_thread)

    def _awaited(self) -> Collection[int]:
        """The steps that wait for a flush. Retention keeps them in all tiers."""
        return {step for flusher in self.flushers for step in flusher.waiting}

    def _held_by_others(self, store: Store) -> list[lineage.TierContents]:
        """The contents of the other tiers that this job has joined, except tiers that do not answer."""
        contents = []
        for other in [self._store, *(flusher.store for flusher in self.flushers if flusher.is_joined)]:
            if other is not store:
                try:
                    contents.append(lineage.read_contents(other))
                except StorageError as error:
                    log.info("cannot read the rewinds of %s: %s", other.location, error.message)
        return contents

    # The first save

    def begin(self, holder: str) -> int | None:
        """Become the writer of every tier that answers. Returns the newest step in any of them; None if they have none.

        raises  NotAStoreError  a tier is a store of another run
                LockedError     another job writes into a tier
                StorageError    the first tier fails. A failure of another tier emits an event, and is retried
        """
        self.prefetch.cancel()
        self._start()
        self.identity = self._run_identity() or self.identity
        super().begin(holder)
        try:
            assert self.store_id is not None, "the writer has begun"
            if self.flushers and not catalog.has_rewind_notes(self._store):
                catalog.write_rewind_note(self._store, new_rewound_note(STEP_MAX))  # so that later rewinds leave notes
            for flusher in self.flushers:
                flusher.begin(self.store_id, holder)
            # The first tier first, so that its steps from before a rewind are not flushed to other tiers.
            others = [answer for _, answer in self._ask_all(_read_contents) if isinstance(answer, lineage.TierContents)]
            contents = apply_rewinds(self._store, others)
            if not contents.steps:  # its later steps will be newer than all rewinds whose notes it lacks
                for note in sorted(self._rewinds):
                    catalog.write_rewind_note(self._store, note)
            self._join_all()
        except BaseException:
            self._store.unlock()
            self.store_id = None
            raise
        joined = [flusher.newest for flusher in self.flushers if flusher.is_joined]
        steps = [contents.steps[-1] if contents.steps else None, *joined]
        newest = max((step for step in steps if step is not None), default=None)
        away = [flusher.store.location for flusher in self.flushers if not flusher.is_joined]
        if away and newest is not None:
            log.warning("%s cannot be read now; the steps above %d in it will be set aside later", away, newest)
            self._note_everywhere(new_rewound_note(newest))
        for flusher in self.flushers:
            flusher.worker.wake()
        return newest

    def note_seen(self, seen: TierSurvey) -> None:
        """Remember the identity of the stores and the notes of rewinds that a load has seen. They are needed for stores
        that are created later, when other tiers may not answer.
        """
        self.identity = seen.identity or self.identity
        self._rewinds |= {name for contents in seen.contents if contents is not None for name in contents.notes}

    def _start(self) -> None:
        if not self._are_started:
            self._are_started = True
            for flusher in self.flushers:
                flusher.worker.start()

    def _run_identity(self) -> str | None:
        """The identity of this run's stores, read from the nearest tier that has one; None if no tier has one.

        raises  NotAStoreError  tiers belong to several runs
        """
        identity = read_marker(self._store).store if self._store.exists(MARKER_NAME) else None
        for flusher, answer in self._ask_all(Flusher.marker):
            if isinstance(answer, str):
                identity = identity or answer
                check_same_run(flusher.store, answer, identity)
            if isinstance(answer, FlowstoneError):
                log.info("cannot read which run %s belongs to: %s", flusher.store.location, answer.message)
        return identity

    def _join_all(self) -> None:
        """Join all farther tiers concurrently, on their threads. Raises NotAStoreError, LockedError."""
        for flusher, answer in self._ask_all(_join, LOCK_GRACE_S):
            if isinstance(answer, NotAStoreError | LockedError):
                raise answer
            if isinstance(answer, FlowstoneError):
                flusher.worker.submit(partial(flusher.fail, answer))

    def _ask_all(
        self, act: Callable[[Flusher], T], grace_s: float = 0.0
    ) -> list[tuple[Flusher, T | FlowstoneError | None]]:
        """Run `act` for all farther tiers concurrently, each on its own thread. Returns each tier's result or error;
        None if a tier did not answer within TIER_ANSWER_S plus `grace_s` seconds. If a tier has not answered an earlier
        call yet, it is not waited for.
        """
        requests: list[tuple[Flusher, Future[T]]] = [
            (flusher, flusher.worker.submit(partial(act, flusher))) for flusher in self.flushers
        ]
        limit_s = TIER_ANSWER_S + grace_s
        deadline = monotonic() + limit_s
        answers: list[tuple[Flusher, T | FlowstoneError | None]] = []
        for flusher, future in requests:
            before = self._unanswered.pop(flusher, None)
            is_silent = before is not None and not before()
            try:
                answers.append((flusher, future.result(0.0 if is_silent else max(0.0, deadline - monotonic()))))
            except FlowstoneError as error:
                answers.append((flusher, error))
            except FutureTimeoutError:
                if not is_silent:
                    log.warning("%s has not answered within %g s", flusher.store.location, limit_s)
                self._unanswered[flusher] = future.done
                answers.append((flusher, None))
        return answers

    # After a commit

    def run_retention(self, committed: int) -> None:
        """Queue the committed step for the tiers that should get it; then run retention in the first tier.
        """
        if self.store_id is None:
            for flusher in self.flushers:
                self.hooks.on_dropped(flusher, committed, "only rank 0 flushes; see `durable` of its save")
            return
        try:
            waiting = QueuedCheckpoint.of(read_manifest(self._store, step_directory(committed)))
            for flusher in self.flushers:
                if not flusher.enqueue(waiting):
                    self.hooks.on_dropped(flusher, committed, f"this tier gets only one of {flusher.tier.every} steps")
        except FlowstoneError as error:
            log.warning("step %d is not flushed: %s", committed, error)
        super().run_retention(committed)

    # Rewinds

    def check_step_exists(self, step: int) -> None:
        """Raise NoCheckpointError if no tier that answers has `step`."""
        for store in (self._store, *(flusher.store for flusher in self.flushers)):
            try:
                if step in catalog.steps(store):
                    return
            except StorageError as error:
                log.warning("cannot search %s for step %d: %s", store.location, step, error.message)
        catalog.find_committed_step(self._store, step)
        raise NoCheckpointError(f"no tier has step {step}", next="run `flowstone ls` for each tier to see its steps")

    def rewind(self, step: int, note: str | None = None) -> tuple[int, ...]:
        """Set aside every step above `step`, in every tier that answers now; in other tiers when they answer again."""
        for flusher in self.flushers:
            for cancelled in flusher.cancel_above(step):
                self.hooks.on_dropped(flusher, cancelled, f"a rewind to step {step} has set this step aside")
        self._ask_all(_do_nothing)  # waits until each tier has ended its current work
        self.check_step_exists(step)  # retention may have removed the step meanwhile; then no step would be left
        rewind_note = note or new_rewound_note(step)
        # from now on, steps above `step` in tiers without the note are ignored
        moved = super().rewind(step, rewind_note)
        self._ask_all(lambda flusher: flusher.rewind(step, rewind_note))
        return moved

    def _note_everywhere(self, note: str) -> None:
        catalog.write_rewind_note(self._store, note)
        self._ask_all(lambda flusher: flusher.add_note(note))

    # The end

    def drain(self, timeout_s: float | None = None) -> dict[str, tuple[int, ...]]:
        """Wait until the queue of each tier is empty, or a flush to it has failed once more. Returns the steps that
        still wait: location of the tier -> steps.

        timeout_s  limit for all tiers together; None: the option `drain_s` of each tier
        """
        if not self._are_started or self.store_id is None:
            under_way = self.prefetch.wait(TIER_DRAIN_S if timeout_s is None else timeout_s)
            return {} if under_way is None else {under_way[0]: (under_way[1],)}
        pressed = [(flusher, flusher.retry_now()) for flusher in self.flushers]
        began = monotonic()
        for flusher, tries in pressed:
            limit = flusher.tier.drain_s if timeout_s is None else timeout_s
            while not flusher.await_idle(tries, 0.1):  # waits in short intervals, so that Ctrl-C works
                if monotonic() - began >= limit:
                    break
        return {flusher.store.location: flusher.waiting for flusher in self.flushers if flusher.waiting}

    def finish(self) -> None:
        self.prefetch.cancel()
        for tier, steps in self.drain().items():
            reason = "the tier failed, or its drain_s has passed"
            log.warning("closed while %d checkpoints, up to step %d, still wait for %s", len(steps), steps[-1], tier)
            self._emit(TiersBehind(tier, steps, reason))
        for flusher in self.flushers:
            for step in flusher.waiting:
                self.hooks.on_dropped(
                    flusher, step, "the Checkpointer was closed; the next Checkpointer flushes the step"
                )

    def release(self) -> None:
        self.prefetch.cancel()
        if self._are_started:
            for flusher in self.flushers:
                flusher.end()
            for flusher in self.flushers:
                if not flusher.worker.end(_END_S):
                    log.warning(
                        "%s does not answer; the thread that flushes to it is abandoned", flusher.store.location
                    )
                    continue
                flusher.leave()
            return
        for flusher in self.flushers:
            flusher.leave()


def _do_nothing(*_: object) -> None: ...


def _read_contents(flusher: Flusher) -> lineage.TierContents:
    return lineage.read_contents(flusher.store)


def _join(flusher: Flusher) -> None:
    flusher.join()


def _keep_of(placed: PlacedTier) -> Keep | KeepRule | None:
    keep = placed.tier.keep
    assert not isinstance(keep, int), "Tier turns a number into a Keep"
    return keep

