"""A journal being written, and the thread that makes steps durable (docs/ORDERING.md, Journal).

On the caller's thread    `Journaling.add`: waits until the step `lag_steps` before is durable, then returns
On `flowstone-journal`    fingerprint, digests, the write and its sync, the agreement of several ranks; `committed` is
                          completed there. With `lag_steps` above 1, one sync makes all steps durable that wait
On `flowstone-fingerprint`  the fingerprints, with `lag_steps` above 1: the next step waits for them, and the other
                          thread may wait for the store
"""

from __future__ import annotations

import errno
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import cast

import msgspec

from flowstone._version import __version__
from flowstone.checkpoint import Checkpoint
from flowstone.commit import journals
from flowstone.commit.durable import sync
from flowstone.commit.entries import journal_directory, journal_file, step_directory
from flowstone.commit.manifests import inside
from flowstone.config import JOURNAL_AHEAD_BYTES, JOURNAL_WINDOWS
from flowstone.errors import ReplayError, StateChangedError, StorageError
from flowstone.events import SaveFailed
from flowstone.format.journal import OPENING, Opening, encode_head
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.journal_events import Journaled, NotJournaled
from flowstone.pipeline.futures import Save
from flowstone.pipeline.journal_ranks import JournalRanks, Said, Stepped
from flowstone.pipeline.journal_records import Ended, File, Kept, Lineage, Step, UnderWay, own_part
from flowstone.pipeline.pacing import Captures
from flowstone.pipeline.shared import Shared
from flowstone.runtime.threads import start
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.fingerprints import fingerprint_of
from flowstone.stage.journal_frames import FrameMaker, StepContent
from flowstone.store.appends import Appending, Appends
from flowstone.store.base import Store


class Journaling:
    """The journals of one Checkpointer.

    fingerprinted  open unless a fingerprint is being computed; the state must not change before that. What is on a
                   device is digested in its current stream: that may go on
    seconds        of the last sync: from the begin of its first record on the thread until all were durable
    bytes          of these records
    """

    def __init__(self, shared: Shared, ranks: JournalRanks | None, lag_steps: int, captures: Captures) -> None:
        """`ranks`: those of a job of several.

        lag_steps  how many steps may be under way when `add` has returned
        captures   of the budget that these leave, the gradients of several steps may take all
        """
        self._store, self._turn, self._emit, self._group = shared.store, shared.turn, shared.emit, shared.group
        self._ranks, self._lag_steps, self._captures = ranks, lag_steps, captures
        self._thread: ThreadPoolExecutor | None = None
        self._fingerprints: ThreadPoolExecutor | None = None  # where the other thread may be held up by the store
        self._file: File | None = None
        self._under_way: deque[UnderWay] = deque()  # and those that have ended and were not looked at yet
        self._waiting: deque[UnderWay] = deque()  # for the thread
        self._pending: Latch | None = None  # of the newest step
        self._is_lag_agreed = ranks is None  # ranks that were given different ones would not decide alike
        self.fingerprinted = Latch()
        self.fingerprinted.open()
        self.seconds, self.bytes = 0.0, 0
        self._digests: dict[tuple[int, int], int] = {}  # of what no step changes, by address and length
        self._changed = ""  # the name of something among that which has changed; set by the thread
        self.broken = ""  # why nothing more can be appended; set by the thread

    def begin(self, lineage: Lineage, kept: Kept) -> str:
        """From now on steps go into a new journal, which begins at `lineage`. Returns its id; of several ranks'
        ids, that of rank 0 counts. Writes nothing yet.
        """
        identity = secrets.token_hex(8)
        opening = Opening(
            id=identity, number=0, after=lineage.step, checkpoint=lineage.checkpoint, parent=lineage.journal,
            rank=self._group.rank, ranks=self._group.size, exactness=kept.exactness, torch=kept.environment.torch,
            processor=kept.environment.processor, threads=kept.environment.threads,
            writer=f"flowstone {__version__}", created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizers=kept.optimizers, proven=kept.proven, windows=JOURNAL_WINDOWS, sources=kept.sources,
            lag_steps=msgspec.UNSET if self._lag_steps == 1 else self._lag_steps,
        )
        self._begin(File(opening, kept.stepped))
        return identity

    def begin_without(self, why: str) -> None:
        """A journal of several ranks begins, and this one can write none."""
        self._begin(File(None, None, why))

    def _begin(self, file: File) -> None:
        self.await_durable()
        self._end_file()
        self._file, self.broken = file, ""

    def _end_file(self) -> None:
        """On the thread, behind the steps that are under way."""
        file, self._file = self._file, None
        if file is None or self._thread is None:
            return
        try:
            self._thread.submit(_close, file)
        except RuntimeError:  # the process ends: Python waits for executors' threads before it calls exit handlers
            _close(file)

    def await_durable(self) -> None:
        """Wait until every step so far is durable, or has failed. Any thread."""
        if self._pending is not None:
            self._pending.wait()

    def leave_broken(self) -> None:
        """The same, before a whole save: what could not be appended is behind it; later steps begin a new journal."""
        self.await_durable()
        self.broken = ""

    def removed(self, lineage: Lineage | None, wholes: Sequence[Save | None], loaded: Checkpoint | None) -> str:
        """What the next step would go on from, and somebody has removed; "" if all of it is there.

        wholes  whole saves of this process. Not looked for while one is under way: what it replaces may go
        raises  StorageError  the store does not answer
        """
        file, goes_on = self._file, lineage is not None and lineage.checkpoint is None
        if goes_on and file is not None and file.appending is not None and not file.appending.is_in_place():
            assert file.opening is not None, "it has begun"
            return f"{journal_directory(file.opening.after, file.opening.id)} was removed"
        saves = [one for one in wholes if one is not None]
        if self._group.rank or not all(one.committed.done() for one in saves):  # one rank that looks is enough
            return ""
        steps = [one.step for one in saves if not one.committed.failed()]
        base = max([*steps, *([] if loaded is None else [loaded.step])], default=None)
        if base is None or self._store.exists(inside(step_directory(base), MANIFEST_NAME)):
            return ""
        return f"{step_directory(base)}, which the journal leads on from, was removed"

    def take_ended(self, *, of_all: bool) -> Ended | None:
        """How steps of several ranks have ended, but for the last `lag_steps` - 1, and for those that were asked for
        before; None if there are none. Waits for them. `of_all`: for every step.

        All ranks ask at the same steps, so they learn the same. A step that has failed has taken those behind it along.
        """
        leave = 0 if of_all or not self._is_lag_agreed else self._lag_steps - 1
        found = self._take(leave)
        if any(one.failed for one in found):
            found += self._take(0)
        if not found:
            return None
        failed = any(one.failed for one in found)
        self._is_lag_agreed = self._is_lag_agreed or not failed
        return Ended(failed, not failed and any(one.is_due for one in found))

    def _take(self, leave: int) -> list[Ended]:
        count = max(len(self._under_way) - leave, 0)
        if count:
            self._under_way[count - 1].over.wait()
        taken = [self._under_way.popleft() for _ in range(count)]
        return [Ended(one.ended.failed, one.ended.is_due and one.may_be_due) for one in taken if one.ended is not None]

    @property
    def oldest(self) -> int | None:
        """The first step of several ranks that `take_ended` has not told of."""
        return self._under_way[0].step.step if self._under_way else None

    def note_whole(self) -> None:
        """A whole save begins: the steps under way have asked for none after it."""
        for one in self._under_way:
            one.may_be_due = False

    def add(self, step: Step, noted: Callable[[], None]) -> None:
        """Append a step. Returns once no more than `lag_steps` are under way, this one among them. `noted`: called
        unless this is interrupted before.
        """
        held_bytes = 0
        if isinstance(step.content, StepContent):
            held_bytes = sum(act.gradient_bytes for act in step.content.acts)
        self._await_room(held_bytes)

        def submit() -> None:
            """Uninterrupted: a latch that no thread is to open would be waited for without end."""
            assert self._file is not None, "a journal has begun"
            if self._thread is None:
                self._start()
            assert self._thread is not None, "it was started"
            one = UnderWay(self._file, step, Latch(), Latch(), Latch(), held_bytes)
            if self._fingerprints is not None:
                self._fingerprints.submit(self._take_fingerprint, one)
            self._waiting.append(one)
            self._thread.submit(self._write_waiting)
            self._under_way.append(one)
            self._pending, self.fingerprinted = one.over, one.fingerprinted
            noted()

        self._turn.uninterrupted(submit)

    def _await_room(self, held_bytes: int) -> None:
        """Wait until one more step may be under way, and its gradients held."""
        if len(self._under_way) >= self._lag_steps:
            self._under_way[-self._lag_steps].over.wait()
        held = [one for one in self._under_way if not one.over.is_open]
        while held and sum(one.held_bytes for one in held) + held_bytes > self._captures.left_bytes:
            held.pop(0).over.wait()
        while self._ranks is None and self._under_way and self._under_way[0].over.is_open:
            self._under_way.popleft()

    def forget(self) -> None:
        """What no step changes is changed by a load."""
        self.await_durable()
        self._digests, self._changed = {}, ""

    def take_changed(self) -> str:
        """The name of something that no step changes, and that has changed; "" if none has since the last call."""
        name, self._changed = self._changed, ""
        return name

    def _start(self) -> None:
        def named(name: str) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._turn.leave_out_this_thread)

        thread = named("flowstone-journal")
        fingerprints = None if self._lag_steps == 1 else named("flowstone-fingerprint")
        start(*filter(None, (thread, fingerprints)))
        self._thread, self._fingerprints = thread, fingerprints

    def _write_waiting(self) -> None:
        """On the thread: append the steps that wait, and those that come meanwhile; then make all durable by one sync.
        """
        started, steps = monotonic(), list[UnderWay]()
        while self._waiting:
            one = self._waiting.popleft()
            steps.append(one)
            self._write(one)
        if steps:  # else an earlier task has taken them
            self._sync(steps)
            self._end_all(steps, started)

    def _write(self, one: UnderWay) -> None:
        """Append a step's frame, not yet durably."""
        try:
            if self._fingerprints is None:
                self._take_fingerprint(one)
            one.is_proven.wait()
            if self._ranks is not None:
                self._write_together(self._ranks, one)
            elif one.failure is None:
                assert isinstance(one.step.content, StepContent), "a single rank saves whole what it cannot replay"
                if self.broken:
                    one.is_behind = True
                    raise StorageError(f"step {one.step.step} cannot be journaled", reason=self.broken)
                one.length = self._append(one.file, one.step.content, one.fingerprint)
        except BaseException as error:
            one.failure = error
        if one.failure is not None:
            self._fail(one, one.failure)

    def _fail(self, one: UnderWay, error: BaseException) -> None:
        """Nothing goes into the journal behind a step that is not in it."""
        self.broken = self.broken or str(error)
        failed = one.file.failed
        one.file.failed = one.step.step if failed is None else min(failed, one.step.step)

    def _write_together(self, ranks: JournalRanks, one: UnderWay) -> None:
        """All ranks do the same in the same order, whether they have a frame or not; a failure of one is one of all."""
        file, content, step = one.file, one.step.content, one.step.step
        if file.failed is not None:
            return
        if file.joint is None:
            mine: tuple[Opening, Stepped] | str | Exception
            if isinstance(one.failure, Exception):
                mine = one.failure
            elif not isinstance(content, StepContent):
                mine = content
            elif file.opening is None or file.stepped is None:
                mine = file.why
            else:
                mine = file.opening, file.stepped
            one.is_asked = False
            file.joint = ranks.begin(step, mine, partial(journals.next_number, self._store))
            one.is_asked = True
        if isinstance(content, StepContent) and one.failure is None:
            joint = file.joint
            one.length = self._append(file, own_part(content, joint), one.fingerprint)
            present = [(act.optimizer, act.parameters) for act in content.acts]
            present += [(act.optimizer, act.compressed_parameters) for act in content.acts if act.compressed]
            one.claim = joint.claim(present)
        else:
            file.failed = step

    def _sync(self, steps: Sequence[UnderWay]) -> None:
        """Make the frames of these durable."""
        written = [one for one in steps if one.failure is None and one.length]
        if not written:
            return
        try:
            appending = written[0].file.appending
            assert appending is not None, "it was appended to"
            appending.sync()
        except BaseException as error:
            for one in written:
                one.failure, one.is_behind = error, one is not written[0]
            self._fail(written[0], error)

    def _end_all(self, steps: Sequence[UnderWay], started: float) -> None:
        """Commit the steps if there are several ranks; tell how each has ended."""
        synced = sum(one.failure is None and one.length > 0 for one in steps)
        for one in steps:
            failure = one.failure
            try:
                if self._ranks is not None:
                    self._commit(self._ranks, one)
            except BaseException as error:
                failure = error
            if failure is None:
                self.seconds, self.bytes = monotonic() - started, sum(each.length for each in steps)
            else:
                self._fail(one, failure)
                one.ended = None if self._ranks is None else Ended(failed=True, is_due=False)
            if self._ranks is None:
                one.over.open()
            try:
                self._tell(one, failure, synced)
            finally:
                one.let_go()
                one.over.open()  # of several ranks: each knows now how the step has ended, and settles it at a save

    def _commit(self, ranks: JournalRanks, one: UnderWay) -> None:
        """Agree on a step whose frame is durable, or for which this rank has none."""
        step, file, failure = one.step, one.file, one.failure
        if failure is not None and not (one.is_asked and isinstance(failure, Exception)):
            raise failure
        words: Said | Exception
        if file.failed is not None and file.failed < step.step:
            one.is_behind = True
            words = Said(f"step {file.failed}, from which it goes on, is in no journal")
        elif failure is not None:
            words = failure
        elif isinstance(step.content, StepContent):
            assert file.joint is not None, "it has begun"
            shown = one.fingerprint if file.joint.alike else ""
            words = Said("", step.is_late, step.is_free, one.claim, shown)
        else:
            words = Said(step.content) if isinstance(step.content, str) else step.content
        one.ended = Ended(failed=False, is_due=ranks.end_step(step.step, words))

    def _take_fingerprint(self, one: UnderWay) -> None:
        """On the thread of fingerprints, or on that of the journal if it is held up by one step at most."""
        try:
            if isinstance(one.step.content, StepContent):
                one.fingerprint = self._fingerprint(one.step.content, one.fingerprinted)
            if one.step.save is not None:
                one.fingerprinted.open()
                one.step.save.captured.tell()
        except BaseException as error:
            one.failure = error
        finally:
            one.fingerprinted.open()
            one.is_proven.open()

    def _fingerprint(self, content: StepContent, is_read: Latch) -> str:
        """Of the step's window. What no step changes is compared with what it was when it was in a window before.

        is_read  opened once host memory is not read any more
        """
        if content.window is None:
            return ""
        host = content.window.host_digests()
        is_read.open()
        digests = content.window.digests(host)
        for part, piece, found in zip(content.window.parts, content.window.pieces, digests, strict=True):
            name = content.still.get(piece)
            if name is not None and self._digests.setdefault(part, found) != found:
                self._digests[part], self._changed = found, name
        return fingerprint_of(digests)

    def _tell(self, one: UnderWay, failure: BaseException | None, synced: int) -> None:
        """`synced`: how many steps the same sync has made durable."""
        step = one.step
        if step.save is None:
            return
        step.save.captured.tell()
        uncompressed = step.content.uncompressed if isinstance(step.content, StepContent) else ""
        if failure is None:
            self._emit(Journaled(step.step, one.length, monotonic() - step.began, uncompressed, synced))
        elif isinstance(failure, ReplayError):
            self._emit(NotJournaled(step.step, str(failure.facts["reason"])))
        else:
            self._emit(SaveFailed(step.step, str(failure)))
        if one.is_behind and self._lag_steps > 1:
            step.save.committed.reported = True  # one failure is raised once
        step.end(failure)

    def _append(self, file: File, content: StepContent, fingerprint: str) -> int:
        """Write a frame, which the next sync makes durable. Returns its length."""
        if file.appending is None or file.maker is None:
            assert file.opening is not None, "what it cannot begin, it does not append to"
            if file.joint is None:
                opening = msgspec.structs.replace(file.opening, number=journals.next_number(self._store))
            else:
                opening = file.joint.opening
            file.opening, file.maker = opening, FrameMaker(opening.id, opening.version)
            file.appending = _create(self._store, opening)
        opening = cast("Opening", file.opening)
        with content.streams():
            parts = file.maker.make(file.steps + 1, content, fingerprint)

        def confirm() -> None:
            """The head, which makes it a frame, is written only if what it tells of has not changed meanwhile."""
            changed = [act for act in content.acts if not act.is_unchanged]
            for act in changed:
                act.copy_always()
            if changed:
                raise StateChangedError(
                    f"a gradient changed before it was written: step {content.step} cannot be replayed",
                    path=journal_directory(opening.after, opening.id), offset=0, length=length,
                    next="the next save is a whole one; from then on gradients are copied",
                )

        length = sum(map(len, parts))
        file.appending.append(parts, ahead_bytes=min(4 * length, JOURNAL_AHEAD_BYTES), confirm=confirm)
        file.steps += 1
        for act in content.acts:
            act.copies()
        return length

    def end(self, *, wait: bool) -> None:
        """End the thread, once the steps under way are durable."""
        self._end_file()
        for thread in filter(None, (self._fingerprints, self._thread)):
            thread.shutdown(wait=wait)
        if self._ranks is not None:
            self._ranks.end(wait=wait)


def _create(store: Store, opening: Opening) -> Appending:
    """The file of this rank, with its opening; name and content are durable on return."""
    directory = journal_directory(opening.after, opening.id)
    try:
        store.make_directory(directory)
    except StorageError as error:
        if error.errno != errno.EEXIST or opening.ranks == 1:
            raise
    appending = cast("Appends", store).append_to_new(inside(directory, journal_file(opening.rank)))
    head = encode_head(OPENING, 0, opening.after, opening.id, opening, 0, opening.version)
    appending.append(_aligned(head), ahead_bytes=0)
    appending.sync()
    sync(store, directory)
    sync(store)
    return appending


def _aligned(data: bytes) -> Sequence[memoryview]:
    import mmap  # imported here: its pages are aligned, as those of bytes are not

    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return [memoryview(pages)]


def _close(file: File) -> None:
    if file.appending is not None:
        file.appending.close()

