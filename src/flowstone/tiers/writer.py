"""A job as the one writer of several tiers: saves go into the first one, and from there to the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from time import monotonic
from typing import TypeVar

from flowstone.commit import catalog
from flowstone.commit.entries import new_rewound_note, step_directory
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.writer import StoreWriter
from flowstone.config import LOCK_GRACE_S, STEP_MAX, TIER_ANSWER_S, TIER_DRAIN_S, Keep, KeepRule
from flowstone.errors import FlowstoneError, LockedError, NoCheckpointError, NotAStoreError, StorageError
from flowstone.format.manifest import MARKER_NAME, Manifest
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.tier_events import TierEvent, TiersBehind
from flowstone.tiers import lineage
from flowstone.tiers.flusher import Around, Flusher, Waiting, align
from flowstone.tiers.policy import Placed
from flowstone.tiers.prefetch import Prefetch
from flowstone.tiers.restore import Seen, check_same_run

T = TypeVar("T")
_END_S = 10.0  # for the threads: one that a tier does not answer is left behind


class TieredWriter(StoreWriter):
    """The writer of a run with several tiers. Creates, locks and asks nothing before `begin`.

    is_saving   whether a save is under way: flushes give way to it
    on_flushed  is told of each checkpoint that has come to a farther tier, on_dropped of each that will not come there
    """

    def __init__(
        self, placed: Sequence[Placed], emit: Callable[[TierEvent], None],
        on_removed: Callable[[str, str, StorageError | None], None], on_left: Callable[[str, str], None],
        first: Callable[[], None],
    ) -> None:
        """`first` is called on each thread that this starts."""
        super().__init__(placed[0].store, _keep_of(placed[0]), on_removed, on_left)
        self._emit = emit
        self.is_saving: Callable[[], bool] = bool
        self.on_flushed: Callable[[Flusher, Manifest], None] = _nothing
        self.on_dropped: Callable[[Flusher, int, str], None] = _nothing
        self.flushers = [self._flusher(placed, number, on_removed, on_left, first) for number in range(1, len(placed))]
        self._are_started = False
        self._unanswered: dict[Flusher, Callable[[], bool]] = {}  # whether it has by now answered what it last did not
        self._rewinds: set[str] = set()  # notes that a load has seen
        holder = f"process {os.getpid()} on {socket.gethostname()}, which copies what it has loaded"
        self.prefetch = Prefetch(placed, emit, holder, first)

    def _flusher(
        self, placed: Sequence[Placed], number: int, on_removed: Callable[[str, str, StorageError | None], None],
        on_left: Callable[[str, str], None], first: Callable[[], None],
    ) -> Flusher:
        def told(act: Callable[[Flusher], None]) -> None:
            act(next(one for one in self.flushers if one.store is placed[number].store))

        return Flusher(placed[number], Around(
            nearer=[one.store for one in placed[:number]], joined=self._held_by_others, awaited=self._awaited,
            is_saving=lambda: self.is_saving(), emit=self._emit, on_removed=on_removed, on_left=on_left,
            on_flushed=lambda _, manifest: told(lambda flusher: self.on_flushed(flusher, manifest)),
            on_dropped=lambda _, step, reason: told(lambda flusher: self.on_dropped(flusher, step, reason)),
        ), first)

    def _awaited(self) -> Collection[int]:
        """Steps that some tier is still to get: retention spares them everywhere."""
        return {step for flusher in self.flushers for step in flusher.waiting}

    def _held_by_others(self, store: Store) -> list[lineage.Held]:
        """What the other tiers that take part hold. One that is down says nothing."""
        found = []
        for other in [self._store, *(flusher.store for flusher in self.flushers if flusher.is_joined)]:
            if other is not store:
                try:
                    found.append(lineage.look(other))
                except StorageError as error:
                    log.info("%s says nothing about rewinds: %s", other.location, error.message)
        return found

    # The first save

    def begin(self, holder: str) -> int | None:
        """Become the writer of every tier that answers. Returns the newest step of all of them.

        raises  NotAStoreError  a tier is a store of another run
                LockedError     another job writes into a tier
                StorageError    the first tier refuses. What another one refuses is an event, and is tried again
        """
        self.prefetch.call_off()
        self._start()
        self.identity = self._run_identity() or self.identity
        super().begin(holder)
        try:
            assert self.store_id is not None, "it has begun"
            retention = self._retention
            assert retention is not None, "it has begun"
            retention.awaited = self._awaited
            if self.flushers and not catalog.is_one_of_several(self._store):
                catalog.put_note(self._store, new_rewound_note(STEP_MAX))  # later rewinds are noted, even without tiers
            for flusher in self.flushers:
                flusher.begin(self.store_id, holder)
            # First: what is from before a rewind here is not to come to the others.
            there = [found for _, found in self._ask_all(_look) if isinstance(found, lineage.Held)]
            held = align(self._store, there)
            if not held.steps:  # its steps will all be later than rewinds that it does not know
                for note in sorted(self._rewinds):
                    catalog.put_note(self._store, note)
            self._join_all()
        except BaseException:
            self._store.unlock()
            self.store_id = None
            raise
        steps = [held.steps[-1] if held.steps else None, *(one.newest for one in self.flushers if one.is_joined)]
        newest = max((step for step in steps if step is not None), default=None)
        away = [flusher.store.location for flusher in self.flushers if not flusher.is_joined]
        if away and newest is not None:
            log.warning("%s cannot be asked now; what is newer than step %d there is set aside later", away, newest)
            self._note_everywhere(new_rewound_note(newest))
        for flusher in self.flushers:
            flusher.worker.wake()
        return newest

    def note_seen(self, seen: Seen) -> None:
        """A load has seen the run's stores: a new one is of that run and lineage, even if those do not answer then."""
        self.identity = seen.identity or self.identity
        self._rewinds |= {name for held in seen.held if held is not None for name in held.notes}

    def _start(self) -> None:
        if not self._are_started:
            self._are_started = True
            for flusher in self.flushers:
                flusher.worker.start()

    def _run_identity(self) -> str | None:
        """The identity of this run's stores: of the first tier's, or of the nearest that has one; None: there is none.

        raises  NotAStoreError  tiers are of several runs
        """
        identity = read_marker(self._store).store if self._store.exists(MARKER_NAME) else None
        for flusher, found in self._ask_all(Flusher.marker):
            if isinstance(found, str):
                identity = identity or found
                check_same_run(flusher.store, found, identity)
            if isinstance(found, FlowstoneError):
                log.info("%s cannot be asked which run it is of: %s", flusher.store.location, found.message)
        return identity

    def _join_all(self) -> None:
        """On every farther tier's own thread, at once. Raises what is no failure of the tier."""
        for flusher, found in self._ask_all(_joined, LOCK_GRACE_S):
            if isinstance(found, NotAStoreError | LockedError):
                raise found
            if isinstance(found, FlowstoneError):
                flusher.worker.ask(partial(flusher.fail, found))

    def _ask_all(
        self, act: Callable[[Flusher], T], grace_s: float = 0.0
    ) -> list[tuple[Flusher, T | FlowstoneError | None]]:
        """What each answers within TIER_ANSWER_S and `grace_s`, all asked at once; its failure; None: nothing.

        One that still owes the answer before is asked, and not waited for once more.
        """
        asked: list[tuple[Flusher, Future[T]]] = [(one, one.worker.ask(partial(act, one))) for one in self.flushers]
        limit_s = TIER_ANSWER_S + grace_s
        deadline = monotonic() + limit_s
        found: list[tuple[Flusher, T | FlowstoneError | None]] = []
        for flusher, future in asked:
            before = self._unanswered.pop(flusher, None)
            is_silent = before is not None and not before()
            try:
                found.append((flusher, future.result(0.0 if is_silent else max(0.0, deadline - monotonic()))))
            except FlowstoneError as error:
                found.append((flusher, error))
            except FutureTimeoutError:
                if not is_silent:
                    log.warning("%s has not answered within %g s", flusher.store.location, limit_s)
                self._unanswered[flusher] = future.done
                found.append((flusher, None))
        return found

    # After a commit

    def retain(self, committed: int) -> None:
        """What was committed waits for the tiers that are to get it; then retention runs in the first tier."""
        if self.store_id is None:
            for flusher in self.flushers:
                self.on_dropped(flusher, committed, "rank 0 flushes, and only its own save tells")
            return
        try:
            one = Waiting.of(read_manifest(self._store, step_directory(committed)))
            for flusher in self.flushers:
                if not flusher.note(one):
                    self.on_dropped(flusher, committed, f"it takes one of {flusher.tier.every} steps")
        except FlowstoneError as error:
            log.warning("step %d is not flushed: %s", committed, error)
        super().retain(committed)

    # Going back

    def find(self, step: int) -> None:
        """Raise NoCheckpointError if no tier that answers has `step`."""
        for store in (self._store, *(flusher.store for flusher in self.flushers)):
            try:
                if step in catalog.steps(store):
                    return
            except StorageError as error:
                log.warning("%s cannot be asked for step %d: %s", store.location, step, error.message)
        catalog.find(self._store, step)
        raise NoCheckpointError(f"no tier has step {step}", next="run `flowstone ls` for each of them")

    def rewind(self, step: int, note: str | None = None) -> tuple[int, ...]:
        """Set every step above `step` aside, in every tier that answers. One that does not does it once it is back."""
        for flusher in self.flushers:
            for called_off in flusher.call_off(step):
                self.on_dropped(flusher, called_off, f"it was set aside, back to step {step}")
        self._ask_all(_nothing)  # waits until each has ended its current work
        self.find(step)  # a tier's retention may have expired it meanwhile: no step would be left
        said = note or new_rewound_note(step)
        moved = super().rewind(step, said)  # from here on every tier without the note is behind
        self._ask_all(lambda flusher: flusher.rewind(step, said))
        return moved

    def _note_everywhere(self, note: str) -> None:
        catalog.put_note(self._store, note)
        self._ask_all(lambda flusher: flusher.add_note(note))

    # The end

    def drain(self, timeout_s: float | None = None) -> dict[str, tuple[int, ...]]:
        """Wait until every tier has what it should have, or has failed once more. Returns what still waits, by tier.

        timeout_s  for all; None: the `drain_s` of each
        """
        if not self._are_started or self.store_id is None:
            under_way = self.prefetch.wait(TIER_DRAIN_S if timeout_s is None else timeout_s)
            return {} if under_way is None else {under_way[0]: (under_way[1],)}
        pressed = [(flusher, flusher.press()) for flusher in self.flushers]
        began = monotonic()
        for flusher, tries in pressed:
            limit = flusher.tier.drain_s if timeout_s is None else timeout_s
            while not flusher.await_idle(tries, 0.1):  # in parts, so that Ctrl-C works
                if monotonic() - began >= limit:
                    break
        return {one.store.location: one.waiting for one in self.flushers if one.waiting}

    def finish(self) -> None:
        self.prefetch.call_off()
        for tier, steps in self.drain().items():
            reason = "the tier failed, or its drain_s had passed"
            log.warning("closed while %d checkpoints, up to step %d, still wait for %s", len(steps), steps[-1], tier)
            self._emit(TiersBehind(tier, steps, reason))
        for flusher in self.flushers:
            for step in flusher.waiting:
                self.on_dropped(flusher, step, "the Checkpointer was closed; the next start catches up")

    def end(self) -> None:
        self.prefetch.call_off()
        if self._are_started:
            for flusher in self.flushers:
                flusher.is_ending = True
            for flusher in self.flushers:
                if not flusher.worker.end(_END_S):
                    log.warning("%s does not answer, and is left behind", flusher.store.location)
                    continue
                flusher.leave()
            return
        for flusher in self.flushers:
            flusher.leave()


def _nothing(*_: object) -> None: ...


def _look(flusher: Flusher) -> lineage.Held:
    return lineage.look(flusher.store)


def _joined(flusher: Flusher) -> None:
    flusher.join()


def _keep_of(placed: Placed) -> Keep | KeepRule | None:
    keep = placed.tier.keep
    assert not isinstance(keep, int), "a number was made a Keep"
    return keep

