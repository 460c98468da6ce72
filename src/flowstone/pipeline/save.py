"""THE ORDER of a save, by a group of N ranks, N at least 1. A single process is a group of one.

    state --Described--> plan --WritePlan--> stage --Sources--> store --Receipt--> commit --Manifest-->

On the caller's thread   `Saves.save`: describe, agree (what is known already), plan, watch the sources, capture
On the act's thread      `flowstone-act`: what no signal handler may interrupt, while the caller waits for it
On the engine's threads  `fs-write`, `fs-worker`, ...: windows are copied, digested, written; `save` returns meanwhile
On `flowstone-reserve`   segments are allocated, if the caller does not wait for that
On `flowstone-capture`   `Handover.watch`: waits for a capture that outlasts `save`, then completes `captured`
On `flowstone-remove`    files of steps that retention gives up are removed
On `flowstone-commit`    `_finish`: agree, receipts, commit, retain; one save after the other, in the order of steps.
                         A save whose layout has no plan yet begins here too: `_begin_and_finish`

save_run.py draws the states of one save; docs/ARCHITECTURE.md lists every thread.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING

from flowstone.checkpoint import Checkpoint
from flowstone.commit import catalog, publish
from flowstone.commit.entries import step_directory
from flowstone.commit.writer import StoreWriter, newest_step
from flowstone.config import DIGESTED_ON_DEVICES, FIRST_ARENA_BYTES, EngineOptions
from flowstone.errors import FlowstoneError, StepExistsError
from flowstone.events import Committed, Prepared, SaveFailed, SaveStarted
from flowstone.log import log
from flowstone.pipeline.absence import Absence
from flowstone.pipeline.base import Base
from flowstone.pipeline.capturing import begin_capture, watch, with_rests
from flowstone.pipeline.committing import agree, commit, write
from flowstone.pipeline.fencing import Fencing
from flowstone.pipeline.futures import Save
from flowstone.pipeline.handover import Handover
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.messages import Assignment, Contribution
from flowstone.pipeline.pacing import Captures
from flowstone.pipeline.plan_cache import CachedPlan, FenceMode, plan_save
from flowstone.pipeline.replica_samples import look
from flowstone.pipeline.save_coordinator import SaveCoordinator
from flowstone.pipeline.save_run import SaveRun
from flowstone.pipeline.shared import SaveOptions, Shared
from flowstone.pipeline.sole_writer import SoleWriter
from flowstone.pipeline.unmatched_rules import UnmatchedRules
from flowstone.plan.write import Writer
from flowstone.ranks import error_for_others
from flowstone.runtime.ending import Ending, without_frames
from flowstone.runtime.threads import Threads, hand_over, while_held
from flowstone.runtime.writer_lock import Owner
from flowstone.stage.capture import WriteTarget
from flowstone.stage.device import as_on_this_thread, await_pinned, check_not_recording, let_streams_go
from flowstone.stage.fence import SAVE_OUTSIDE
from flowstone.state import Described, describe, found_in, warn_of_save
from flowstone.store.base import shares_of
from flowstone.trace import Span, Spans

if TYPE_CHECKING:
    from flowstone.pipeline.coding import Coding
    from flowstone.pipeline.collapsing import Collapsing
    from flowstone.pipeline.unplanned import Unplanned
    from flowstone.quantize import Quantize


def coding_of(options: EngineOptions, quantize: tuple[Quantize, ...]) -> Coding | None:
    """What chooses the pieces that saves encode; None: none ever is."""
    if options.compress == "off" and not quantize:
        return None
    from flowstone.pipeline.coding import Coding  # imported here: most processes encode nothing

    return Coding(options.compress, quantize, options.kept_bytes)


class Saves:
    """The saves of one Checkpointer.

    captures     under way during training
    fencing      makes steps wait for them
    in_flight    saves that were started and not settled yet
    sole_writer  makes this job the store's one writer
    """

    def __init__(
        self, shared: Shared, options: SaveOptions, store_writer: StoreWriter, owner: Owner, end: Ending
    ) -> None:
        """`owner`: the Checkpointer. Referenced only while one of its saves is under way."""
        self._shared = shared
        self._store, self._options, self._group = shared.store, shared.options, shared.group
        self._turn, self._emit, self._frozen, self._outcome = shared.turn, shared.emit, shared.frozen, shared.outcome
        self._saves_in_flight, self._store_writer = options.saves_in_flight, store_writer
        self._owner = weakref.ref(owner)
        self._unmatched = UnmatchedRules(options.quantize)
        self._coordinator = SaveCoordinator(shared.group.agreement, socket.gethostname(), self._unmatched)
        self._threads = Threads(shared.turn.leave_out_this_thread)
        cap, copies = shared.options.write_bytes_per_s, not self._coordinator.knows_every_layout
        self.captures = Captures(shared.store, options.budget_bytes, cap, copies=copies)
        self.in_flight = InFlight(
            shared.store, self.captures.expedite, on_error=options.on_error,
            max_unsaved_steps=options.max_unsaved_steps,
        )
        on_start = partial(end.before_threads_end, self.in_flight.expedite)
        self.sole_writer = SoleWriter(shared, store_writer, self._threads, self.in_flight, self._owner, on_start)
        store_writer.empty = partial(self._threads.remove, self._owner)
        self.fencing = Fencing(self.captures, shared.turn, shared.emit)
        self._plan: CachedPlan | None = None  # of the last save; replaced by any thread
        self._base: Base | None = None  # of the next save; replaced by the writer's thread
        self._coding = coding_of(shared.options, options.quantize)
        self._adopted: tuple[int, Base | None] | None = None  # after so many loads, a base that an earlier process made
        self._links = shared.store.capabilities.links
        self.new_save: Callable[[int], Save] = Save
        self.newest_draft = ""  # id of the checkpoint that the last call of `save` was to make
        self._absence = Absence(self._coordinator, self._turn)
        self._handover = Handover(
            shared.store, shared.turn, self.in_flight, self.captures, shared.emit, self._threads.watcher
        )

    @cached_property
    def collapsing(self) -> Collapsing:
        """Collapses the memory that saves capture late into huge pages."""
        from flowstone.pipeline.collapsing import Collapsing  # imported here: a load needs none of it

        return Collapsing(self._options, self._emit)

    # On the caller's thread

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save `state` as `step`; returns once everything that is not lazy is captured. See Checkpointer.save."""
        save = self.new_save(step)
        save.captured.check = save.committed.check = partial(self._turn.check_thread, "result")
        try:
            run = SaveRun(save, self._coordinator.begin_try(step), spans)  # counted before anything can fail
            check_not_recording("save", SAVE_OUTSIDE)
            self._await_turn(step)
            self.newest_draft = self._coordinator.draft_name(run.this_try)
            waited = spans.lap("waited")
            self.sole_writer.check()
            self.in_flight.check_new(step, looks=self._group.rank == 0)
            with self.fencing.state_lock:
                self._begin(run, state, fence, waited)
            return save
        except BaseException as error:
            self._absence.tell(save, error_for_others("save", error), self._submit)
            raise

    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Make staging memory ready for saves of `state`; returns once it is. See Checkpointer.prepare."""
        from flowstone.pipeline.preparing import staging_bytes  # imported here: many processes never call this

        began, captures = monotonic(), self.captures
        check_not_recording("prepare", SAVE_OUTSIDE)
        with self.fencing.state_lock:
            described = describe(state, rank=self._group.rank, whole=self._group.alone)
        devices = described.places.devices
        captures.preparation.use(captures.open_for(devices), devices)
        digests = self._options.watch in DIGESTED_ON_DEVICES
        captures.preparation.reserve(described.layout, described.places, digests=digests, times=self._gathers_max)
        needed = staging_bytes(described.layout, self._group.size)
        if captures.preparation.device:
            needed = with_rests(needed, captures.arena)
        captures.preparation.grow(captures.arena, min(needed, captures.arena_bytes_max))
        told = captures.preparation.report(captures.arena, began)
        self._emit(told)
        if self._group.size == 1:  # else other ranks write a part of it
            self.collapsing.prepare(described)
        return told

    def check_journaled(self, step: int) -> None:
        """Become the writer, to save whole a step that only journals have. Raises unless it is the newest one."""
        self.sole_writer.check()
        newest, committed = newest_step(self._store), catalog.steps(self._store)
        if newest != step or step in committed:
            remedy = "load the newest step, and go on from there"
            raise StepExistsError(f"cannot save step {step} whole", found=f"newest step {newest}", next=remedy)
        self.in_flight.newest = committed[-1] if committed else None

    def save_journaled(self, step: int, state: Mapping[str, object], spans: Spans) -> Save:
        """Save whole what `check_journaled` has found, on all ranks. The state must not change meanwhile."""
        return self.save(step, state, "manual", spans)

    def tell_absence(self, step: int, error: Exception) -> None:
        """This rank does not come to save `step`, which the others save, because of `error`."""
        self._absence.tell(Save(step), error, self._submit)

    def before_journals_go(self, act: Callable[[], None]) -> None:
        """From now on call `act` before journals are removed, on the writer's thread."""
        self._store_writer.before_journals_go = act

    def before_files_go(self, act: Callable[[], None]) -> None:
        """From now on call `act` before files are removed, on the remover's thread."""
        self._threads.before_removal = act

    def _await_turn(self, step: int) -> None:
        """Wait until fewer saves are in flight than the limit."""
        self._group.comes_to(step)
        self._outcome.check_whole()
        with self._group.pressing():  # the caller trains: do not let it wait long for ranks that never call
            self.in_flight.settle(leave=self._saves_in_flight - 1)

    def _begin(self, run: SaveRun, state: Mapping[str, object], fence: FenceMode, waited: Span) -> None:
        """THE ORDER, first half: describe, agree, plan, capture. `waited`: the wait for earlier saves."""
        step, spans, run.loads = run.save.step, run.spans, self._outcome.loads
        self.collapsing.pause(run.save)
        queued = self.captures.wait_for_plan()  # this rank's part may change until earlier saves have a plan
        known = None if self._plan is None or queued else self._plan
        described = self._describe(state, known)
        self._unmatched.look(described, is_all=self._group.size == 1)
        await_pinned(described.places.owners)
        describing = spans.lap("described")
        assignment = None if queued else self._coordinator.assignment(described.layout)
        run.looked = look(step, described, assignment, digests=self._options.watch in DIGESTED_ON_DEVICES)

        def tell(cached: CachedPlan) -> None:
            plan, spent = cached.plan, (describing, spans.lap("planned"), waited)
            seconds = [span.seconds for span in spent]
            self._emit(SaveStarted(step, len(plan.pieces), plan.bytes, cached is known, *seconds))

        if assignment is None:  # do not wait here for other ranks
            self._capture_once_planned(run, described, fence, tell)
            return
        self._plan = cached = plan_save(
            described, known, assignment, fence=fence, writer=self._writer(), base=self._find_base(assignment),
            coding=self._coding,
        )
        tell(cached)
        self.sole_writer.await_room(cached.plan.file_bytes)
        self._capture(run, cached, described)

    @property
    def _gathers_max(self) -> int:
        """How many at a time a device is asked for: with other ranks each save has two, one to compare replicas."""
        return self._saves_in_flight * (1 if self._group.alone else 2)

    def _writer(self) -> Writer:
        return Writer(self._group.rank, shares_of(self._store))

    def _describe(self, state: Mapping[str, object], known: CachedPlan | None) -> Described:
        if self._plan is None and (idiom := found_in(state)):
            warn_of_save(idiom)
        layout = known.layout if known is not None and self._coordinator.assignment(known.layout) is not None else None
        room = None if self._coordinator.knows_every_layout else self.captures.budget_bytes // 2
        described = describe(
            state, rank=self._group.rank, known=layout, whole=self._group.alone, frozen=self._frozen,
            copied_bytes_max=room,
        )
        self.fencing.hooks.tell(described.unguarded)
        return described

    def _capture(self, run: SaveRun, cached: CachedPlan, described: Described) -> None:
        """Start the capture, which the writer's thread finishes. If it ends early, no file is left.

        Memory of the host is watched on this thread, which has a core: the one of uninterrupted acts has to find one
        first, and torch's threads still spin. What devices do at a save is begun uninterrupted.
        """
        devices = described.places.devices
        streams = as_on_this_thread(devices)
        run.watched = None if devices else watch(cached, described, self._options.watch, run.save.step)

        def begin() -> None:  # called uninterrupted
            with streams():
                self._begin_capture(run, cached, described)

        def encode_beside() -> None:
            run.encode(described)
            run.blocked_s = run.spans.lapped("blocked").seconds

        finish = partial(self._submit, self._finish, run)
        self._handover.start(run, begin=begin, encode=encode_beside, finish=finish)

    def _begin_capture(self, run: SaveRun, cached: CachedPlan, described: Described) -> None:
        """Called uninterrupted; on failure no draft is left."""
        devices = described.places.devices
        plan, arena = cached.plan, self.captures.open_for(devices)
        run.compress = "" if self._coding is None else self._coding.why
        if cached.waiter == "optimizers" and plan.lazy_bytes:
            self.fencing.hooks.guard(described.optimizers)
        if devices:
            self.captures.preparation.use(arena, devices)
        if run.watched is None:
            run.watched = watch(cached, described, self._options.watch, run.save.step)
        run.stays = cached.waiter == "optimizers" and run.unplanned is None  # else there are copies
        pace = self.captures.pace(plan, self._store.settings("write").tuning)
        draft = publish.begin(self._store, run.save.step, self._coordinator.draft_name(run.this_try))
        target = WriteTarget(self._store, draft.directory, arena)
        capture = begin_capture(target, draft, cached, described, run.watched, pace, self._known_base())
        try:
            arena.grow(min(capture.arena_bytes, FIRST_ARENA_BYTES, self.captures.arena_bytes_max))
            if not capture.is_reserved:
                hand_over(self._threads.reserver, capture.writing.reserve)
            if capture.sources.streams:
                self.captures.grow(capture.arena_bytes)  # while no save runs: what a fence waits for are copies into it
        except BaseException:
            capture.abandon(self._store)
            raise
        run.capture, run.capturing = capture, run.spans.lap("begun")

    def _capture_once_planned(
        self, run: SaveRun, described: Described, fence: FenceMode, tell: Callable[[CachedPlan], None]
    ) -> None:
        """The first save of a layout by several ranks, which is captured once they have agreed on a plan. What must not
        change once `save` returns is copied, or waited for if the budget has no room. The fence copies the rest.
        """
        from flowstone.pipeline.unplanned import unplanned  # a group of one has a plan at once

        self._turn.uninterrupted(partial(self.fencing.hooks.guard, described.optimizers))
        self.captures.open_for(described.places.devices)
        streams = as_on_this_thread(described.places.devices)
        assert run.looked is not None, "what has no plan is looked at whole"
        with run.spans.phase("copied"):
            room, seen, how = self.captures.room_for_copies, run.looked.sampled[1], self._options.watch
            waiting = unplanned(run.save.step, described, seen, fence=fence, watch=how, room_bytes=room)
        if not waiting.holds_caller:
            run.blocked_s = run.spans.whole("blocked").seconds
        run.save.captured.expedite, run.save.committed.expedite = self.captures.snapshot, self.in_flight.expedite

        def begin_later(cached: CachedPlan) -> None:
            self._handover.check_wanted(run)
            tell(cached)
            with streams():
                held = waiting.take()
                self._begin_capture(run, cached, held)
                try:
                    waiting.check_unwritten()
                    run.encode(held)
                    self._handover.let_go_on(run)
                except BaseException:
                    run.begun.abandon(self._store)
                    raise

        def enlist() -> None:
            run.unplanned, run.call = waiting, self._turn.calls
            if waiting.is_copied:
                run.save.captured.tell()
            self.captures.add(run)
            self._submit(self._begin_and_finish, run, waiting, described, fence, begin_later)
            self.in_flight.add(run.save)

        self._handover.start_unplanned(run, waiting, enlist=enlist, pressing=self._group.pressing)

    def _submit(self, act: Callable[..., None], *arguments: object) -> None:
        """Run `act` on the writer's thread. The Checkpointer is kept alive until it is done."""
        self._threads.writer.submit(while_held, self._owner(), act, *arguments)

    # On the writer's thread

    def _finish(self, run: SaveRun) -> None:
        """THE ORDER, second half: agree, receipts, commit, retain. The outcome, good or bad, goes into the future."""
        if not self._handover.is_handed_on(run):
            return
        save, plan = run.save, run.begun.plan
        self._absence.has_come_to(save)
        try:
            with run.spans.phase("agreed"):
                assignment = agree(run, self._coordinator, self._store)
            written = write(run, assignment, self._store, self._known_base(), self._emit)
            store_id = self._store_writer.store_id or ""  # only rank 0 needs it
            with run.spans.phase("published"):
                manifest = commit(run, assignment, written, self._coordinator, self._store, store_id)
        except BaseException as error:
            save.captured.await_end()  # the watcher completes it
            self._end_badly(run, error)
            return
        assert not isinstance(written, Exception), "what failed was not committed"
        try:
            self._learn(run, written)
        except Exception:  # the checkpoint is there, whatever becomes of the next one
            self._base = None
            log.exception("step %d is saved, and the next save writes all it has", save.step)
        file_bytes = sum(row.bytes for row in written.segments if row.home is None)
        self._emit(Committed(save.step, file_bytes, run.ended(file_bytes).seconds))
        if run.begun.sources.streams and self.captures.preparation.is_untold:
            self._emit(self.captures.preparation.report(self.captures.arena))
        save.committed.set_result(Checkpoint(self._store, step_directory(save.step), self._options, manifest))
        # A larger arena shortens what a save waits for. Touching new pages is slower than a device, so no save waits.
        self.captures.grow(plan.file_bytes - plan.lazy_bytes)
        if run.late is not None:
            self.collapsing.begin(save.step, run.late, stays=run.stays)
        self._store_writer.retain(save.step)

    def _learn(self, run: SaveRun, written: Contribution) -> None:
        """What the next save may leave out or encode."""
        if self._coding is not None:
            told = self._coding.learn(run.save.step, run.begun.plan, written.receipt, run.compress)
            if told is not None:
                self._emit(told)
        self._base = run.base if self._may_refer(run) else None

    def _may_refer(self, run: SaveRun) -> bool:
        """Whether a later save may refer to files of this one: not where the store refused to link a base's."""
        referred = run.begun.referred
        self._links = self._links and (referred is None or not referred.refused)
        return self._links

    def _known_base(self) -> Base | None:
        """The base, unless there was a load since, which may have found its bytes damaged: then what was loaded."""
        if self._base is not None and self._base.loads == self._outcome.loads:
            return self._base
        return self._adopted[1] if self._adopted is not None and self._adopted[0] == self._outcome.loads else None

    def _find_base(self, assignment: Assignment) -> Base | None:
        """The same; at the first save, and at the first one after a load, also looked for in the store."""
        loads, found = self._outcome.loads, self._known_base()
        if found is None and self._links and (self._adopted is None or self._adopted[0] != loads):
            from flowstone.pipeline.adopted_base import adopted_base  # imported here: most processes need it once

            found = adopted_base(self._shared, assignment)
            self._adopted = loads, found
        return found

    def _begin_and_finish(
        self, run: SaveRun, waiting: Unplanned, described: Described, fence: FenceMode,
        begin: Callable[[CachedPlan], None],
    ) -> None:
        """The whole save, if the ranks have yet to agree on its plan."""
        step = run.save.step
        self._absence.has_come_to(run.save)
        try:
            self.sole_writer.await_swept(int(described.pieces.lengths().sum()) * self._group.size)  # of all ranks
            assignment = self._coordinator.assign(step, described.layout, is_far=bool(described.places.devices))
            run.is_agreed = True
            try:
                self._plan = cached = plan_save(
                    described, None, assignment, fence=fence, writer=self._writer(),
                    coding=None if self._coding is None else self._coding.from_afar(),
                    base=self._find_base(assignment),
                )
                begin(cached)
            except BaseException as error:
                self._coordinator.give_up(step, error_for_others("save", error))
                raise
        except BaseException as error:  # whatever it is: the caller may wait
            run.unwatch()
            waiting.let_go()
            self._end_badly(run, error)
            return
        run.expedite()
        self._handover.watch(run)
        waiting.let_go()
        self._finish(run)

    def _end_badly(self, run: SaveRun, error: BaseException) -> None:
        run.save.captured.tell()
        run.ended()
        self._emit(SaveFailed(run.save.step, str(error)))
        run.save.committed.set_exception(without_frames(error))

    # Waiting and ending, on any thread

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and other ranks know which of them this rank did not make."""
        self.in_flight.await_all()
        self._absence.await_told()

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended; an interrupt ends this wait and changes nothing."""
        self.in_flight.await_all()

    def settle(self) -> None:
        """Wait until every save so far is durable. Raises the first failure that was not raised yet."""
        self.in_flight.settle()

    def pass_fence(self) -> None:
        """Wait until the state may change: every save so far is captured."""
        self.fencing.pass_fence()

    def around_load(self, _: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which changes the state."""
        return load()

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside, on all ranks alike. See Checkpointer.rewind."""
        self.await_all()
        failure: Exception | None = None
        try:
            self.in_flight.settle()
        except FlowstoneError as error:
            failure = error
        self.count_alike("the saves before going back", failure)
        set_aside = partial(self.sole_writer.rewind, step)
        self._group.decide(f"going back to step {step}", lambda: self._turn.uninterrupted(set_aside))
        self.in_flight.newest = step

    def count_alike(self, phase: str, error: Exception | None) -> None:
        """Make all ranks count the tries of each step alike. Raises `error`, or RankError for another rank's error."""
        self._coordinator.count_alike(phase, error)

    def end(self, *, wait: bool = True) -> None:
        """Make no more saves. Steps stop waiting."""
        self.fencing.end(lift=wait)
        self._threads.end(wait=wait)
        if "collapsing" in vars(self):
            self.collapsing.end() if wait else self.collapsing.pause()
        self._store_writer.end()
        if wait:
            let_streams_go()
