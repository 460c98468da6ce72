"""The Checkpointer: lifecycle and public verbs. The order of their steps is in save/conductor.py, load/conductor.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from flowstone.config import DEADLINE_S, LAG_STEPS, RECOVERY_S, EngineOptions, Keep, KeepRule
from flowstone.errors import FlowstoneError
from flowstone.events.phases import OnEvent
from flowstone.extensions import extension
from flowstone.log import log
from flowstone.ranks import RankGroup
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.event_emitter import EventEmitter
from flowstone.runtime.exit_hook import ExitHook
from flowstone.runtime.verb_lock import VerbCounter, VerbLock, exclusive_verb
from flowstone.runtime.writer_lock import caller_location, register_owner, release_of_owner
from flowstone.save.replica_samples import first_samples
from flowstone.session.futures import Save
from flowstone.session.load_outcome import LoadOutcome, LoadReport
from flowstone.session.shared import SaveOptions, Shared, address_exchange
from flowstone.state import FrozenParameters
from flowstone.state_dict_verbs import WaitingVerbs, after_saves_of_others
from flowstone.store.base import Store
from flowstone.stores import arguments as calls
from flowstone.strategies import make_strategy
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.codecs.quantize import Quantize
    from flowstone.layouts.layout_rules import LoadRule
    from flowstone.replica.replica_events import Replica
    from flowstone.tiered.policy import Tier


class Checkpointer(WaitingVerbs):
    """Saves a training state into the store at `path` while training continues, and loads it.

    path               a directory (other files in it stay); a URL; "memory://run" (NodeMemory); a Store, which `close`
                       closes; or a list of tiers (Tier), nearest first: a save goes into the first tier, and is flushed
                       to the others
    keep               which checkpoints retention keeps. An int: that many of the newest. None: all. Or a KeepRule
    budget_bytes       limit of staging memory on this rank; None: a node's ranks share a quarter of its free memory
    on_error           "raise": a failed save raises at the next call; "continue": it only emits an event,
                       until `max_unsaved_steps` steps have passed since the last committed one
    engine             I/O options; options not given come from the file system's tuning file, or are defaults
    saves_in_flight    how many saves may be unfinished at a time; a further call of `save` waits
    deadline_s         in a job of several ranks: how long ranks wait for the slowest one
    every_step         True: a journal of gradients makes each step durable before the next `save` returns; a Replica:
                       in addition, a second process replays the journal
    recovery_s         with every_step: a full checkpoint is saved when a load would take more than so many seconds
    lag_steps          with every_step: steps that may not be durable yet when `save` returns, the current one included
    rules              tensors to save with lower precision (Quantize); by default all are saved exactly
    alone              no other rank takes part, as in `if rank == 0: ckpt.save(...)`; no tensor may be sharded
    on_event           called with every event (see events/phases.py), on the thread where the event happens

    Calls from several threads wait for each other, except `fence`. Changes that another thread makes before `save` has
    returned may go undetected. Calling a method, or waiting for a save, inside of another call, in `on_event` or in a
    Future's callback raises BusyError. The end of a `with` block, or of the process, waits for saves in flight; if the
    failure of a save was never raised, the process ends with status 1. A Checkpointer that is no longer referenced
    releases its store and memory.
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
            tiers = extension("tiered")(path, keep, engine, every_step=every_step)
            budget_bytes = tiers.budget_of_saves(budget_bytes)
        stores = tiers.stores if tiers else (calls.store_at(calls.to_store(path), engine),)
        self.made_at, self._pid, counter = caller_location(), os.getpid(), VerbCounter()
        exchange_addresses = address_exchange(stores, tiers.leave_out if tiers else None)
        # Comes after all checks that may fail, as it makes the Checkpointer known to the other ranks.
        self._group = RankGroup(deadline_s, stores[0].location, counter, alone=alone)
        self._verb_lock = VerbLock(counter, self._group.agreement.report_interrupted_call)
        self._store: Store = exchange_addresses(self._group)
        saves_in_flight = min(saves_in_flight, self._store.capabilities.drafts_max or saves_in_flight)
        options = SaveOptions(
            budget_bytes, saves_in_flight, on_error, max_unsaved_steps, lossy, lag_steps, keep, every_step, recovery_s
        )
        emit = EventEmitter(on_event, self._store.location, quiet=self._group.rank > 0)
        shared = Shared(
            self._store, engine, self._group, self._verb_lock, emit, FrozenParameters(first_samples), LoadOutcome()
        )
        self._end = ExitHook(self.close)
        strategy = make_strategy(shared, options, tiers, self, self._end)
        self._saves, self._loads, self._store_writer = strategy.saves, strategy.loads, strategy.store_writer
        self._locations, self._closed = register_owner(self, (self._store, *stores)), False

    @after_saves_of_others
    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None if there is none yet. Raises DamagedError if it is damaged.

        Like `load`, waits for unfinished saves of this process into this store, so the result is independent of timing.
        """
        self._check_open()
        self._saves.await_all()
        return self._loads.find_newest()

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
        """Load the newest step, or `step`, into `state`, in place. If a journal has that step, it is replayed. State
        and checkpoint must match, except for differences that `rules` allow.

        rules         allowed differences (Rename, Skip, Init, Cast), and changes of layout (Split, Fuse, Transpose,
                      Pad, Unpad, Stack, Unstack, RuleSet); the report lists each tensor that they change
        verify_first  read and verify every byte before the state changes; needs memory for a second copy of the state
        fallback      if a checkpoint is damaged, load the next older step; the next save sets damaged steps aside. A
                      refusal by the system (descriptors, memory, permissions) is not damage and raises an error

        raises    NoCheckpointError  nothing to load
                  MismatchError      state and checkpoint differ, or a tensor is not as a rule says. The error lists all
                                     differences; nothing was changed
                  NoTensorError, CollisionError  a layout rule matches no tensor; two tensors get the same name
                  DamagedError       stored bytes differ from those that were saved; the error's `written` names the
                                     tensors that this load changed. Saving is refused until a load succeeds
        """
        self._check_open()
        state, step, rules = calls.to_load(state, step, rules, {"verify_first": verify_first, "fallback": fallback})
        self._saves.await_all()
        load = partial(self._loads.load_newest, step, state, rules, verify_first=verify_first, fallback=fallback)
        return self._saves.around_load(state, load)

    @exclusive_verb
    def save(self, step: int, state: Mapping[str, object], *, fence: Literal["auto", "manual"] = "auto") -> Save:
        """Save `state` as `step`. Returns at once; what the next step will change is captured in the background.

        Parameters of modules and states of optimizers are captured lazily, while forward and backward run
        (DataStates-LLM, arXiv 2406.10707). Captured before `save` returns: buffers, tensors below 64 KiB, tensors of
        unknown objects, Python values. If no optimizer's step can wait for lazy capture, everything is captured before
        `save` returns. If a lazily captured tensor changes before its capture, this save fails and names the tensor;
        docs/SAVING.md says which changes are detected, and how reliably.

        fence   "auto": the next step of any optimizer in `state` waits until everything is captured.
                "manual": the caller promises to call `fence()` before anything of `state` changes;
                then every tensor of at least 64 KiB is captured lazily

        raises  StepExistsError        `step` is not above the newest one; see `rewind`
                UnsupportedStateError  an object cannot be saved; the error names its path
                CollisionError         two tensors or values of the state would get the same name
                LockedError            another job saves into this store
                StorageError           the operating system refused an operation; FullError: no space is left
                SaveFailedError        an earlier save failed, and its failure was not raised yet
                DamagedError           the last load left the state partly changed
        """
        spans = Spans("save", step, self._group.rank)
        self._check_open()
        spans.step, state, fence = calls.to_save(step, state, fence)
        return self._saves.save(spans.step, state, fence, spans)

    def fence(self) -> None:
        """Wait until all saves called so far are captured; then the state may change. Emits the event Fenced."""
        self._check_open()
        self._saves.pass_fence()

    @exclusive_verb
    def wait(self) -> None:
        """Wait until all saves called so far are committed. Raises SaveFailedError if one failed and no call has
        raised that failure yet.
        """
        self._check_open()
        self._saves.await_saves()

    @exclusive_verb
    def rewind(self, step: int) -> None:
        """Remove every step above `step` from the steps that can be loaded, so that training can save them again. Their
        files are kept under other names. `step` itself must exist.
        """
        self._check_open()
        self._saves.rewind(calls.step_number(step, verb="rewind"))

    @exclusive_verb
    def close(self) -> None:
        """Wait for saves in flight, then release the store and the memory. Raises the errors of `wait`."""
        if self._closed or os.getpid() != self._pid:
            return
        failure: Exception | None = None
        try:
            self._saves.await_saves()
        except Exception as error:
            failure = error
        self._saves.await_ends()  # an interrupt ends this wait and changes nothing
        self._saves.sole_writer.drain_at_end()
        self._verb_lock.uninterrupted(self._shutdown)
        if failure is not None:
            raise failure

    def _shutdown(self) -> None:
        self._closed = True
        self._verb_lock.end_shield()
        self._saves.end()
        self._group.leave()
        self._release()

    def _release(self) -> None:
        self._end.cancel()
        self._saves.captures.close()
        self._store.close()

    def __del__(self) -> None:
        """Close it. No save is in flight: each holds a reference. Python calls this on any thread, at any time."""
        if self._closed or os.getpid() != self._pid:
            return
        with release_of_owner(self._locations):
            self._closed = True
            # This may run on a thread of the Checkpointer. Hooks of optimizers check whether it is closed.
            self._saves.end(wait=False)
            try:
                self._saves.await_saves()
                self._release()
            except FlowstoneError as failure:
                self._release()
                self._end.exit_with_failure(failure)
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
