"""The saves with `every_step`: each is full, or a frame (one step's record) in a journal (LowDiff, arXiv 2509.04084).

    save --StepRecorder.take_steps--> optimizer steps --describe--> other changes --Journaling.add--> durable, later

A save is full if there is no earlier step to continue from, if the changes since that step cannot be replayed, or if a
load (reading the checkpoint and replaying the journal) would take longer than `recovery_s`. In the last case the step
also goes into the journal, so that it is durable before the checkpoint is.

All ranks make the same choice for each step without communication, from the outcomes of earlier steps, which all ranks
know (journal_ranks.py). If one rank cannot replay a step, the step is not journaled, and the next save is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from flowstone.commit.entries import step_directory
from flowstone.commit.read import encode_sections
from flowstone.config import (
    JOURNAL_FREE_FRAMES_MIN,
    JOURNAL_RATE_BYTES_PER_S,
    JOURNAL_UNSAVED_BYTES_MIN,
    JOURNAL_WINDOWS,
)
from flowstone.errors import ArgumentError, FlowstoneError, ReplayError, StepExistsError
from flowstone.extensions import extension, find_extension
from flowstone.journal import journals
from flowstone.journal.fingerprints import window_of
from flowstone.journal.journal_baseline import JournalBaseline, baseline_of, metadata_of
from flowstone.journal.journal_events import NotJournaled
from flowstone.journal.journal_frames import StepContent
from flowstone.journal.journal_ranks import FullSavePolicy, JournalRanks
from flowstone.journal.journal_records import JournalMetadata, Lineage, Step, StepAttempt, StepHooks
from flowstone.journal.journal_state import Broken, Empty, JournalState, Open, without_baseline
from flowstone.journal.journaling import Journaling
from flowstone.journal.optimizer_rows import optimizer_rows
from flowstone.journal.optimizer_steps import StepRecorder
from flowstone.ranks import Decision, error_for_others
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.exit_hook import without_frames
from flowstone.save.in_flight import InFlight
from flowstone.save.pacing import Captures
from flowstone.save.plan_cache import FenceMode
from flowstone.save.saves import Saves
from flowstone.session.futures import FutureHooks, ReportedFuture, Save, end_with
from flowstone.session.load_outcome import LoadReport
from flowstone.session.shared import SaveOptions, Shared
from flowstone.stage.device import copy_current_streams
from flowstone.state import StateDescription, describe
from flowstone.table.pieces import Layout
from flowstone.torch.compressed import find_gradient_sources
from flowstone.torch.stepped_tensors import find_replayable_optimizers
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.events.rare_events import Prepared


class JournalSetup:
    """Sets up the journal of a Checkpointer with `every_step`, and makes the object that performs its saves."""

    def __init__(self, shared: Shared, options: SaveOptions, captures: Captures) -> None:
        if not shared.store.capabilities.appends:
            raise ArgumentError(
                f"every_step needs files that can grow, which {shared.store.location} does not have",
                next="save to a directory, or leave every_step out",
            )
        self.shared, self.options = shared, options
        link = find_extension("replica") if options.every_step is True else extension("replica")
        self.replica = None if link is None else link(shared, options.every_step)
        self.ranks = JournalRanks(shared, self.replica) if shared.group.size > 1 else None
        self.journaling = Journaling(shared, self.ranks, options.lag_steps, captures)
        self.await_durable = self.journaling.await_durable

    def make_saves(self, saves: Saves) -> EveryStep:
        """`saves`: makes the full saves."""
        return EveryStep(self, saves)


class EveryStep:
    """The saves of a Checkpointer with `every_step`. `saves` makes the full ones."""

    def __init__(self, setup: JournalSetup, saves: Saves) -> None:
        shared, options = setup.shared, setup.options
        self._store, self._group, self._emit = shared.store, shared.group, shared.emit
        self._verb_lock, self._outcome, self._frozen = shared.verb_lock, shared.outcome, shared.frozen
        self._saves, self._recovery_s, self._options = saves, options.recovery_s, shared.options
        self.in_flight, self.captures, self.sole_writer = saves.in_flight, saves.captures, saves.sole_writer
        self._lag_steps = options.lag_steps
        self._replica, self._ranks, self._journaling = setup.replica, setup.ranks, setup.journaling
        self._policy = FullSavePolicy()
        self._recorder = StepRecorder(self._before_step)
        self._records = InFlight(  # steps that are being written to the journal
            shared.store, lambda: None, on_error=options.on_error, max_unsaved_steps=options.max_unsaved_steps
        )
        self._state: JournalState = Empty()
        self._has_journal = False  # whether the next step goes into the last step's journal; equal on all ranks
        self._origin: Save | Checkpoint | None = None  # the full save, or loaded checkpoint, before the journals
        self._newest_full: Save | None = None
        self._steps = 0  # number of journaled steps; equal on all ranks
        self._frozen.always_sample()
        self.read_rate = 0.0  # bytes per second of the last load; 0: there was none

    # Saves

    def save(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> Save:
        """Save a step: in the journal, as a full checkpoint, or both. Returns immediately.

        A single rank decides by the changes of its state. Several ranks decide before they read their states, by the
        outcomes of earlier steps, so that all decide the same. A rank that then cannot journal the step reports that to
        the others.
        """
        attempt = self._begin_attempt(step, state, fence, spans)
        try:
            self._check_new_step(step)
            with self._saves.fencing.state_lock:
                content = self._content(attempt)
                if attempt.must_save_full(content):
                    return self._save_full(attempt, content)
                save = self._append(attempt, content)
                if attempt.is_full or (not attempt.is_agreed and self._is_late() and self._is_free()):
                    return self._begin_full(attempt)
                return save
        except BaseException as error:
            self._note_failure(attempt, error)
            raise

    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Prepare staging memory for full saves of `state`."""
        return self._saves.prepare(state)

    def _begin_attempt(self, step: int, state: Mapping[str, object], fence: FenceMode, spans: Spans) -> StepAttempt:
        """Start one call of `save`. If there are several ranks, this method decides, by earlier outcomes, whether the
        step is journaled or saved in full.
        """
        began = monotonic()
        if self._ranks is None:
            return StepAttempt(step, state, fence, spans, began, not self._has_journal)
        self._ranks.announce_step(step)
        ended = self._journaling.take_outcomes(of_all=not self._has_journal)
        if ended is not None:
            self._policy.note(failed=ended.failed)
            if ended.failed:
                self._drop_baseline()
        is_journaled = not self._policy.next_is_full()
        is_full = not is_journaled or (ended is not None and ended.is_due)
        begins, self._has_journal = is_journaled and not self._has_journal, not is_full
        return StepAttempt(
            step, state, fence, spans, began, begins, is_agreed=True, is_journaled=is_journaled, is_full=is_full,
            owes_full=is_full,
        )

    def _check_new_step(self, step: int) -> None:
        """Raise errors of earlier saves, and an error if `step` is not a new step."""
        self._outcome.check_whole()
        if not self._has_journal:  # a new journal begins, so all steps in the old one must have ended
            self._journaling.await_durable()
        leave = self._lag_steps
        if isinstance(self._origin, Save) and not self._origin.committed.done():
            if self.in_flight.newest is None:
                leave = 1 << 30  # in a new run no step is durable yet, so no step waits for the first save
            else:
                # else a crash could lose that earlier step, too, and training would resume from a still older one
                self.in_flight.await_saves()
        self._records.await_saves(leave, below=self._journaling.oldest)
        # the journal continues a checkpoint that was not saved
        if isinstance(self._origin, Save) and self._origin.committed.failed():
            self._origin = None
            self._drop_baseline()
        self._check_new(step)

    def _append(self, attempt: StepAttempt, content: StepContent | str) -> Save:
        """Append the step to the journal. If `content` is a str, it is the reason why this rank (of several) has no
        content; the rank reports it.
        """
        self._saves.sole_writer.check()
        if isinstance(content, StepContent):
            self._advance(attempt, content)
        else:
            self._drop_baseline()
        hooks = FutureHooks(on_check=partial(self._verb_lock.check_thread, "result"))
        committed: ReportedFuture[Checkpoint] = ReportedFuture(hooks)
        save = Save(attempt.step, committed=committed)
        self._hand_over(attempt, content or _NO_BASELINE, save)
        if self._replica is not None:
            self._replica.start_alone()
        return save

    def _advance(self, attempt: StepAttempt, content: StepContent) -> None:
        """Advance the journal's state to this step. Begins a journal if there is none."""
        state = self._state
        assert isinstance(state, Open), "a step has content only where there is a baseline"
        journal = state.lineage.journal
        if attempt.begins_journal:
            needed_bytes = sum(record.gradient_bytes for record in content.records) * self._group.size
            self._saves.sole_writer.await_room(JOURNAL_FREE_FRAMES_MIN * needed_bytes)
            journal = self._journaling.begin(state.lineage, self._metadata(attempt.state, state.baseline))
            attempt.mark_journal_begun()
        self._has_journal = not attempt.is_full
        self._state = state.advanced(attempt.step, content.records, journal)

    def _hand_over(self, attempt: StepAttempt, content: StepContent | str | Exception, save: Save | None) -> None:
        """Pass a step to the journal's thread. `save`: None if this rank has failed to make the step."""
        if attempt.begins_journal and not attempt.has_begun_journal:
            self._journaling.begin_without(_NO_BASELINE)
        on_end: Callable[[BaseException | None], None]
        on_end = _nothing if save is None else partial(self._end_step, save, self._origin)
        if self._replica is not None and isinstance(self._state, Open):
            on_end = self._replica.with_notification(attempt.step, self._state.lineage.journal, on_end)

        def on_submitted() -> None:
            attempt.mark_handed_over()
            self._steps += 1
            if save is not None:
                self._records.add(save)

        hooks = StepHooks(on_submitted, on_end)
        self._journaling.add(
            Step(attempt.step, content, attempt.began, save, hooks, self._is_late(), self._is_free())
        )

    def _is_late(self) -> bool:
        """Whether a load would take longer than `recovery_s`."""
        return self._recovery_estimate_s() > self._recovery_s

    def _is_free(self) -> bool:
        """Whether no full save is under way."""
        return self._newest_full is None or self._newest_full.committed.done()

    def _save_full(self, attempt: StepAttempt, content: StepContent | str) -> Save:
        """Save in full, as the step cannot be journaled. `content`: the reason, if it is a str; "" if there is none."""
        attempt.leave_errors_to_saves()
        reason = content if isinstance(content, str) else ""
        if isinstance(self._state, Broken):
            reason = reason or self._state.reason
        if reason:
            self._emit(NotJournaled(attempt.step, reason))
        # When this returns, at most `lag_steps` steps, including this one, are not durable, on all ranks.
        self.in_flight.await_saves(0 if attempt.is_agreed else self._lag_steps - 1)
        self._journaling.clear_broken()
        self._drop_baseline()
        return self._begin_full(attempt)

    def _begin_full(self, attempt: StepAttempt) -> Save:
        """Start a full save. Later steps go into a new journal."""
        attempt.leave_errors_to_saves()
        if attempt.begins_journal and attempt.is_handed_over:  # else retention could remove the journal's new directory
            self._journaling.await_durable()
        parent = self._state.lineage.journal if isinstance(self._state, Open) else None
        save = self._saves.save(attempt.step, attempt.state, attempt.fence, attempt.spans)
        self._journaling.note_full_save()
        self._newest_full, self._has_journal = save, False
        if not isinstance(self._state, Open):
            self._state, self._origin = Empty(), save
        self._open(attempt.state, Lineage(attempt.step, self._saves.newest_draft, parent))
        return save

    def _note_failure(self, attempt: StepAttempt, error: BaseException) -> None:
        """After an error: drop recorded optimizer steps, and report to other ranks, so that they do not wait."""
        if not attempt.is_agreed:
            if attempt.has_taken:
                self._state = Broken("the previous save failed; its gradients were dropped")
            return
        self._drop_baseline()
        failure = error_for_others("save", error)
        if attempt.is_journaled and not attempt.is_handed_over:
            self._hand_over(attempt, failure, None)
        if attempt.owes_full:
            self._saves.notify_skip(attempt.step, failure)

    def _drop_baseline(self, reason: str = "") -> None:
        self._state = without_baseline(self._state, reason)

    def _end_step(self, save: Save, origin: Save | Checkpoint | None, error: BaseException | None) -> None:
        """Complete a journaled save, on the journal's thread: its frame is durable or has failed. `origin`, the full
        save before the journal, must be durable, too.
        """
        if error is not None:
            if isinstance(error, ReplayError):  # reported by an event; training continues
                save.committed.mark_reported()
            save.committed.set_exception(without_frames(error))
        elif isinstance(origin, Save):
            origin.committed.add_done_callback(lambda _: end_with(save, origin))
        else:
            assert origin is not None, "a lineage begins with a save or a load"
            save.committed.set_result(origin.with_journal(save.step))

    def _check_new(self, step: int) -> None:
        self.in_flight.check_new(step)
        newest = self._state.lineage.step if isinstance(self._state, Open) else self._records.newest
        if newest is not None and step <= newest and self._outcome.superseded_above is None:
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}", found=f"step {newest}, in its journal",
                next=f"save a later step, or call rewind({step - 1 if step else 0}) first to set newer steps aside",
            )

    # The content of a step

    def _describe(self, state: Mapping[str, object]) -> StateDescription:
        layout = self._state.baseline.layout if isinstance(self._state, Open) else None
        group = self._group
        return describe(state, rank=group.rank, known=layout, whole=group.alone or group.size == 1, frozen=self._frozen)

    def _content(self, attempt: StepAttempt) -> StepContent | str:
        """Returns the changes since the last step, for the journal. If they cannot be journaled, returns the reason
        instead; or "" if there is no last step, or all ranks have decided before to save this step only in full.
        """
        attempt.mark_taken()
        records, reason = self._recorder.take_steps()
        if not attempt.is_journaled:
            return ""
        if not isinstance(self._state, Open):
            return reason or (self._state.reason if isinstance(self._state, Broken) else "")
        baseline = self._state.baseline
        reason = reason or baseline.other_sources(attempt.state)
        described = self._describe(attempt.state)
        reason = self._obstacle(reason, described, self._state)
        if reason:
            return reason
        values, reason = baseline.changed_values(described)
        if reason:
            return reason
        replicated, per_rank = encode_sections(described.objects), encode_sections(described.per_rank)
        number, places, proven = self._steps % JOURNAL_WINDOWS, described.places, baseline.proven
        window = window_of(
            number, JOURNAL_WINDOWS, places, proven, described.pieces.lengths()[proven],
            [places.owners[row] for row in proven.tolist()], by_chunks=baseline.exactness == "proven",
        )
        return StepContent(
            attempt.step, records, baseline.note_options(records), values, baseline.changed_sections(replicated),
            baseline.changed_sections(per_rank), window, baseline.frozen_names,
            baseline.changed_device_values(described), copy_current_streams(places.devices),
        )

    def _obstacle(self, reason: str, described: StateDescription, state: Open) -> str:
        """Why the step cannot be journaled; "" if it can. If the caller has found a `reason` already, it is the result;
        if not (""), the result is the first reason that is found here, such as changed tensors or optimizers.
        """
        baseline = state.baseline
        optimizers, cannot = find_replayable_optimizers(described.optimizers, described.unguarded)
        reason = reason or cannot or (self._journaling.broken if self._ranks is None else "")
        reason = reason or self._journaling.find_removed(state.lineage, self._newest_full, self._origin)
        if not reason and described.layout is not baseline.layout and described.layout != baseline.layout:
            reason = "the tensors of the state have changed"
        sources, room_bytes = tuple(baseline.sources.values()), _room_bytes(baseline.layout)
        if not reason and not self._recorder.watch(optimizers, sources, room_bytes=room_bytes):
            reason = "the optimizers of the state have changed"
        if name := self._journaling.take_changed_name():
            self._frozen.mark_changed(name)
            reason = reason or f"'{name}' has changed, but no optimizer updates it"
        return reason

    def _open(self, state: Mapping[str, object], lineage: Lineage, *, replay_s: float = 0.0) -> None:
        """Let the next journal build on `state`, which was just saved in full, or loaded."""
        described = self._describe(state)
        optimizers, reason = find_replayable_optimizers(described.optimizers, described.unguarded)
        if reason:
            self._state = Broken(reason)
            return
        sources = find_gradient_sources(state)
        self._recorder.watch(optimizers, tuple(sources.values()), room_bytes=_room_bytes(described.layout))
        self._recorder.reset()
        baseline, reason = baseline_of(described, optimizers, sources, {*self._frozen.names})
        self._state = Broken(reason) if baseline is None else Open(lineage, baseline, replay_s)

    def _metadata(self, state: Mapping[str, object], baseline: JournalBaseline) -> JournalMetadata:
        described = self._describe(state)
        optimizers, _ = find_replayable_optimizers(described.optimizers, ())
        rows, _ = optimizer_rows(state, optimizers, self._group.rank)
        rank = self._group.rank if self._ranks else None
        return metadata_of(baseline, optimizers, rows, described.places.devices, rank)

    def _recovery_estimate_s(self) -> float:
        """Estimate the time of a load: reading the checkpoint, then reading and replaying the journal in parallel."""
        if not isinstance(self._state, Open):
            return 0.0
        rate = self.read_rate or JOURNAL_RATE_BYTES_PER_S
        if self._journaling.seconds and not self.read_rate:
            rate = max(rate, self._journaling.bytes / self._journaling.seconds)
        base_bytes = int(self._state.baseline.layout.pieces.lengths().sum())
        return (base_bytes + self._state.replay_bytes) / rate + self._state.replay_s

    # Waiting for captures, loads, and the end

    def _before_step(self) -> None:
        """Called before an optimizer's step: waits for the fingerprints of the memory that the step changes."""
        self._journaling.fingerprinted.wait()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Context of a load. Optimizer steps in it are replays, and are not recorded."""
        self._journaling.forget_frozen()
        self._journaling.take_outcomes(of_all=True)
        self._origin = None
        self._drop_baseline()
        self._policy.reset(1)
        self._recorder.mute(on=True)
        try:
            yield
        finally:
            self._recorder.mute(on=False)

    def _note_load(self, state: Mapping[str, object], report: LoadReport) -> None:
        """Let the journal continue from the loaded state, if the state was loaded completely and is that of the newest
        step.
        """
        replay, self._has_journal = report.replay, False
        if self._outcome.superseded_above is not None or (replay is not None and replay.reason):
            return
        base = report.step if replay is None else replay.base
        checkpoint = Checkpoint(self._store, step_directory(base), self._options)
        described = self._describe(state)
        stored, own = {*checkpoint.index.tensors.names}, {*described.pieces.names}
        sections = {*checkpoint.objects, *checkpoint.contents.per_rank}
        # with several ranks, the checkpoint may have more tensors, which other ranks load
        is_all = stored == own if self._ranks is None else own <= stored and not report.skipped
        if not is_all or sections != {*state}:
            return
        chain = journals.newest_chain(self._store)
        if report.step != (journals.newest_step(self._store) if chain is None else chain.newest):
            return  # after a newer checkpoint, readers would not look for a journal that begins at an older step
        parent = None if chain is None else chain.parts[-1].journal.header.id
        self._origin = checkpoint
        replay_s = 0.0 if replay is None else replay.seconds  # includes the time of reading the journal
        reading_s = report.seconds - replay_s
        self.read_rate = report.bytes / reading_s if reading_s > 0 else 0.0
        lineage = Lineage(report.step, checkpoint.manifest.id if parent is None else None, parent)
        self._open(state, lineage, replay_s=replay_s)

    def around_load(self, state: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which may replay steps. The journal continues from the loaded state."""
        with self._loading():
            report = load()
        if self._ranks is None:
            self._note_load(state, report)
        else:
            self._note_load_together(state, report)
        return report

    def _note_load_together(self, state: Mapping[str, object], report: LoadReport) -> None:
        """With several ranks: let the journal continue from the loaded state, if all ranks can continue from it."""
        failure: Exception | None = None
        try:
            self._note_load(state, report)
        except Exception as error:
            failure = error

        def decide(answers: Sequence[bytes]) -> Decision:
            return Decision(b"" if b"" in answers else b"all")

        mine = failure or (b"can" if isinstance(self._state, Open) else b"")
        agreed = self._group.agreement.agree(f"whether a journal continues from step {report.step}", mine, decide)
        if agreed.common:
            self._policy.reset(0)
        else:
            self._drop_baseline()

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside. The next save is full."""
        self.await_all()
        failure: FlowstoneError | None = None
        try:
            self._records.await_saves()
        except FlowstoneError as error:
            if self._ranks is None:
                raise
            failure = error  # the other ranks must not wait for this one
        self._saves.rewind(step)
        self._journaling.take_outcomes(of_all=True)
        self._policy.reset(1)
        self._has_journal = False
        self._drop_baseline()
        self._records.note_newest(step)
        if failure is not None:
            raise failure

    def pass_fence(self) -> None:
        """Wait until the state may change."""
        self._saves.pass_fence()
        self._before_step()

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and the other ranks know which of them failed on this rank."""
        self._saves.await_all()
        self._records.await_all()

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended, with or without an error."""
        self._saves.await_ends()
        self._records.await_all()

    def await_saves(self) -> None:
        """Wait until every save so far is durable. Raises the first failure that was not raised before."""
        self._saves.await_saves()
        self._records.await_saves()

    def end(self, *, wait: bool = True) -> None:
        """Stop recording steps, and end the threads."""
        self._recorder.end()
        self._journaling.end(wait=wait)
        if self._replica is not None:
            self._replica.end()
        self._saves.end(wait=wait)


_NO_BASELINE = "there is no earlier step that a journal could continue from"


def _nothing(_: object) -> None: ...


def _room_bytes(layout: Layout) -> int:
    """The memory limit, in bytes, for gradients between two saves. It is the size of the state: with more gradients
    than that, a full save writes less than the journal.
    """
    return max(JOURNAL_UNSAVED_BYTES_MIN, int(layout.pieces.lengths().sum()))
