"""A Checkpointer with several tiers: what is put together, and what its saves promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from flowstone.checkpoint import Checkpoint
from flowstone.commit.entries import step_directory
from flowstone.config import BUDGET_BYTES_MIN, EngineOptions, Keep, KeepRule
from flowstone.errors import ArgumentError, FlowstoneError, SaveFailedError
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.pipeline.futures import ExpeditingFuture, Save
from flowstone.pipeline.tiered_loads import TieredLoads
from flowstone.runtime.telling import Teller
from flowstone.runtime.turns import Turn
from flowstone.stage.arena import default_budget_bytes
from flowstone.store.base import Store
from flowstone.store.unreachable import unreachable
from flowstone.tiers.copying import flush_bytes
from flowstone.tiers.flusher import Flusher
from flowstone.tiers.policy import to_tiers
from flowstone.tiers.writer import TieredWriter

if TYPE_CHECKING:
    from flowstone.pipeline.save import Saves
    from flowstone.pipeline.shared import Shared


class Tiering:
    """The tiers of one Checkpointer, nearest first.

    stores  of all tiers
    writer  flushes what is committed into the first one
    """

    def __init__(
        self, given: object, keep: Keep | KeepRule | None, engine: EngineOptions, *, every_step: object
    ) -> None:
        """Raises ArgumentError for a list that cannot be. Opens nothing."""
        self._placed = to_tiers(given, keep, engine)
        if every_step and len(self._placed) > 1:
            raise ArgumentError(
                "every_step with several tiers: a journal is in one store alone",
                found=f"{len(self._placed)} tiers", next="leave one of them out",
            )
        self._engine = engine
        self.stores = tuple(one.store for one in self._placed)
        self._durable = next((one.store for one in self._placed if not one.is_volatile), None)
        self._promises: dict[int, Save] = {}
        self._lock = Lock()
        self._turn: Turn | None = None
        self._expedite: Callable[[], None] = lambda: None  # set by `attach`
        self.writer: TieredWriter | None = None

    def budget_of_saves(self, budget_bytes: int | None) -> int | None:
        """What flushes leave of the budget. Raises ArgumentError if that is too little."""
        read = self.stores[0].settings("read").tuning.request_bytes
        flushes = sum(
            flush_bytes(read, store.settings("write").tuning.request_bytes) for store in self.stores[1:]
        )
        if budget_bytes is None:
            return max(BUDGET_BYTES_MIN, default_budget_bytes() - flushes) if flushes else None
        least = 2 * self.stores[0].settings("write").tuning.request_bytes
        if budget_bytes - flushes < least:
            raise ArgumentError(
                f"budget_bytes={budget_bytes} does not hold a save and {len(self.stores) - 1} flushes at once",
                expected=f"at least {flushes + least} bytes: {flushes} for flushes, and {least} for a save",
                next="raise budget_bytes, leave it out, or lower request_bytes in EngineOptions",
            )
        return budget_bytes - flushes

    def leave_out(self, lost: Sequence[tuple[Store, FlowstoneError]]) -> Store:
        """Leave out stores that this Checkpointer cannot use: they count as tiers that do not answer, and come last.
        Returns the nearest of the others, which takes the saves.

        raises  the error of the first, if no durable tier is left
        """
        reasons = {id(store): error for store, error in lost}
        used = [one for one in self._placed if id(one.store) not in reasons]
        if all(one.is_volatile for one in used):
            raise lost[0][1]
        for store, error in lost:
            where = store.location, used[0].store.location
            log.warning("%s cannot be used and is left out; saves go to %s: %s", *where, error)
            with suppress(FlowstoneError, OSError):
                store.close()
        away = [
            replace(one, store=unreachable(one.store, reasons[id(one.store)]))
            for one in self._placed if id(one.store) in reasons
        ]
        self._placed = (*used, *away)
        self.stores = tuple(one.store for one in self._placed)
        return self.stores[0]

    def open_writer(self, emit: Teller, turn: Turn) -> TieredWriter:
        """The writer, and its threads, on which no verb can be called."""
        self._turn = turn
        self.writer = TieredWriter(self._placed, emit, emit.removed, emit.left, turn.leave_out_this_thread)
        self.writer.on_flushed, self.writer.on_dropped = self._came, self._will_not_come
        return self.writer

    def attach(self, shared: Shared, saves: Saves) -> TieredLoads:
        """Flushes give way to these saves, which promise what the tiers do. Returns the loads."""
        assert self.writer is not None, "it is opened first"
        in_flight = saves.in_flight
        # Copies for other nodes are spread over the time until the next save: no flush gives way to them for so long.
        spreads = hasattr(self.stores[0], "expedite")
        self.writer.is_saving = lambda: any(
            not (save.captured if spreads else save.committed).done() for save in tuple(in_flight)
        )
        self._expedite = in_flight.expedite
        saves.new_save = self.new_save
        writer = self.writer

        def loaded(tier: int, step: int) -> None:
            if tier and shared.group.rank == 0 and writer.store_id is None:  # a writer's next save comes there anyway
                writer.prefetch.begin(tier, step)

        return TieredLoads(shared, self.stores, loaded, writer.note_seen)

    def new_save(self, step: int) -> Save:
        """A save whose `durable` is that of the nearest tier that outlives this machine."""
        if self._durable is self.stores[0]:
            return Save(step)
        promise: ExpeditingFuture[Checkpoint] = ExpeditingFuture()
        assert self._turn is not None, "the writer is opened before the first save"
        promise.check = partial(self._turn.check_thread, "result")
        promise.expedite = self._expedite
        save = Save(step, later=promise)
        with self._lock:
            self._promises[step] = save
        # On the thread of commits, before anything waits for a tier.
        save.committed.add_done_callback(lambda _: self._fail_with(save))
        return save

    def _fail_with(self, save: Save) -> None:
        failure = save.committed.failure()
        promise = None if failure is None else self._take(save.step)
        if promise is not None:
            promise.set_exception(failure)

    def _came(self, flusher: Flusher, manifest: Manifest) -> None:
        came = Checkpoint(flusher.store, step_directory(manifest.step), self._engine, manifest)
        promise = self._take(manifest.step, manifest.id) if flusher.store is self._durable else None
        if promise is not None:
            promise.set_result(came)

    def _will_not_come(self, flusher: Flusher, step: int, reason: str) -> None:
        promise = self._take(step) if flusher.store is self._durable else None
        if promise is not None:
            promise.set_exception(_not_durable(step, flusher.store, reason))

    def _take(self, step: int, identity: str | None = None) -> ExpeditingFuture[Checkpoint] | None:
        """Remove and return the `durable` future of a save, to be completed now.

        identity  of the checkpoint, as the step may have been saved again after a rewind; None: any
        """
        with self._lock:
            save = self._promises.get(step)
            if save is None or (identity is not None and _identity(save) != identity):
                return None
            return self._promises.pop(step).later


def _identity(save: Save) -> str | None:
    """Of what it has committed; None: nothing yet."""
    if not save.committed.done() or save.committed.failed():
        return None
    return ExpeditingFuture.result(save.committed).manifest.id


def _not_durable(step: int, store: Store, reason: str) -> SaveFailedError:
    return SaveFailedError(
        f"step {step} does not come to {store.location}, the nearest durable tier: {reason}",
        next="a step that comes there says so in its own `durable`",
    )
