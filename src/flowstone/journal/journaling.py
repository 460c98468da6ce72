"""Writes journals: threads make steps durable. Each step is written as a frame, which is the record of one step
(docs/ORDERING.md, Journal).

On the caller's thread    `Journaling.add`: waits until the step that is `lag_steps` earlier is durable, passes the new
                          step to the threads below, and returns
On `flowstone-journal`    computes the fingerprint and the digests, writes and syncs, agrees with other ranks, and
                          completes `committed`. With `lag_steps` above 1, one sync makes all waiting steps durable
On `flowstone-fingerprint`  with `lag_steps` above 1, computes the fingerprints. Training waits for these before its
                          next step; on a separate thread, they need not wait for the store
"""

from __future__ import annotations

import errno
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import cast

import msgspec

from flowstone._version import __version__
from flowstone.commit.entries import journal_directory, journal_file, step_directory
from flowstone.commit.manifests import path_inside
from flowstone.config import JOURNAL_AHEAD_BYTES, JOURNAL_WINDOWS
from flowstone.errors import ReplayError, StateChangedError, StorageError
from flowstone.events.phases import SaveFailed
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.journal import journals
from flowstone.journal.fingerprints import FrozenDigests, fingerprint_of
from flowstone.journal.journal_events import Journaled, NotJournaled
from flowstone.journal.journal_format import HEADER, JournalHeader, encode_frame_head
from flowstone.journal.journal_frames import FrameMaker, StepContent
from flowstone.journal.journal_ranks import JournalRanks, SteppedParameters, StepReport
from flowstone.journal.journal_records import (
    JournalFile,
    JournalMetadata,
    JournalWriter,
    Lineage,
    PendingFrame,
    Step,
    StepOutcome,
    own_part,
)
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.signal_shield import Latch
from flowstone.runtime.threads import start_threads
from flowstone.save.pacing import Captures
from flowstone.session.futures import Save
from flowstone.session.shared import Shared
from flowstone.store.appendable import AppendableStore, AppendFile
from flowstone.store.base import Store, sync_names


class Journaling:
    """The journals of one Checkpointer.

    fingerprinted  a latch (an event that stays set) of the newest step: set once the step's fingerprint is computed
                   from host memory, which must not change until then. Memory of devices may change: a device computes
                   digests in its current stream, before later steps
    seconds        how long it took to write the last frames that one sync has made durable: from the start of the first
                   of them until all were durable
    bytes          length of these frames together
    """

    def __init__(self, shared: Shared, ranks: JournalRanks | None, lag_steps: int, captures: Captures) -> None:
        """
        ranks      the agreements of several ranks; None for a single rank
        lag_steps  how many steps may not be durable yet when `add` returns
        captures   the captures of saves. The gradients of steps that wait may use the part of the captures' memory
                   budget that the captures do not use
        """
        self._store, self._verb_lock = shared.store, shared.verb_lock
        self._emit, self._group = shared.emit, shared.group
        self._ranks, self._lag_steps, self._captures = ranks, lag_steps, captures
        self._thread: ThreadPoolExecutor | None = None
        # used if `lag_steps` is above 1: the journal's thread may then wait for the store, but fingerprints need not
        self._fingerprints: ThreadPoolExecutor | None = None
        self._file: JournalFile | None = None
        self._pending_frames: deque[PendingFrame] = deque()  # oldest first, until their outcome is taken
        self._waiting: deque[PendingFrame] = deque()  # frames for the journal's thread
        self._pending: Latch | None = None  # latch of the newest step
        self._is_lag_agreed = ranks is None  # ranks with different `lag_steps` would decide differently
        self.fingerprinted = Latch()
        self.fingerprinted.open()
        self.seconds, self.bytes = 0.0, 0
        self._frozen = FrozenDigests()  # replaced by a load
        self.broken = ""  # why nothing more can be appended; set by the thread

    def begin(self, lineage: Lineage, metadata: JournalMetadata) -> str:
        """Begin a new journal after the step of `lineage`; writes nothing yet. Returns the journal's id; several ranks
        use rank 0's id.
        """
        identity = secrets.token_hex(8)
        opening = JournalHeader(
            id=identity, number=0, after=lineage.step, checkpoint=lineage.checkpoint, parent=lineage.journal,
            rank=self._group.rank, ranks=self._group.size, exactness=metadata.exactness,
            torch=metadata.environment.torch, processor=metadata.environment.processor,
            threads=metadata.environment.threads,
            writer=f"flowstone {__version__}", created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizers=metadata.optimizers, proven=metadata.proven, windows=JOURNAL_WINDOWS, sources=metadata.sources,
            lag_steps=msgspec.UNSET if self._lag_steps == 1 else self._lag_steps,
        )
        self._begin(JournalFile(opening, metadata.stepped))
        return identity

    def begin_without(self, why: str) -> None:
        """Begin a journal of several ranks in which this rank cannot take part. `why`: the reason."""
        self._begin(JournalFile(why))

    def _begin(self, file: JournalFile) -> None:
        self.await_durable()
        self._end_file()
        self._file, self.broken = file, ""

    def _end_file(self) -> None:
        """Let the journal's thread close the file after the steps that still wait for it."""
        file, self._file = self._file, None
        if file is None or self._thread is None:
            return
        try:
            self._thread.submit(_close, file)
        except RuntimeError:  # the process ends: Python waits for executors' threads, then calls exit handlers
            _close(file)

    def await_durable(self) -> None:
        """Wait until every step so far is durable, or has failed. Can be called on any thread."""
        if self._pending is not None:
            self._pending.wait()

    def clear_broken(self) -> None:
        """Wait as `await_durable` does, then forget a failure. Called before a full save, as later steps go into a new
        journal.
        """
        self.await_durable()
        self.broken = ""

    def find_removed(self, lineage: Lineage, newest_full: Save | None, origin: Save | Checkpoint | None) -> str:
        """A text that names a removed journal or checkpoint that the next step would continue from; "" if all exist.

        newest_full, origin  the newest full save, and the checkpoint at the start of the lineage; not checked during a
                             full save, which may remove files that it replaces
        raises  StorageError  the store does not answer
        """
        writer = None if self._file is None else self._file.writer
        if lineage.checkpoint is None and writer is not None and not writer.appending.still_has_name():
            return f"{journal_directory(writer.opening.after, writer.opening.id)} was removed"
        saves = [save for save in (newest_full, origin) if isinstance(save, Save)]
        if self._group.rank or not all(save.committed.done() for save in saves):  # one rank that checks is enough
            return ""
        steps = [save.step for save in saves if not save.committed.failed()]
        base = max([*steps, *([origin.step] if isinstance(origin, Checkpoint) else [])], default=None)
        if base is None or self._store.exists(path_inside(step_directory(base), MANIFEST_NAME)):
            return ""
        return f"{step_directory(base)}, which the journal continues from, was removed"

    def take_outcomes(self, *, of_all: bool) -> StepOutcome | None:
        """The outcome of the steps of several ranks that ended since the last call; None if there are none.

        Waits for all steps but the last `lag_steps` - 1, or for every step (`of_all`). All ranks ask at the same steps,
        so they get the same answer. If a step has failed, all steps after it have failed, too.
        """
        leave = 0 if of_all or not self._is_lag_agreed else self._lag_steps - 1
        outcomes = self._take_ended(leave)
        if any(outcome.failed for outcome in outcomes):
            outcomes += self._take_ended(0)
        if not outcomes:
            return None
        failed = any(outcome.failed for outcome in outcomes)
        self._is_lag_agreed = self._is_lag_agreed or not failed
        return StepOutcome(failed, not failed and any(outcome.is_due for outcome in outcomes))

    def _take_ended(self, leave: int) -> list[StepOutcome]:
        count = max(len(self._pending_frames) - leave, 0)
        if count:
            self._pending_frames[count - 1].over.wait()
        taken = [self._pending_frames.popleft() for _ in range(count)]
        ended = [(frame.ended, frame.may_be_due) for frame in taken if frame.ended is not None]
        return [StepOutcome(outcome.failed, outcome.is_due and may_be_due) for outcome, may_be_due in ended]

    @property
    def oldest(self) -> int | None:
        """With several ranks, the first step whose outcome was not taken yet; None for a single rank."""
        return self._pending_frames[0].step.step if self._pending_frames and self._ranks is not None else None

    def note_full_save(self) -> None:
        """Note that a full save begins, so that steps that are still being journaled do not request another one."""
        for frame in self._pending_frames:
            frame.drop_full_request()

    def add(self, step: Step) -> None:
        """Append a step. First waits until fewer than `lag_steps` earlier steps are pending (neither durable nor
        failed), and there is memory for the step's gradients. Then passes the step to the journal's thread, and calls
        the step's callback `on_submitted` (StepHooks). If an interrupt ends the wait, it does neither.
        """
        gradient_bytes = 0
        if isinstance(step.content, StepContent):
            gradient_bytes = sum(record.gradient_bytes for record in step.content.records)
        self._await_room(gradient_bytes)

        def submit() -> None:
            """Pass the step to the journal's thread. Must not be interrupted: otherwise a thread could wait forever for
            a latch that no thread opens.
            """
            assert self._file is not None, "a journal has begun"
            if self._thread is None:
                self._start()
            assert self._thread is not None, "it was started"
            frame = PendingFrame(self._file, step, Latch(), Latch(), Latch(), gradient_bytes)
            if self._fingerprints is not None:
                self._fingerprints.submit(self._take_fingerprint, frame)
            self._waiting.append(frame)
            self._thread.submit(self._write_waiting)
            self._pending_frames.append(frame)
            self._pending, self.fingerprinted = frame.over, frame.fingerprinted
            step.hooks.on_submitted()

        self._verb_lock.uninterrupted(submit)

    def _await_room(self, gradient_bytes: int) -> None:
        """Wait until one more step may be pending, and there is memory for its gradients."""
        if len(self._pending_frames) >= self._lag_steps:
            self._pending_frames[-self._lag_steps].over.wait()
        pending = [frame for frame in self._pending_frames if not frame.over.is_open]
        while pending and sum(frame.held_bytes for frame in pending) + gradient_bytes > self._captures.left_bytes:
            pending.pop(0).over.wait()
        while self._ranks is None and self._pending_frames and self._pending_frames[0].over.is_open:
            self._pending_frames.popleft()

    def forget_frozen(self) -> None:
        """Forget the digests of frozen tensors, which a load changes."""
        self.await_durable()
        self._frozen = FrozenDigests()

    def take_changed_name(self) -> str:
        """The name of a frozen tensor that has changed since the last call; "" if there is none."""
        return self._frozen.take_changed()

    def _start(self) -> None:
        def named(name: str) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._verb_lock.mark_background_thread)

        thread = named("flowstone-journal")
        fingerprints = None if self._lag_steps == 1 else named("flowstone-fingerprint")
        start_threads(*filter(None, (thread, fingerprints)))
        self._thread, self._fingerprints = thread, fingerprints

    def _write_waiting(self) -> None:
        """On the journal's thread: append the waiting steps, and steps that are added meanwhile. Then make all of them
        durable with one sync.
        """
        started, steps = monotonic(), list[PendingFrame]()
        while self._waiting:
            frame = self._waiting.popleft()
            steps.append(frame)
            self._write(frame)
        if steps:  # otherwise an earlier task has taken them
            self._sync(steps)
            self._end_all(steps, started)

    def _write(self, frame: PendingFrame) -> None:
        """Append a step's frame to the file. It is durable only after the next sync."""
        try:
            if self._fingerprints is None:
                self._take_fingerprint(frame)
            frame.is_proven.wait()
            if self._ranks is not None:
                self._write_together(self._ranks, frame)
            elif frame.failure is None:
                assert isinstance(frame.step.content, StepContent), "else a single rank makes a full save"
                if self.broken:
                    frame.mark_behind()
                    raise StorageError(
                        f"step {frame.step.step} cannot be journaled", reason=self.broken,
                        next="correct the cause; the next save is a full checkpoint",
                    )
                frame.note_appended(self._append(frame.file, frame.step.content, frame.fingerprint))
        except BaseException as error:
            frame.fail(error)
        if frame.failure is not None:
            self._fail(frame, frame.failure)

    def _fail(self, frame: PendingFrame, error: BaseException) -> None:
        """Record that a step has failed, so that later steps are not appended to this journal."""
        self.broken = self.broken or str(error)
        frame.file.fail(frame.step.step)

    def _write_together(self, ranks: JournalRanks, frame: PendingFrame) -> None:
        """Append one step to a journal of several ranks. Every rank exchanges the same messages in the same order, even
        if it has nothing to append. If this fails on one rank, it fails on all ranks.
        """
        file, content, step = frame.file, frame.step.content, frame.step.step
        if file.failed is not None:
            return
        if file.joint is None:
            proposal: tuple[JournalHeader, SteppedParameters] | str | Exception
            if isinstance(frame.failure, Exception):
                proposal = frame.failure
            elif not isinstance(content, StepContent):
                proposal = content
            elif isinstance(file.proposal, str):
                proposal = file.proposal
            else:
                assert file.stepped is not None, "one of several ranks"
                proposal = file.proposal, file.stepped
            try:
                file.join(ranks.begin(step, proposal, partial(journals.next_journal_number, self._store)))
            except BaseException:
                frame.mark_refused()
                raise
        if isinstance(content, StepContent) and frame.failure is None:
            joint = file.joint
            assert joint is not None, "the ranks have agreed on it"
            length = self._append(file, own_part(content, joint), frame.fingerprint)
            present = [(record.optimizer, record.parameters) for record in content.records]
            compressed = [record for record in content.records if record.compressed]
            present += [(record.optimizer, record.compressed_parameters) for record in compressed]
            frame.note_appended(length, joint.claim(present))
        else:
            file.fail(step)

    def _sync(self, steps: Sequence[PendingFrame]) -> None:
        """Make the frames of these steps durable."""
        written = [frame for frame in steps if frame.failure is None and frame.length]
        if not written:
            return
        try:
            writer = written[0].file.writer
            assert writer is not None, "it was appended to"
            writer.appending.sync()
        except BaseException as error:
            for frame in written:
                frame.fail(error)
            for frame in written[1:]:
                frame.mark_behind()
            self._fail(written[0], error)

    def _end_all(self, steps: Sequence[PendingFrame], started: float) -> None:
        """Report the outcome of each step. With several ranks, first agree with them whether the step is committed."""
        synced = sum(frame.failure is None and frame.length > 0 for frame in steps)
        for frame in steps:
            failure = frame.failure
            try:
                if self._ranks is not None:
                    self._commit(self._ranks, frame)
            except BaseException as error:
                failure = error
            if failure is None:
                self.seconds, self.bytes = monotonic() - started, sum(written.length for written in steps)
            else:
                self._fail(frame, failure)
                if self._ranks is not None:
                    frame.end(StepOutcome(failed=True, is_due=False))
            if self._ranks is None:
                frame.over.open()
            try:
                self._report_outcome(frame, failure, synced)
            finally:
                frame.release()
                frame.over.open()  # the next save, on all ranks, takes the outcome

    def _commit(self, ranks: JournalRanks, frame: PendingFrame) -> None:
        """Agree with the other ranks on a step, whether this rank has a durable frame of it or not."""
        step, file, failure = frame.step, frame.file, frame.failure
        if failure is not None and not (frame.is_asked and isinstance(failure, Exception)):
            raise failure
        report: StepReport | Exception
        if file.failed is not None and file.failed < step.step:
            frame.mark_behind()
            report = StepReport(f"the earlier step {file.failed} is not in the journal")
        elif failure is not None:
            report = failure
        elif isinstance(step.content, StepContent):
            assert file.joint is not None, "it has begun"
            fingerprint = frame.fingerprint if file.joint.alike else ""
            report = StepReport("", step.is_late, step.is_free, frame.claim, fingerprint)
        else:
            report = StepReport(step.content) if isinstance(step.content, str) else step.content
        frame.end(StepOutcome(failed=False, is_due=ranks.end_step(step.step, report)))

    def _take_fingerprint(self, frame: PendingFrame) -> None:
        """Compute a step's fingerprint. Runs on the fingerprint thread, or on the journal's thread if `lag_steps` is 1.
        """
        try:
            if isinstance(frame.step.content, StepContent):
                frame.note_fingerprint(self._fingerprint(frame.step.content, frame.fingerprinted))
            if frame.step.save is not None:
                frame.fingerprinted.open()
                frame.step.save.captured.complete()
        except BaseException as error:
            frame.fail(error)
        finally:
            frame.fingerprinted.open()
            frame.is_proven.open()

    def _fingerprint(self, content: StepContent, is_read: Latch) -> str:
        """The fingerprint of the step's window (a part of the state). Also compares digests of the window's frozen
        tensors with those of the last time that this window was read.

        is_read  a latch, opened once host memory was read
        """
        if content.window is None:
            return ""
        host = content.window.host_digests()
        is_read.open()
        digests = content.window.digests(host)
        self._frozen.compare(content.window, digests, content.frozen_names)
        return fingerprint_of(digests)

    def _report_outcome(self, frame: PendingFrame, failure: BaseException | None, synced: int) -> None:
        """Report the outcome of a step. `synced`: the number of steps that the same sync has made durable."""
        step = frame.step
        if step.save is None:
            return
        step.save.captured.complete()
        uncompressed = step.content.uncompressed if isinstance(step.content, StepContent) else ""
        if failure is None:
            self._emit(Journaled(step.step, frame.length, monotonic() - step.began, uncompressed, synced))
        elif isinstance(failure, ReplayError):
            self._emit(NotJournaled(step.step, str(failure.facts["reason"])))
        else:
            self._emit(SaveFailed(step.step, str(failure)))
        if frame.is_behind and self._lag_steps > 1:
            step.save.committed.mark_reported()  # later failures follow from this one, and are not raised
        step.hooks.on_end(failure)

    def _append(self, file: JournalFile, content: StepContent, fingerprint: str) -> int:
        """Append a frame, which the next sync makes durable. Returns its length in bytes."""
        if file.writer is None:
            assert isinstance(file.proposal, JournalHeader), "a rank without a header has no frames"
            if file.joint is None:
                opening = msgspec.structs.replace(file.proposal, number=journals.next_journal_number(self._store))
            else:
                opening = file.joint.opening
            maker = FrameMaker(opening.id, opening.version)
            file.start(JournalWriter(opening, maker, _create(self._store, opening)))
        writer = file.writer
        assert writer is not None, "it has started"
        opening = writer.opening
        with content.streams():
            parts = writer.maker.make(file.steps + 1, content, fingerprint)

        def confirm() -> None:
            """Raise StateChangedError if a gradient has changed. Called before the frame's head is written, which makes
            the frame valid.
            """
            changed = [record for record in content.records if not record.is_unchanged]
            for record in changed:
                record.on_changed()
            if changed:
                raise StateChangedError(
                    f"a gradient changed before it was written: step {content.step} cannot be replayed",
                    path=journal_directory(opening.after, opening.id), offset=0, length=length,
                    next="do nothing: the next save is a full checkpoint, and later gradients are copied",
                )

        length = sum(map(len, parts))
        writer.appending.append(parts, ahead_bytes=min(4 * length, JOURNAL_AHEAD_BYTES), confirm=confirm)
        file.count_step()
        for record in content.records:
            record.on_written()
        return length

    def end(self, *, wait: bool) -> None:
        """End the threads once the pending steps are durable."""
        self._end_file()
        for thread in filter(None, (self._fingerprints, self._thread)):
            thread.shutdown(wait=wait)
        if self._ranks is not None:
            self._ranks.end(wait=wait)


def _create(store: Store, opening: JournalHeader) -> AppendFile:
    """Create this rank's file, with its header. Both the file's name and its content are durable on return."""
    directory = journal_directory(opening.after, opening.id)
    try:
        store.make_directory(directory)
    except StorageError as error:
        if error.errno != errno.EEXIST or opening.ranks == 1:
            raise
    appending = cast("AppendableStore", store).append_to_new(path_inside(directory, journal_file(opening.rank)))
    head = encode_frame_head(HEADER, 0, opening.after, opening.id, opening, 0, opening.version)
    appending.append(_aligned(head), ahead_bytes=0)
    appending.sync()
    sync_names(store, directory)
    sync_names(store)
    return appending


def _aligned(data: bytes) -> Sequence[memoryview]:
    import mmap  # imported here: mmap memory is page-aligned, bytes objects are not

    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return [memoryview(pages)]


def _close(file: JournalFile) -> None:
    if file.writer is not None:
        file.writer.appending.close()

