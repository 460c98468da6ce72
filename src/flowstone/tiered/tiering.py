"""Sets up a Checkpointer with several tiers, and completes the future `durable` of its saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from flowstone.commit.entries import step_directory
from flowstone.config import BUDGET_BYTES_MIN, EngineOptions, Keep, KeepRule
from flowstone.errors import ArgumentError, FlowstoneError, SaveFailedError
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.event_emitter import EventEmitter
from flowstone.runtime.verb_lock import VerbLock
from flowstone.session.futures import ExpeditingFuture, FutureHooks, ReportedFuture, Save
from flowstone.stage.arena import default_budget_bytes
from flowstone.store.base import Store
from flowstone.tiered.copying import flush_bytes
from flowstone.tiered.flusher import Flusher
from flowstone.tiered.policy import to_tiers
from flowstone.tiered.tiered_loads import TieredLoads
from flowstone.tiered.unreachable import unreachable
from flowstone.tiered.writer import TieredWriter, WriterHooks

if TYPE_CHECKING:
    from flowstone.save.in_flight import InFlight
    from flowstone.session.shared import Shared


class TierSetup:
    """The tiers of one Checkpointer, nearest first.

    stores  the stores of all tiers
    """

    def __init__(
        self, given: object, keep: Keep | KeepRule | None, engine: EngineOptions, *, every_step: object
    ) -> None:
        """Check the list of tiers. Opens no store. Raises ArgumentError."""
        self._placed = to_tiers(given, keep, engine)
        if every_step and len(self._placed) > 1:
            raise ArgumentError(
                "every_step needs a single store for its journal", found=f"{len(self._placed)} tiers",
                next="leave out every_step, or give one store instead of a list",
            )
        self._engine = engine
        self.stores = tuple(entry.store for entry in self._placed)
        self._durable = next((entry.store for entry in self._placed if not entry.is_volatile), None)
        self._promises: dict[int, Save] = {}
        self._lock = Lock()
        self._verb_lock: VerbLock | None = None
        self._in_flight: InFlight | None = None
        self._writer: TieredWriter | None = None  # created by `open_writer`

    def budget_of_saves(self, budget_bytes: int | None) -> int | None:
        """The memory budget for saves, in bytes: the Checkpointer's budget without the memory for flushes. Raises
        ArgumentError if nothing is left.
        """
        read = self.stores[0].settings("read").tuning.request_bytes
        flushes = sum(
            flush_bytes(read, store.settings("write").tuning.request_bytes) for store in self.stores[1:]
        )
        if budget_bytes is None:
            return max(BUDGET_BYTES_MIN, default_budget_bytes() - flushes) if flushes else None
        least = 2 * self.stores[0].settings("write").tuning.request_bytes
        if budget_bytes - flushes < least:
            raise ArgumentError(
                f"budget_bytes={budget_bytes} is too small for a save and {len(self.stores) - 1} concurrent flushes",
                expected=f"at least {flushes + least} bytes: {flushes} for flushes, and {least} for a save",
                next="raise budget_bytes, leave it out, or lower request_bytes in EngineOptions",
            )
        return budget_bytes - flushes

    def leave_out(self, lost: Sequence[tuple[Store, FlowstoneError]]) -> Store:
        """Move stores that this Checkpointer cannot use to the end of the list, and treat them as tiers that do not
        answer. Returns the nearest other store, which gets the saves.

        raises  the error of the first lost store, if no durable tier is left
        """
        reasons = {id(store): error for store, error in lost}
        used = [entry for entry in self._placed if id(entry.store) not in reasons]
        if all(entry.is_volatile for entry in used):
            raise lost[0][1]
        for store, error in lost:
            locations = store.location, used[0].store.location
            log.warning("%s cannot be used and is left out; saves go to %s: %s", *locations, error)
            with suppress(FlowstoneError, OSError):
                store.close()
        unreachable_tiers = [
            replace(entry, store=unreachable(entry.store, reasons[id(entry.store)]))
            for entry in self._placed if id(entry.store) in reasons
        ]
        self._placed = (*used, *unreachable_tiers)
        self.stores = tuple(entry.store for entry in self._placed)
        return self.stores[0]

    def open_writer(
        self, emit: EventEmitter, verb_lock: VerbLock, in_flight: InFlight,
        on_empty: Callable[[Sequence[Callable[[], None]]], None], before_journals_removed: Callable[[], None],
    ) -> TieredWriter:
        """Create the writer of all tiers. Its threads must not call the Checkpointer. A flush waits for the saves in
        `in_flight`.
        """
        self._verb_lock, self._in_flight = verb_lock, in_flight
        hooks = WriterHooks(
            emit, emit.removed, emit.left, on_empty, before_journals_removed, self._on_flushed, self._on_dropped,
            self._is_saving, verb_lock.mark_background_thread,
        )
        self._writer = TieredWriter(self._placed, hooks)
        return self._writer

    def _is_saving(self) -> bool:
        # A store with `expedite` sends copies to other nodes, over the time until the next save. A flush cannot wait so
        # long, so it expedites them.
        spreads = hasattr(self.stores[0], "expedite")
        saves = () if self._in_flight is None else tuple(self._in_flight)
        return any(not (save.captured if spreads else save.committed).done() for save in saves)

    def make_loads(self, shared: Shared) -> TieredLoads:
        """Create the object that loads from the tiers. Call this after `open_writer`."""
        writer = self._writer
        assert writer is not None, "it is opened first"

        def loaded(tier: int, step: int) -> None:
            # if this job saves, its writer has the tier's lock, and the next save goes to the nearest tier anyway
            if tier and shared.group.rank == 0 and writer.store_id is None:
                writer.prefetch.begin(tier, step)

        return TieredLoads(shared, self.stores, loaded, writer.note_seen)

    def new_save(
        self, step: int, captured: ExpeditingFuture[None], committed: ReportedFuture[Checkpoint]
    ) -> Save:
        """Create a save. Its future `durable` is completed once the nearest tier that survives the loss of this machine
        has the checkpoint.
        """
        if self._durable is self.stores[0]:
            return Save(step, captured, committed)
        assert self._verb_lock is not None, "the writer is opened before the first save"
        assert self._in_flight is not None, "as above"
        hooks = FutureHooks(partial(self._verb_lock.check_thread, "result"), self._in_flight.expedite)
        save = Save(step, captured, committed, ExpeditingFuture(hooks))
        with self._lock:
            self._promises[step] = save
        # The callback runs on the thread that commits, before a flush of this checkpoint can start.
        save.committed.add_done_callback(lambda _: self._fail_with(save))
        return save

    def _fail_with(self, save: Save) -> None:
        failure = save.committed.failure()
        promise = None if failure is None else self._take(save.step)
        if promise is not None:
            promise.set_exception(failure)

    def _on_flushed(self, flusher: Flusher, manifest: Manifest) -> None:
        checkpoint = Checkpoint(flusher.store, step_directory(manifest.step), self._engine, manifest)
        promise = self._take(manifest.step, manifest.id) if flusher.store is self._durable else None
        if promise is not None:
            promise.set_result(checkpoint)

    def _on_dropped(self, flusher: Flusher, step: int, reason: str) -> None:
        promise = self._take(step) if flusher.store is self._durable else None
        if promise is not None:
            promise.set_exception(_not_durable(step, flusher.store, reason))

    def _take(self, step: int, identity: str | None = None) -> ExpeditingFuture[Checkpoint] | None:
        """Remove and return the `durable` future of a save, which the caller completes now.

        identity  id of the checkpoint, since the step may have been saved again after a rewind; None: any id
        """
        with self._lock:
            save = self._promises.get(step)
            if save is None or (identity is not None and _identity(save) != identity):
                return None
            return self._promises.pop(step).later


def _identity(save: Save) -> str | None:
    """The id of the committed checkpoint; None if it is not committed."""
    if not save.committed.done() or save.committed.failed():
        return None
    return ExpeditingFuture.result(save.committed).manifest.id


def _not_durable(step: int, store: Store, reason: str) -> SaveFailedError:
    return SaveFailedError(
        f"step {step} will not be flushed to {store.location}, the nearest durable tier: {reason}",
        next="wait for the future `durable` of a later save",
    )
