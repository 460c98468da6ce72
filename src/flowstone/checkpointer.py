"""THE CONDUCTOR: the order of a save and of a load, and nothing else.

    save:  state --Described--> plan --WritePlan--> stage --Staged--> store --Receipt--> commit --Manifest-->
    load:  Manifest --> plan --ReadPlan--> store --bytes--> stage --> the caller's memory
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from flowstone import _native
from flowstone import arguments as calls
from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_no_checkpoint, check_store, stores_below
from flowstone.commit.writer import StoreWriter
from flowstone.config import COPY_BYTES_PER_S, DEADLINE_S, FENCE_WAIT_S, EngineOptions, Keep
from flowstone.errors import DamagedError, FlowstoneError, NoCheckpointError, is_damage
from flowstone.events import Committed, FellBack, Loaded, OnEvent, SaveFailed, SaveStarted
from flowstone.pipeline import load as loading
from flowstone.pipeline import save as saving
from flowstone.pipeline.futures import Save
from flowstone.pipeline.handover import Handover
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.load import LoadReport
from flowstone.pipeline.rank_group import RankGroup, error_for_others
from flowstone.pipeline.save import CachedPlan, Captures, Looked, SaveRun
from flowstone.pipeline.unplanned import Unplanned
from flowstone.rules import Rule
from flowstone.runtime import threads
from flowstone.runtime.ending import Ending, without_frames
from flowstone.runtime.telling import Teller
from flowstone.runtime.turns import Turn, one_at_a_time
from flowstone.runtime.uninterrupted import Latch
from flowstone.runtime.writer_lock import as_writer, caller
from flowstone.stage.arena import default_budget_bytes, open_write_arena
from flowstone.stage.device import as_on_this_thread
from flowstone.stage.fence import Fence
from flowstone.state import Described, Frozen, describe, found_in, gc_paused, warn_of_save
from flowstone.store.base import Store
from flowstone.store.local import LocalStore

_log = logging.getLogger("flowstone")
Begin: TypeAlias = Callable[[CachedPlan, Described], SaveRun]


class Checkpointer:
    """Saves a training state into the store at `path` while training goes on, and loads it back.

    path               a directory, or a Store that is ready and is closed with this; checkpoints are put
                       beside what else a directory holds
    keep               which checkpoints retention spares; a number: the newest so many; None keeps all
    budget_bytes       memory for staging, all in all; None: a node's ranks share a quarter of what is available
    on_error           "raise": a failed save raises at the next call; "continue": it is only an event,
                       until `max_unsaved_steps` steps have passed since the last committed one
    engine             how bytes move; what is left out is as tuned for the mount, else a measured default
    saves_in_flight    how many saves may be under way at once; `save` waits when there are more
    deadline_s         in a job of several ranks, how long they wait for the slowest of them
    alone              this process saves and loads by itself, whatever job it is in: what it saves has to be whole.
                       For `if rank == 0: ckpt.save(...)`, and for what one rank evaluates
    on_event           is told every event (see events.py), from the thread where it happens

    Calls from several threads wait for each other, but for `fence`; what another thread changes while `save` has not
    returned is no part of any promise. Inside of a call, in `on_event` and in a Future's callback, a call is a
    BusyError, and so is waiting for another save. A context manager; leaving it, or the end of the process, waits for
    saves in flight; a failure that nobody has seen ends the process with 1. One that nobody holds any more gives store
    and memory back after its saves.
    """

    _closed = True  # until there is something to close

    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        *,
        keep: Keep | int | None = None,
        budget_bytes: int | None = None,
        on_error: Literal["raise", "continue"] = "raise",
        max_unsaved_steps: int | None = None,
        engine: EngineOptions | None = None,
        saves_in_flight: int = 2,
        deadline_s: float = DEADLINE_S,
        alone: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        place = calls.to_store(path)
        keep, budget_bytes, max_unsaved_steps, saves_in_flight, deadline_s = calls.to_options(
            keep=keep, budget_bytes=budget_bytes, on_error=on_error, max_unsaved_steps=max_unsaved_steps,
            engine=engine, saves_in_flight=saves_in_flight, deadline_s=deadline_s, alone=alone, on_event=on_event,
        )
        self._options = engine or EngineOptions()
        self._store: Store = LocalStore(place, self._options) if isinstance(place, Path) else place
        self._budget_bytes = budget_bytes
        self._saves_in_flight = saves_in_flight
        self._turn = Turn()
        self._state_lock = threading.RLock()  # while the state is described: a step of another thread waits
        self.made_at = caller()
        background = self._turn.leave_out_this_thread
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="flowstone-commit", initializer=background)
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="flowstone-capture", initializer=background)
        self._reserver = ThreadPoolExecutor(1, thread_name_prefix="flowstone-reserve", initializer=background)
        self._fence = Fence(self._before_step)
        self._arena: _native.Arena | None = None
        self._cached_plan: CachedPlan | None = None  # of the last save; any thread may replace it
        self._frozen = Frozen(saving.first_samples)
        self._emit = Teller(on_event, self._store.location)
        self._store_writer = StoreWriter(self._store, keep, self._emit.removed, self._emit.left)
        self._has_threads = False
        self._captures = Captures(self._options.write_bytes_per_s)
        self._in_flight = InFlight(
            self._store, self._captures.expedite, on_error=on_error, max_unsaved_steps=max_unsaved_steps
        )
        self._handover = Handover(
            self._store, self._turn, self._in_flight, self._captures, self._emit, self._watcher
        )
        self._corrupt: str | None = None  # why the state must not be saved
        self._superseded_above: int | None = None
        self._last_written: object = None  # the Future of the last save that the writer's thread has come to
        self._pid = os.getpid()
        # Last: it tells other ranks that this Checkpointer is there.
        self._group = RankGroup(deadline_s, self._store.location, self._turn, alone=alone)
        self._emit.quiet = self._group.rank > 0
        self._end = Ending(self.close)
        self._closed = False

    # Load

    @one_at_a_time
    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None where there is none yet. Raises DamagedError if it is damaged.

        Waits for a save in flight, as `load` does, so that the answer does not depend on timing.
        """
        self._check_open()
        self._await_saves()

        def look() -> list[int]:
            check_no_checkpoint(self._store)
            newest = catalog.newest(self._store)
            if newest is None and (below := stores_below(self._store)):
                _log.warning("there is no checkpoint in %s; stores are in %s", self._store.location, below)
            return [] if newest is None else [newest.step]

        found = self._group.decide("which step is the newest", look)
        return Checkpoint(self._store, step_directory(found[0]), self._options) if found else None

    @one_at_a_time
    def load(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        rules: Rule | Sequence[Rule] = (),
        verify_first: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Bring `state` back to the newest committed checkpoint, or to that of `step`, in place. Strict.

        rules         what may differ (Rename, Skip, Init, Cast), each listed in the report
        verify_first  read and check every byte before the first of the state changes, where memory allows
        fallback      on damage try the next older step; the damaged ones are set aside at the next save.
                      What the system refuses (descriptors, memory, a permission) is no damage, and raised

        raises    NoCheckpointError  nothing to load
                  MismatchError      state and checkpoint differ: all differences, nothing changed
                  DamagedError       stored bytes are not what was written; `written` names what
                                     changed, and saving is refused until a load succeeds
        """
        self._check_open()
        state, step, rules = calls.to_load(state, step, rules, {"verify_first": verify_first, "fallback": fallback})
        self._await_saves()

        def look() -> list[int]:
            check_store(self._store)
            newest = catalog.find(self._store, step)
            return [s for s in reversed(catalog.steps(self._store)) if s <= newest] if fallback else [newest]

        candidates = self._group.decide("which step to load", look)
        for candidate in candidates:
            try:
                report = self._load(candidate, state, rules, verify_first)
            except FlowstoneError as error:
                if candidate == candidates[-1] or not is_damage(error):
                    raise
                _log.warning("cannot load step %d, trying an older one: %s", candidate, error)
                self._emit(FellBack(candidate, str(error)))
            else:
                if candidate != candidates[0]:
                    self._superseded_above = candidate
                return report
        raise NoCheckpointError(f"no checkpoint in {self._store.location}", next="check the path")

    @gc_paused()
    def _load(self, step: int, state: Mapping[str, object], rules: Sequence[Rule], verify_first: bool) -> LoadReport:
        started = time.monotonic()
        ready = loading.agree(
            self._store, self._options, self._group, step, state, rules=rules, verify_first=verify_first
        )
        # Before the first byte can change: whatever ends this load, only one that succeeds takes it back. Unless it is
        # certain that none has changed, on this rank and on all others.
        corrupt_before, self._corrupt = self._corrupt, f"the load of step {step} did not finish"
        self._frozen.forget()
        failure: Exception | None = None
        try:
            tell = loading.teller(step, ready.plan.bytes, self._emit)
            found = loading.read(ready, self._store, tell)
            if found.failed and not found.written and self._group.coordinator is None:
                self._corrupt = corrupt_before
            loading.finish(ready, found)
        except Exception as error:
            if ready.changed_nothing and self._group.coordinator is None:
                self._corrupt = corrupt_before
            failure = error
        self._group.confirm(f"the load of step {step}", failure)
        self._corrupt = None
        report = loading.report(ready, found, time.monotonic() - started)
        self._emit(Loaded(step, report.bytes, report.seconds))
        return report

    # Save

    @one_at_a_time
    def save(self, step: int, state: Mapping[str, object], *, fence: Literal["auto", "manual"] = "auto") -> Save:
        """Save `state` as `step`. Returns at once; what the next step will change is captured meanwhile.

        Captured lazily, while forward and backward run (DataStates-LLM, arXiv 2406.10707): parameters of
        modules and states of optimizers. Captured before this returns: buffers, tensors below 64 KiB,
        those of unknown objects, Python values; and everything, when nobody would wait for the rest.
        A lazily captured tensor that changes all the same fails this save, by name; which changes are
        noticed, and with which odds, is in docs/LIMITS.md.

        fence   "auto": the next step of any optimizer in `state` waits until all of it is captured.
                "manual": the caller promises to call `fence()` before anything of `state` changes;
                then every tensor from 64 KiB on is captured lazily

        raises  StepExistsError        `step` is not above the newest one; see `rewind`
                UnsupportedStateError  an object that cannot be saved, by path
                CollisionError         two paths of the state make one name
                LockedError            another job saves into this store
                StorageError           the system refused, so far; FullError when space is the reason
                SaveFailedError        an earlier save failed, and nobody has been told yet
                DamagedError           the last load left the state half changed
        """
        started = time.monotonic()
        self._check_open()
        step, state, fence = calls.to_save(step, state, fence)
        save = Save(step)
        save.captured.check = save.committed.check = partial(self._turn.check_thread, "result")
        try:
            return self._save(save, state, fence, started)
        except BaseException as error:
            if self._group.coordinator is not None:  # the others must not wait for this rank
                told = error_for_others("save", error)
                self._turn.uninterrupted(lambda: self._writer.submit(self._absent, save, told))
            raise

    def _absent(self, save: Save, error: Exception) -> None:
        """On the writer thread: it has come to all that was handed to it, though whoever did so was interrupted."""
        assert self._group.coordinator is not None
        if save.committed is not self._last_written:
            self._group.coordinator.absent(save.step, error)

    def _save(self, save: Save, state: Mapping[str, object], fence: Literal["auto", "manual"], started: float) -> Save:
        coordinator, step = self._group.coordinator, save.step
        this_try = "" if coordinator is None else coordinator.begin_try(step)  # before anything can fail
        self._group.comes_to(step)
        self._check_not_corrupt()
        with self._group.pressing():  # the caller trains: no save is worth that it stands for those who never call
            self._in_flight.settle(leave=self._saves_in_flight - 1)
        waited = time.monotonic()
        self._check_writer()
        self._in_flight.check_new(step, looks=self._group.rank == 0)
        with self._state_lock:
            return self._begin(save, state, fence, started, waited, this_try)

    def _begin(
        self, save: Save, state: Mapping[str, object], fence: Literal["auto", "manual"], started: float, waited: float,
        this_try: str,
    ) -> Save:
        """Describe the state and start its capture. `waited`: when what had to be waited for was over."""
        coordinator, rank, known = self._group.coordinator, self._group.rank, self._cached_plan
        may_begin = known is not None and (coordinator is None or coordinator.assignment(known.layout) is not None)
        may_begin &= not self._captures.wait_for_plan()
        layout = known.layout if known is not None and may_begin else None
        copied_bytes_max = self._opened_arena().budget_bytes // 2 if coordinator else None
        if known is None and (idiom := found_in(state)):
            warn_of_save(idiom)
        described = describe(
            state, rank=rank, known=layout, whole=self._group.alone, frozen=self._frozen,
            copied_bytes_max=copied_bytes_max,
        )
        self._fence.tell(described.unguarded)
        described_at = time.monotonic()

        def tell(cached: CachedPlan) -> None:
            plan, now = cached.plan, time.monotonic()
            spent = described_at - waited, now - described_at, waited - started
            self._emit(SaveStarted(save.step, len(plan.pieces), plan.bytes, cached is known, *spent))

        def begin(cached: CachedPlan, described: Described) -> SaveRun:
            return self._start(save, cached, described, started, this_try, looked)

        assignment = coordinator.assignment(described.layout) if coordinator is not None and may_begin else None
        looked = None if coordinator is None else saving.look(save.step, described, assignment)
        if looked is not None and assignment is None:
            self._save_once_planned(save, described, looked, fence, tell, begin, started)
            return save
        self._cached_plan = cached = saving.plan_save(described, known, fence=fence, rank=rank, assignment=assignment)
        tell(cached)
        self._handover.start(
            described, lambda: begin(cached, described), lambda run: self._writer.submit(self._finish, run)
        )
        return save

    def _start(
        self, save: Save, cached: CachedPlan, described: Described, started: float, this_try: str, looked: Looked | None
    ) -> SaveRun:
        arena, pace = self._opened_arena(), self._captures.pace(cached.plan, self._store.settings("write").tuning)
        if cached.waiter == "optimizers" and cached.plan.lazy_bytes:
            self._fence.guard(described.optimizers)
        identity = None if self._group.coordinator is None else self._group.coordinator.draft_name(this_try)
        spare, aside = self._captures.spare_bytes(arena), partial(threads.hand_over, self._reserver)
        return saving.start(self._store, save, cached, described, arena, pace, started, spare, aside, identity, looked)

    def _save_once_planned(
        self, save: Save, described: Described, looked: Looked, fence: Literal["auto", "manual"],
        tell: Callable[[CachedPlan], None], begin: Begin, started: float,
    ) -> None:
        """The first save of a layout by several ranks: it begins once they have agreed who writes what.

        What must not change before it is captured is copied; the rest is lazy, and the fence copies what is left of it.
        """
        self._turn.uninterrupted(partial(self._fence.guard, described.optimizers))
        arena = self._opened_arena()
        streams = as_on_this_thread(memory.device for memory in described.places.apart.values())
        unplanned = saving.unplanned(save, described, looked.samples, started, fence=fence)
        save.captured.expedite, save.committed.expedite = partial(
            self._captures.snapshot, arena
        ), self._captures.expedite

        def begin_later(cached: CachedPlan) -> SaveRun:
            tell(cached)
            with streams():
                held = unplanned.take()
                return saving.encoded(begin(cached, held), held, self._store)

        def enlist() -> None:
            if unplanned.is_copied:
                save.captured.tell()
            self._captures.expect(unplanned)
            self._writer.submit(self._begin_and_finish, unplanned, described, fence, begin_later)
            self._in_flight.add(save)

        self._turn.uninterrupted(enlist)

    def _begin_and_finish(
        self, unplanned: Unplanned, described: Described, fence: Literal["auto", "manual"],
        begin: Callable[[CachedPlan], SaveRun],
    ) -> None:
        """On the writer thread: all of a save whose plan the ranks have yet to agree on."""
        assert self._group.coordinator is not None
        save = unplanned.save
        self._last_written = save.committed
        try:
            self._cached_plan = cached = saving.plan_together(
                save.step, described, self._group.coordinator, fence=fence
            )
            try:
                run = begin(cached)
            except Exception as error:
                self._group.coordinator.give_up(save.step, error)
                raise
        except Exception as error:
            unplanned.let_go()
            self._end_badly(save, error)
            return
        run.blocked_s = unplanned.blocked_s
        run.handed_on.open()
        run.writing.expedite()
        self._handover.watch(run)
        unplanned.let_go()
        self._finish(run, shared=True)

    def _finish(self, run: SaveRun, *, shared: bool = False) -> None:
        """The background half of a save, on the writer thread: its outcome is the future's, whatever it is.

        shared  the ranks have agreed on its plan
        """
        if not self._handover.is_handed_on(run):
            return
        save, plan = run.save, run.plan
        self._last_written = save.committed
        try:
            coordinator, emit = self._group.coordinator, self._emit
            store_id = self._store_writer.store_id or ""  # which rank 0 knows
            manifest = saving.commit(run, self._store, store_id, coordinator, shared=shared, emit=emit)
        except BaseException as error:
            save.captured.await_end()  # by the watcher
            self._end_badly(save, error)
            return
        self._emit(Committed(save.step, plan.file_bytes, time.monotonic() - run.started))
        save.committed.set_result(Checkpoint(self._store, step_directory(save.step), self._options, manifest))
        # A larger arena shortens what a save waits for. Touching fresh pages is slower than a device, so no save waits.
        self._captures.grow(self._opened_arena(), plan.file_bytes - plan.lazy_bytes)
        self._store_writer.retain(save.step)

    def _end_badly(self, save: Save, error: BaseException) -> None:
        save.captured.tell()
        self._emit(SaveFailed(save.step, str(error)))
        save.committed.set_exception(without_frames(error))

    def _check_writer(self) -> None:
        """Before anything is written: be the store's one writer, and set aside what a fallback left for that."""
        is_first = self._group.rank == 0
        lost = is_first and self._store_writer.has_lost_the_lock()
        unlocked = is_first and self._store_writer.store_id is None
        if lost or unlocked or not self._has_threads or self._superseded_above is not None:
            self._turn.uninterrupted(lambda: self._become_writer(lost))

    def _become_writer(self, lost: bool) -> None:
        """At the first save: lock, sweep, learn the newest step; again, where the lock was `lost`."""
        if not self._has_threads:
            threads.start(self._writer, self._watcher)
            self._end.before_threads_end(self._captures.expedite)
            self._has_threads = True
        if self._group.rank == 0:
            if lost:
                self._await_saves()
                self._drain_writer()
                self._store_writer.give_up()
            if self._store_writer.store_id is None:
                check_no_checkpoint(self._store)
                self._in_flight.newest = as_writer(self, self._store.location, self._store_writer.begin)
        if self._superseded_above is not None:
            self._drain_writer()
            if self._group.rank == 0:
                self._store_writer.rewind(self._superseded_above)
            self._in_flight.newest, self._superseded_above = self._superseded_above, None

    def _opened_arena(self) -> _native.Arena:
        """The arena for saves. It grows in the background, within the budget."""
        if self._arena is None:
            budget = default_budget_bytes() if self._budget_bytes is None else self._budget_bytes
            self._arena = open_write_arena(self._store, budget)
        return self._arena

    # Waiting and ending

    def fence(self) -> None:
        """Wait until the state may change: every save so far is captured. Told as the event Fenced."""
        self._check_open()
        self._pass_fence()

    def _before_step(self) -> None:
        """An optimizer is about to step."""
        if not self._closed and os.getpid() == self._pid:
            self._pass_fence()

    def _pass_fence(self) -> None:
        self._turn.check_thread("fence")
        with self._state_lock:
            fenced = self._captures.fence()
        if fenced is None:
            return
        self._emit(fenced)
        if fenced.waited_s > FENCE_WAIT_S and self._arena is not None:
            # Steps are shorter than writes: next time there is more memory to copy into.
            more = self._arena.touched_bytes + int(fenced.waited_s * COPY_BYTES_PER_S)
            self._captures.grow(self._arena, min(more, self._captures.arena_bytes))

    @one_at_a_time
    def wait(self) -> None:
        """Wait until every save so far is durable; raises SaveFailedError if one failed unseen."""
        self._check_open()
        self._in_flight.settle()

    @one_at_a_time
    def rewind(self, step: int) -> None:
        """Set every step above `step` aside, so that training can save them anew. `step` itself must exist."""
        self._check_open()
        step = calls.step_number(step, verb="rewind")
        self._await_saves()
        failure: Exception | None = None
        try:
            self._in_flight.settle()
        except FlowstoneError as error:
            failure = error
        self._group.confirm("the saves before going back", failure)

        def set_aside() -> Sequence[int]:
            catalog.find(self._store, step)
            self._check_writer()
            self._drain_writer()
            aside = self._store_writer.rewind(step)
            self._in_flight.newest = step
            return aside

        self._group.decide(f"going back to step {step}", lambda: self._turn.uninterrupted(set_aside))
        self._in_flight.newest = step

    @one_at_a_time
    def close(self) -> None:
        """Wait for saves in flight, give the store and the memory back. Raises what `wait` raises."""
        if self._closed or os.getpid() != self._pid:
            return
        failure: Exception | None = None
        try:
            self._in_flight.settle()
        except Exception as error:
            failure = error
        self._in_flight.await_all()  # an interrupt ends this wait, and leaves all as it is
        if self._has_threads:
            with suppress(RuntimeError):  # at the end of Python, which has waited for it
                self._drain_writer()
        self._turn.uninterrupted(self._let_go)
        if failure is not None:
            raise failure

    def _let_go(self) -> None:
        self._closed = True
        self._turn.end_acts()
        self._fence.lift()
        for executor in (self._watcher, self._writer, self._reserver):
            executor.shutdown()
        self._group.leave()
        self._give_back()

    def _give_back(self) -> None:
        self._end.call_off()
        if self._arena is not None:
            self._arena.close()
        self._store.close()

    def __del__(self) -> None:
        """Nobody holds it any more. No save is in flight: each holds it. Any thread, in the middle of anything."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for executor in (self._watcher, self._writer, self._reserver):  # this may be their own thread; and optimizers'
            executor.shutdown(wait=False)  # hooks, which may be running, are left to find out that there is nobody
        try:
            self._in_flight.settle()
            self._give_back()
        except FlowstoneError as failure:
            self._give_back()
            self._end.fail(failure)
        self._group.abandon()

    def finish_saves(self, location: str) -> None:
        """Wait until saves into the store at `location` have ended, and what follows them, if that is ours."""
        if not self._closed and os.getpid() == self._pid and self._store.location == location:
            self._in_flight.await_all()
            self._drain_writer()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except FlowstoneError as failure:
            if error is None:
                raise
            _log.error("closing failed too, after another error: %s", failure)  # which must not be masked

    def _await_saves(self) -> None:
        """Until the saves in flight have ended one way or the other."""
        self._in_flight.await_all()
        if self._group.coordinator is not None:
            self._drain_writer()  # which may still tell the others of a save that was refused here

    def _drain_writer(self) -> None:
        """Wait for retention too, which runs behind a commit."""
        done = Latch()
        self._turn.uninterrupted(lambda: self._writer.submit(done.open))
        done.wait()

    def _check_open(self) -> None:
        calls.check_open(self._store.location, closed=self._closed, pid=self._pid)

    def _check_not_corrupt(self) -> None:
        if self._corrupt is not None:
            raise DamagedError(
                f"cannot save the state: {self._corrupt}, and part of the state has changed",
                next="load a checkpoint successfully first",
            )
