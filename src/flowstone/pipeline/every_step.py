"""A durable checkpoint of every step: which saves are whole, and which go into the journal (LowDiff, arXiv 2509.04084).

    save --StepRecorder.take--> acts --describe--> what else has changed --Journaling.add--> durable, in the background

A save is whole if there is nothing to go on from yet, if what has happened since the step before cannot be replayed, or
if reading the checkpoint and replaying the journal would take longer than `recovery_s`. In the last case the step goes
into the journal as well, so that it is durable before the checkpoint is.

Several ranks do the same with each step, without asking each other: what they do follows from how the steps before
have ended, which all of them know (journal_ranks.py). A step that one of them cannot replay is given up, and the next
is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic

from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.entries import step_directory
from flowstone.commit.read import encode_sections
from flowstone.config import JOURNAL_RATE_BYTES_PER_S, JOURNAL_ROOM_FRAMES, JOURNAL_UNSAVED_BYTES_MIN, JOURNAL_WINDOWS
from flowstone.errors import ArgumentError, FlowstoneError, ReplayError, StepExistsError
from flowstone.events import Prepared
from flowstone.journal_events import NotJournaled
from flowstone.pipeline.futures import Save, end_with
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.journal_ranks import JournalRanks, WholeSaves
from flowstone.pipeline.journal_records import Kept, Lineage, Step
from flowstone.pipeline.journaling import Journaling
from flowstone.pipeline.known_state import Known, kept_of, known_of
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.plan_cache import FenceMode
from flowstone.pipeline.replica_link import link_of
from flowstone.pipeline.save import Saves
from flowstone.pipeline.shared import SaveOptions, Shared
from flowstone.ranks import Decision, error_for_others
from flowstone.runtime.ending import without_frames
from flowstone.stage.device import as_on_this_thread
from flowstone.stage.fingerprints import window_of
from flowstone.stage.journal_frames import StepContent
from flowstone.stage.optimizer_steps import Act, StepRecorder
from flowstone.state import Described, describe
from flowstone.state.compressed import sources_of
from flowstone.state.stepped import optimizer_rows, replayable
from flowstone.table.pieces import Layout
from flowstone.trace import Spans


class EveryStep:
    """The saves of a Checkpointer with `every_step`; `how`: a Replica, for one that follows."""

    def __init__(self, shared: Shared, saves: Saves, options: SaveOptions, recovery_s: float, how: object) -> None:
        if not shared.store.capabilities.appends:
            raise ArgumentError(
                f"every_step: files in {shared.store.location} cannot grow", next="use a directory, or leave it out"
            )
        self._store, self._group, self._emit = shared.store, shared.group, shared.emit
        self._turn, self._outcome, self._frozen = shared.turn, shared.outcome, shared.frozen
        self._saves, self._recovery_s, self._options = saves, recovery_s, shared.options
        self.in_flight, self.captures, self.sole_writer = saves.in_flight, saves.captures, saves.sole_writer
        self._lag_steps = options.lag_steps
        self._ranks = JournalRanks(shared) if shared.group.size > 1 else None
        self._wholes = WholeSaves()
        self._journaling = Journaling(shared, self._ranks, options.lag_steps, saves.captures)
        saves.before_journals_go(self._journaling.await_durable)  # frames may still be on their way into those
        saves.before_files_go(self._journaling.await_durable)  # the sync of a frame would wait for what is freed
        self._recorder = StepRecorder(self._before_step)
        self._records = InFlight(  # of the journal
            shared.store, lambda: None, on_error=options.on_error, max_unsaved_steps=options.max_unsaved_steps
        )
        self._lineage: Lineage | None = None  # of the state at the last save, or load
        self._known: Known | None = None
        self._is_open = False  # a journal has begun at, or before, the lineage
        self._loaded: Checkpoint | None = None  # the one with which the last load began
        self._root: Save | None = None  # the whole save that the lineage begins with; None: `_loaded`
        self._whole: Save | None = None  # the last one
        self._replay_s, self._replay_bytes = 0.0, 0  # of the steps since then, or behind the checkpoint that was loaded
        self._steps = 0  # that went into journals; equal on all ranks
        self._is_handed_over = False  # the step of the save that is under way, to the journal's thread
        self._lost = ""  # why nothing leads from the last save to the next
        self._frozen.compare_always()
        self._replica = link_of(shared, how, self._ranks)
        self.read_rate = 0.0  # bytes per second of the last load; 0: there was none

    # Saves

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save a step, in the journal or whole. Returns at once."""
        began = monotonic()
        if self._ranks is not None:
            self._ranks.comes_to(step)
            return self._save_together(step, state, fence, spans, began)
        self._settle_before(step)
        with self._saves.fencing.state_lock, self._whole_after_errors():
            acts, why = self._recorder.take()
            described = None if self._lineage is None else self._describe(state)
            content = None
            if described is not None:
                content, why = self._content(step, acts, why or self._other_sources(state), described)
            if content is None:
                return self._save_whole(step, state, fence, spans, why)
            begins = not self._is_open
            save = self._journal(step, content, state, began, begins=begins)
            if self._replica is not None:
                self._replica.start()
            if self._is_late() and self._is_free():
                if begins:  # that checkpoint's retention could remove the journal's directory while it is being made
                    self._journaling.await_durable()
                return self._begin_whole(step, state, fence, spans)
            return save

    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Make staging memory ready for whole saves of `state`."""
        return self._saves.prepare(state)

    @contextmanager
    def _whole_after_errors(self) -> Iterator[None]:
        """What has been taken is lost if anything is raised inside: the next save is whole."""
        try:
            yield
        except BaseException:
            self._lineage = self._known = None
            self._lost = "the save before it was not made, and what led to it is not kept"
            raise

    def _settle_before(self, step: int) -> None:
        """Raise what has gone wrong before, and if `step` cannot be new."""
        self._outcome.check_whole()
        if not self._is_open:  # a journal begins now: not at a step that fails to get into the one before
            self._journaling.await_durable()
        leave = self._lag_steps
        if self._root is not None and not self._root.committed.done():
            if self.in_flight.newest is None:
                leave = 1 << 30  # of a new run no step is durable, and none waits for it
            else:
                self.in_flight.settle()  # a crash would lose it, too, and come back with a step that is older
        self._records.settle(leave, below=self._journaling.oldest if self._ranks is not None else None)
        self._note_whole()
        self._check_new(step)

    def _save_together(
        self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans, began: float
    ) -> Save:
        """Save as all ranks do. What this rank does not come to do, the others are told of."""
        ended = self._journaling.take_ended(of_all=not self._is_open)
        if ended is not None:
            self._wholes.note(failed=ended.failed)
        if ended is not None and ended.failed:
            self._lineage = self._known = None
        is_journaled = not self._wholes.take()
        is_whole = not is_journaled or (ended is not None and ended.is_due)
        begins, self._is_open = is_journaled and not self._is_open, not is_whole
        owes_whole, self._is_handed_over = is_whole, False
        try:
            self._settle_before(step)
            with self._saves.fencing.state_lock:
                acts, why = self._recorder.take()
                if is_journaled:
                    content, why = self._content_or_why(step, acts, why, state)
                    self._saves.sole_writer.check()
                    save = self._journal(step, content or why, state, began, begins=begins)
                    if content is None:
                        self._lineage = self._known = None
                    if not is_whole:
                        return save
                owes_whole = False
                if is_journaled:
                    if begins:
                        self._journaling.await_durable()  # as in `save`
                    return self._begin_whole(step, state, fence, spans)
                return self._save_whole(step, state, fence, spans, "")
        except BaseException as error:
            self._lineage = self._known = None
            told = error_for_others("save", error)
            if is_journaled and not self._is_handed_over:
                self._add(step, told, began, None, begins=begins)
            if owes_whole:
                self._saves.tell_absence(step, told)
            raise

    def _content_or_why(
        self, step: int, acts: list[Act], why: str, state: Mapping[str, object]
    ) -> tuple[StepContent | None, str]:
        if self._lineage is None:
            return None, why or self._lost or "there is nothing to go on from"
        return self._content(step, acts, why or self._other_sources(state), self._describe(state))

    def _journal(
        self, step: int, content: StepContent | str, state: Mapping[str, object], began: float, *, begins: bool
    ) -> Save:
        """Append the step; with several ranks, `content` may say why this one cannot."""
        lineage, known = self._lineage, self._known
        if self._ranks is None:
            self._saves.sole_writer.check()
        if isinstance(content, StepContent):
            assert lineage is not None, "a step has content only where there is something to go on from"
            assert known is not None, "as above"
            if begins:
                room_bytes = sum(act.gradient_bytes for act in content.acts) * self._group.size
                self._saves.sole_writer.await_room(JOURNAL_ROOM_FRAMES * room_bytes)
                identity = self._journaling.begin(lineage, self._kept(state, known))
                lineage, begins = Lineage(lineage.step, lineage.checkpoint, identity), False
            self._is_open = True if self._ranks is None else self._is_open
            self._replay_s += sum(act.seconds for act in content.acts)
            self._replay_bytes += sum(act.gradient_bytes for act in content.acts)
            self._lineage = Lineage(step, None, lineage.journal)
        save = Save(step)
        save.committed.check = partial(self._turn.check_thread, "result")
        self._add(step, content, began, save, begins=begins)
        return save

    def _add(
        self, step: int, content: StepContent | str | Exception, began: float, save: Save | None, *, begins: bool
    ) -> None:
        """Hand a step to the journal's thread. `begins`: a journal does, of which this rank writes nothing."""
        if begins:
            self._journaling.begin_without("there is nothing to go on from")
        end: Callable[[BaseException | None], None]
        end = _nothing if save is None else partial(self._end_step, save, self._root)
        if self._replica is not None and self._lineage is not None:
            end = self._replica.noting(step, self._lineage.journal, end)

        def noted() -> None:  # called uninterrupted
            self._is_handed_over, self._steps = True, self._steps + 1
            if save is not None:
                self._records.add(save)

        self._journaling.add(Step(step, content, began, save, end, self._is_late(), self._is_free()), noted)

    def _is_late(self) -> bool:
        """Whether a load would take longer than it may."""
        return self._recovery_estimate_s() > self._recovery_s

    def _is_free(self) -> bool:
        return self._whole is None or self._whole.committed.done()

    def _save_whole(
        self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans, why: str
    ) -> Save:
        """A whole save that nothing leads to. `why`: what could not be replayed, "" if nothing came before."""
        if why := why or self._lost:
            self._emit(NotJournaled(step, why))
        # At most `lag_steps` steps, this one included, are not durable when this returns. All ranks wait alike.
        self.in_flight.settle(0 if self._ranks is not None else self._lag_steps - 1)
        self._journaling.leave_broken()
        self._lineage = self._known = None
        return self._begin_whole(step, state, fence, spans)

    def _begin_whole(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save `state` whole; the steps after it go into a journal of its own."""
        led_to = self._lineage
        save = self._saves.save(step, state, fence, spans)
        self._journaling.note_whole()
        self._lost = ""
        self._whole, self._is_open, self._replay_s, self._replay_bytes = save, False, 0.0, 0
        self._root = save if led_to is None else self._root
        self._know(state, Lineage(step, self._saves.newest_draft, None if led_to is None else led_to.journal))
        return save

    def _note_whole(self) -> None:
        """Learn how the last whole save ended. If it failed, steps go on from the journal that leads to it; where none
        does, nothing leads to what follows, and the next save is whole.
        """
        if self._root is not None and self._root.committed.failed():
            self._root = self._lineage = self._known = None

    def _end_step(self, save: Save, root: Save | None, error: BaseException | None) -> None:
        """On the journal's thread: the step is durable, or has failed. What it leads from has to be durable, too.

        root  the whole save that its journals begin with; None: a checkpoint that was loaded
        """
        if error is not None:
            save.committed.reported |= isinstance(error, ReplayError)  # an event tells of it; training goes on
            save.committed.set_exception(without_frames(error))
        elif root is None:
            assert self._loaded is not None, "a lineage begins with a save or a load"
            save.committed.set_result(self._loaded.with_journal(save.step))
        else:
            root.committed.add_done_callback(lambda _: end_with(save, root))

    def _check_new(self, step: int) -> None:
        self.in_flight.check_new(step)
        newest = self._records.newest if self._lineage is None else self._lineage.step
        if newest is not None and step <= newest and self._outcome.superseded_above is None:
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}", found=f"step {newest}, in its journal",
                next=f"save a later step, or call rewind({step - 1 if step else 0}) first to set newer steps aside",
            )

    # What a step is made of

    def _describe(self, state: Mapping[str, object]) -> Described:
        known = None if self._known is None else self._known.layout
        group = self._group
        return describe(state, rank=group.rank, known=known, whole=group.alone or group.size == 1, frozen=self._frozen)

    def _content(
        self, step: int, acts: list[Act], why: str, described: Described
    ) -> tuple[StepContent | None, str]:
        """What leads from the last step to this one; None, and why, if it cannot be told."""
        known = self._known
        assert known is not None, "a lineage is known with its state"
        optimizers, cannot = replayable(described.optimizers, described.unguarded)
        why = why or cannot or (self._journaling.broken if self._ranks is None else "")
        why = why or self._journaling.removed(self._lineage, (self._whole, self._root), self._loaded)
        if not why and described.layout is not known.layout and described.layout != known.layout:
            why = "the tensors of the state have changed"
        sources, room_bytes = tuple(known.sources.values()), _room_bytes(known.layout)
        if not why and not self._recorder.watch(optimizers, sources, room_bytes=room_bytes):
            why = "the optimizers of the state have changed"
        if name := self._journaling.take_changed():
            self._frozen.doubt(name)
            why = why or f"'{name}' has changed, which no optimizer steps"
        if why:
            return None, why
        values, why = known.changed_values(described)
        if why:
            return None, why
        replicated, per_rank = encode_sections(described.objects), encode_sections(described.per_rank)
        repeats = []
        for act in acts:
            repeats.append(known.options.get(act.optimizer) == act.options)
            known.options[act.optimizer] = act.options
        number, places, proven = self._steps % JOURNAL_WINDOWS, described.places, known.proven
        window = window_of(
            number, JOURNAL_WINDOWS, places, proven, described.pieces.lengths()[proven],
            [places.owners[at] for at in proven.tolist()], by_chunks=known.exactness == "proven",
        )
        return StepContent(
            step, acts, repeats, values, known.changed_sections(replicated), known.changed_sections(per_rank), window,
            known.still, known.changed_far_values(described), as_on_this_thread(places.devices),
        ), ""

    def _other_sources(self, state: Mapping[str, object]) -> str:
        assert self._known is not None, "a lineage is known with its state"
        return self._known.other_sources(state)

    def _know(self, state: Mapping[str, object], lineage: Lineage) -> None:
        """Note the state as it is: it is that of a checkpoint, or of a step that was replayed."""
        described = self._describe(state)
        optimizers, cannot = replayable(described.optimizers, described.unguarded)
        if cannot:
            self._lineage, self._known, self._lost = None, None, cannot
            return
        sources = sources_of(state)
        self._recorder.watch(optimizers, tuple(sources.values()), room_bytes=_room_bytes(described.layout))
        self._recorder.reset()
        self._known, self._lost = known_of(described, optimizers, sources, {*self._frozen.names})
        self._lineage = None if self._known is None else lineage

    def _kept(self, state: Mapping[str, object], known: Known) -> Kept:
        described = self._describe(state)
        optimizers, _ = replayable(described.optimizers, ())
        rows, _ = optimizer_rows(state, optimizers, self._group.rank)
        return kept_of(known, optimizers, rows, described.places.devices, self._group.rank if self._ranks else None)

    def _recovery_estimate_s(self) -> float:
        """How long a load would take now: read the checkpoint, then read and replay the journal, side by side."""
        rate = self.read_rate or JOURNAL_RATE_BYTES_PER_S
        if self._journaling.seconds and not self.read_rate:
            rate = max(rate, self._journaling.bytes / self._journaling.seconds)
        base_bytes = 0 if self._known is None else int(self._known.layout.pieces.lengths().sum())
        return (base_bytes + self._replay_bytes) / rate + self._replay_s

    # Fences, loads, ends

    def _before_step(self) -> None:
        """Called when an optimizer is about to step: what is being fingerprinted must not change."""
        self._journaling.fingerprinted.wait()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """While inside, a load changes the state, and may replay steps: none of that is noted."""
        self._journaling.forget()
        self._journaling.take_ended(of_all=True)
        self._lineage = self._known = self._root = None
        self._wholes.begin(1)
        self._recorder.mute(on=True)
        try:
            yield
        finally:
            self._recorder.mute(on=False)

    def _note_load(self, state: Mapping[str, object], report: LoadReport) -> None:
        """Steps go on from what was loaded, if it was all of a checkpoint, and the newest step."""
        replay, self._is_open = report.replay, False
        if self._outcome.superseded_above is not None or (replay is not None and replay.reason):
            return
        base = report.step if replay is None else replay.base
        checkpoint = Checkpoint(self._store, step_directory(base), self._options)
        described = self._describe(state)
        stored, own = {*checkpoint.index.tensors.names}, {*described.pieces.names}
        sections = {*checkpoint.objects, *checkpoint.contents.per_rank}
        is_all = stored == own if self._ranks is None else own <= stored and not report.skipped  # others have the rest
        if not is_all or sections != {*state}:
            return
        chain = journals.newest_chain(self._store)
        if report.step != (journals.newest_step(self._store) if chain is None else chain.newest):
            return  # no journal leads on from an older step: readers would not find it behind a newer checkpoint
        parent = None if chain is None else chain.parts[-1].journal.opening.id
        self._loaded = checkpoint
        self._replay_s, self._replay_bytes = 0.0 if replay is None else replay.seconds, 0  # reads are in these seconds
        reading_s = report.seconds - self._replay_s
        self.read_rate = report.bytes / reading_s if reading_s > 0 else 0.0
        self._know(state, Lineage(report.step, checkpoint.manifest.id if parent is None else None, parent))

    def around_load(self, state: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which changes the state and may replay steps. Later steps go on from there."""
        with self._loading():
            report = load()
        if self._ranks is None:
            self._note_load(state, report)
        else:
            self._note_load_together(state, report)
        return report

    def _note_load_together(self, state: Mapping[str, object], report: LoadReport) -> None:
        """Steps go on from what was loaded if they can on all ranks."""
        failure: Exception | None = None
        try:
            self._note_load(state, report)
        except Exception as error:
            failure = error

        def decide(said: Sequence[bytes]) -> Decision:
            return Decision(b"" if b"" in said else b"all")

        mine = failure or (b"" if self._lineage is None else b"can")
        agreed = self._group.agreement.agree(f"whether a journal goes on from step {report.step}", mine, decide)
        if agreed.common:
            self._wholes.begin(0)
        else:
            self._lineage = self._known = None

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside. The next save is whole."""
        self.await_all()
        failure: FlowstoneError | None = None
        try:
            self._records.settle()
        except FlowstoneError as error:
            if self._ranks is None:
                raise
            failure = error  # the other ranks do not wait for this one
        self._saves.rewind(step)
        self._journaling.take_ended(of_all=True)
        self._wholes.begin(1)
        self._is_open = False
        self._lineage = self._known = None
        self._records.newest = step
        if failure is not None:
            raise failure

    def pass_fence(self) -> None:
        """Wait until the state may change."""
        self._saves.pass_fence()
        self._before_step()

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and other ranks know which of them this rank did not make."""
        self._saves.await_all()
        self._records.await_all()

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended."""
        self._saves.await_ends()
        self._records.await_all()

    def settle(self) -> None:
        """Wait until every save so far is durable. Raises the first failure that was not raised yet."""
        self._saves.settle()
        self._records.settle()

    def end(self, *, wait: bool = True) -> None:
        """Steps are noted no more."""
        self._recorder.end()
        self._journaling.end(wait=wait)
        if self._replica is not None:
            self._replica.end()
        self._saves.end(wait=wait)


def _nothing(_: object) -> None: ...


def _room_bytes(layout: Layout) -> int:
    """For gradients between two saves. If they take more than the state, it takes less to save that whole."""
    return max(JOURNAL_UNSAVED_BYTES_MIN, int(layout.pieces.lengths().sum()))
