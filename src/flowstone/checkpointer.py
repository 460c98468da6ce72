"""The Checkpointer: lifecycle and public verbs. Their order is in pipeline/save.py and pipeline/load.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from flowstone import arguments as calls
from flowstone.checkpoint import Checkpoint
from flowstone.commit.writer import StoreWriter
from flowstone.config import DEADLINE_S, LAG_STEPS, RECOVERY_S, EngineOptions, Keep, KeepRule
from flowstone.errors import FlowstoneError
from flowstone.events import OnEvent
from flowstone.log import log
from flowstone.pipeline.futures import Save
from flowstone.pipeline.load import Loads
from flowstone.pipeline.load_outcome import LoadOutcome, LoadReport
from flowstone.pipeline.replica_samples import first_samples
from flowstone.pipeline.save import Saves
from flowstone.pipeline.shared import SaveOptions, Shared, address_exchange
from flowstone.ranks import RankGroup
from flowstone.runtime.ending import Ending
from flowstone.runtime.telling import Teller
from flowstone.runtime.turns import Turn, one_at_a_time
from flowstone.runtime.writer_lock import caller, register
from flowstone.state import Frozen
from flowstone.state_dict_verbs import TierVerbs, after_saves_of_others
from flowstone.store.base import Store
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.layout_rules import LoadRule
    from flowstone.quantize import Quantize
    from flowstone.state_replica import Replica
    from flowstone.tiers.policy import Tier


class Checkpointer(TierVerbs):
    """Saves a training state into the store at `path` while training goes on, and loads it back.

    path               a directory, whose other files stay; a URL; "memory://run" (NodeMemory); a Store, which this
                       closes; or a list of tiers (Tier), nearest first: saves go into it, and are flushed to the others
    keep               which checkpoints retention spares: the newest so many; None: all; a function: see KeepRule
    budget_bytes       limit of staging memory on this rank; None: a node's ranks share a quarter of available memory
    on_error           "raise": a failed save raises at the next call; "continue": it only emits an event,
                       until `max_unsaved_steps` steps have passed since the last committed one
    engine             how bytes move; options not given are as tuned for the mount, else a measured default
    saves_in_flight    how many saves may be under way at once; `save` waits when there are more
    deadline_s         in a job of several ranks, how long they wait for the slowest of them
    every_step         each save is durable before the next returns, by a journal; a Replica: a process follows it, too
    recovery_s         with every_step: a checkpoint is saved once a load would take longer than that
    lag_steps          with every_step: steps that may not be durable yet when `save` returns, this one among them
    rules              which tensors are saved with less precision than they have (Quantize); without a rule none is
    alone              this process saves and loads by itself, as in `if rank == 0: ckpt.save(...)`: whole tensors only
    on_event           is called with every event (see events.py), on the thread where it happens

    Calls from several threads wait for each other, except `fence`. What another thread changes before `save` has
    returned is not protected. Calling it, or waiting for a save, inside of a call, in `on_event` or in a Future's
    callback raises BusyError. Leaving it as a context manager, or the end of the process, waits for saves in flight; a
    failure that was never raised ends the process with status 1. Without references it gives store and memory back.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        path: str | os.PathLike[str] | Store | Sequence[str | os.PathLike[str] | Store | Tier],
        *,
        keep: Keep | KeepRule | int | None = None,
        budget_bytes: int | None = None,
        on_error: Literal["raise", "continue"] = "raise",
        max_unsaved_steps: int | None = None,
        engine: EngineOptions | None = None, saves_in_flight: int = 2, deadline_s: float = DEADLINE_S,
        every_step: bool | Replica = False, recovery_s: float = RECOVERY_S, lag_steps: int = LAG_STEPS,
        rules: Quantize | Sequence[Quantize] = (),
        alone: bool = False, on_event: OnEvent | None = None,
    ) -> None:
        keep, budget_bytes, max_unsaved_steps, saves_in_flight, deadline_s = calls.to_options({
            "keep": keep, "budget_bytes": budget_bytes, "on_error": on_error, "max_unsaved_steps": max_unsaved_steps,
            "engine": engine, "saves_in_flight": saves_in_flight, "deadline_s": deadline_s, "alone": alone,
            "on_event": on_event, "every_step": every_step, "recovery_s": recovery_s,
        })
        lossy, lag_steps = calls.to_quantize(rules, every_step), calls.to_lag_steps(lag_steps, every_step)
        engine, tiers = engine or EngineOptions(), None
        if calls.is_list(path):
            from flowstone.pipeline.tiering import Tiering  # imported here: others do not need it
            tiers = Tiering(path, keep, engine, every_step=every_step)
            budget_bytes = tiers.budget_of_saves(budget_bytes)
        stores = tiers.stores if tiers else (calls.store_at(calls.to_store(path), engine),)
        self.made_at, self._pid, self._turn = caller(), os.getpid(), Turn()
        exchange_addresses = address_exchange(stores, tiers.leave_out if tiers else None)
        # After all checks that may fail: this makes the Checkpointer known to the other ranks.
        self._group = RankGroup(deadline_s, stores[0].location, self._turn, alone=alone)
        self._turn.on_interrupt = self._group.agreement.leave_call
        self._store: Store = exchange_addresses(self._group)
        saves_in_flight = min(saves_in_flight, self._store.capabilities.drafts_max or saves_in_flight)
        options = SaveOptions(budget_bytes, saves_in_flight, on_error, max_unsaved_steps, lossy, lag_steps)
        emit = Teller(on_event, self._store.location)
        self._store_writer = tiers.open_writer(emit, self._turn) if tiers else StoreWriter(
            self._store, keep, emit.removed, emit.left)
        emit.quiet, self._end = self._group.rank > 0, Ending(self.close)
        shared = Shared(self._store, engine, self._group, self._turn, emit, Frozen(first_samples), LoadOutcome())
        self._saves = Saves(shared, options, self._store_writer, self, self._end)
        self._loads = tiers.attach(shared, self._saves) if tiers else Loads(shared)
        if every_step:
            from flowstone.pipeline.every_step import EveryStep  # imported here: others do not need it
            self._saves = EveryStep(shared, self._saves, options, recovery_s, every_step)
        self._locations, self._closed = register(self, (self._store, *stores)), False

    @after_saves_of_others
    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None where there is none yet. Raises DamagedError if it is damaged.

        Waits for this process's saves in flight into this store, as `load` does: the answer does not depend on timing.
        """
        self._check_open()
        self._saves.await_all()
        return self._loads.newest()

    @after_saves_of_others
    def load(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        rules: LoadRule | Sequence[LoadRule] = (),
        verify_first: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Bring `state` back to the newest step, or to `step`, in place, by a journal if one leads there. Strict.

        rules         differences to accept (Rename, Skip, Init, Cast), and other layouts (Split, Fuse, Transpose, Pad,
                      Unpad, Stack, Unstack, RuleSet): each tensor that they change is listed in the report
        verify_first  read and check every byte before any memory of the state changes, where memory allows
        fallback      on damage try the next older step; the damaged ones are set aside at the next save.
                      What the system refuses (descriptors, memory, a permission) is not damage, and raises

        raises    NoCheckpointError  nothing to load
                  MismatchError      state and checkpoint differ: all differences, nothing changed; or a tensor is not
                                     as a rule says
                  NoTensorError, CollisionError  a rule about layouts names nothing; two tensors get one name
                  DamagedError       stored bytes are not what was written; `written` names what
                                     changed, and saving is refused until a load succeeds
        """
        self._check_open()
        state, step, rules = calls.to_load(state, step, rules, {"verify_first": verify_first, "fallback": fallback})
        self._saves.await_all()
        load = partial(self._loads.load_newest, step, state, rules, verify_first=verify_first, fallback=fallback)
        return self._saves.around_load(state, load)

    @one_at_a_time
    def save(self, step: int, state: Mapping[str, object], *, fence: Literal["auto", "manual"] = "auto") -> Save:
        """Save `state` as `step`. Returns at once; what the next step will change is captured in the background.

        Captured lazily, while forward and backward run (DataStates-LLM, arXiv 2406.10707): parameters of
        modules and states of optimizers. Captured before this returns: buffers, tensors below 64 KiB,
        those of unknown objects, Python values; and everything, if no optimizer step would wait for the rest.
        If a lazily captured tensor changes before its capture, this save fails and names the tensor;
        docs/SAVING.md says which changes are detected, and how reliably.

        fence   "auto": the next step of any optimizer in `state` waits until everything is captured.
                "manual": the caller promises to call `fence()` before anything of `state` changes;
                then every tensor from 64 KiB on is captured lazily

        raises  StepExistsError        `step` is not above the newest one; see `rewind`
                UnsupportedStateError  an object that cannot be saved; names its path
                CollisionError         two paths of the state make the same name
                LockedError            another job saves into this store
                StorageError           the operating system refused; FullError when no space is left
                SaveFailedError        an earlier save failed, and its failure was not raised yet
                DamagedError           the last load left the state partly changed
        """
        spans = Spans("save", step, self._group.rank)
        self._check_open()
        spans.step, state, fence = calls.to_save(step, state, fence)
        return self._saves.save(spans.step, state, fence, spans)

    def fence(self) -> None:
        """Wait until the state may change: every save so far is captured. Emits the event Fenced."""
        self._check_open()
        self._saves.pass_fence()

    @one_at_a_time
    def wait(self) -> None:
        """Wait until every save so far is committed. Raises SaveFailedError for a failure that was not raised yet."""
        self._check_open()
        self._saves.settle()

    @one_at_a_time
    def rewind(self, step: int) -> None:
        """Set every step above `step` aside, so that training can save them anew. `step` itself must exist."""
        self._check_open()
        self._saves.rewind(calls.step_number(step, verb="rewind"))

    @one_at_a_time
    def close(self) -> None:
        """Wait for saves in flight, give the store and the memory back. Raises what `wait` raises."""
        if self._closed or os.getpid() != self._pid:
            return
        failure: Exception | None = None
        try:
            self._saves.settle()
        except Exception as error:
            failure = error
        self._saves.await_ends()  # an interrupt ends this wait and changes nothing
        self._saves.sole_writer.drain_at_end()
        self._turn.uninterrupted(self._let_go)
        if failure is not None:
            raise failure

    def _let_go(self) -> None:
        self._closed = True
        self._turn.end_acts()
        self._saves.end()
        self._group.leave()
        self._give_back()

    def _give_back(self) -> None:
        self._end.call_off()
        self._saves.captures.close()
        self._store.close()

    def __del__(self) -> None:
        """No reference is left, so no save is in flight: each save holds one. Runs on any thread, at any point."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        # This may be one of its own threads. Optimizers' hooks, which may be running, notice by themselves.
        self._saves.end(wait=False)
        try:
            self._saves.settle()
            self._give_back()
        except FlowstoneError as failure:
            self._give_back()
            self._end.fail(failure)
        self._group.abandon()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except FlowstoneError as failure:
            if error is None:
                raise
            log.error("closing failed too, after another error: %s", failure)  # do not mask the first error
