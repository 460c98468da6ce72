"""A journal being written, and the thread that makes steps durable (docs/ORDERING.md, Journal).

On the caller's thread    `Journaling.add`: waits until the step before is durable, then returns
On `flowstone-journal`    fingerprint, digests, the write and its sync, the agreement of several ranks; `committed` is
                          completed there
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import cast

import msgspec

from flowstone._version import __version__
from flowstone.commit import journals
from flowstone.commit.durable import sync
from flowstone.commit.entries import journal_directory, journal_file
from flowstone.commit.manifests import inside
from flowstone.config import JOURNAL_AHEAD_BYTES, JOURNAL_WINDOWS
from flowstone.errors import ReplayError, StateChangedError, StorageError
from flowstone.events import SaveFailed
from flowstone.format.journal import OPENING, Opening, OptimizerRow, SourceRow, encode_head
from flowstone.journal_events import Journaled, NotJournaled
from flowstone.pipeline.futures import Save
from flowstone.pipeline.journal_ranks import Joint, JournalRanks, Said, Stepped
from flowstone.pipeline.shared import Shared
from flowstone.runtime.threads import start
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.fingerprints import fingerprint_of
from flowstone.stage.journal_frames import FrameMaker, StepContent
from flowstone.state.stepped import Environment
from flowstone.store.base import Appending, Appends, Store


class Lineage(msgspec.Struct, frozen=True):
    """Where the state is: at a step that the store leads to.

    checkpoint  id of the checkpoint of that step, if one was begun
    journal     id of the journal that has that step, if one does
    """

    step: int
    checkpoint: str | None
    journal: str | None


class Kept(msgspec.Struct, frozen=True):
    """What stays the same for all steps of a journal. `stepped`: None in a job of one rank.

    exactness  of a replay, as far as this process can tell
    """

    exactness: str
    optimizers: tuple[OptimizerRow, ...]
    proven: tuple[str, ...]
    environment: Environment
    stepped: Stepped | None
    sources: tuple[SourceRow, ...] = ()


class Step(msgspec.Struct, frozen=True, eq=False):
    """A step for the journal's thread.

    content  what replays it. In a job of several ranks also why nothing does, or why this rank does not make it
    began    when `save` was called
    save     whose `captured` is completed; None: this rank does not make the step
    end      called on the thread, with what went wrong
    is_late  and `is_free`: see journal_ranks.Said
    """

    step: int
    content: StepContent | str | Exception
    began: float
    save: Save | None
    end: Callable[[BaseException | None], None]
    is_late: bool = False
    is_free: bool = True


class Ended(msgspec.Struct, frozen=True):
    """How a step of several ranks has ended, on all of them. `is_due`: the next one is to be saved whole as well."""

    failed: bool
    is_due: bool


class _File(msgspec.Struct):
    """A journal of this process.

    opening    as this rank would write it alone; None: it cannot, `why`
    joint      what several ranks have agreed on
    appending  None until its first step is written, as is `maker`
    steps      how many it has
    """

    opening: Opening | None
    stepped: Stepped | None = None
    why: str = ""
    joint: Joint | None = None
    maker: FrameMaker | None = None
    appending: Appending | None = None
    steps: int = 0


class Journaling:
    """The journals of one Checkpointer.

    fingerprinted  open unless a fingerprint is being computed; the state must not change before that. What is on a
                   device is digested in its current stream: that may go on
    seconds        of the last record: from its begin on the thread until it was durable
    bytes          of it
    """

    def __init__(self, shared: Shared, ranks: JournalRanks | None) -> None:
        """`ranks`: those of a job of several."""
        self._store, self._turn, self._emit, self._group = shared.store, shared.turn, shared.emit, shared.group
        self._ranks = ranks
        self._thread: ThreadPoolExecutor | None = None
        self._file: _File | None = None
        self._pending: Latch | None = None
        self._ended: Ended | None = None
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
        )
        self._begin(_File(opening, kept.stepped))
        return identity

    def begin_without(self, why: str) -> None:
        """A journal of several ranks begins, and this one can write none."""
        self._begin(_File(None, None, why))

    def _begin(self, file: _File) -> None:
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
        """Wait until every step so far is durable, or has failed."""
        if self._pending is not None:
            self._pending.wait()

    def leave_broken(self) -> None:
        """The same, before a whole save: what could not be appended is behind it; later steps begin a new journal."""
        self.await_durable()
        self.broken = ""

    def take_ended(self) -> Ended | None:
        """How the last step of several ranks has ended; None if that was asked before, or there was none."""
        ended, self._ended = self._ended, None
        return ended

    def add(self, step: Step, noted: Callable[[], None]) -> None:
        """Append a step. Returns once the one before is durable. `noted`: called unless this is interrupted before."""
        self.await_durable()

        def submit() -> None:
            """Uninterrupted: a latch that no thread is to open would be waited for without end."""
            assert self._file is not None, "a journal has begun"
            if self._thread is None:
                self._start()
            assert self._thread is not None, "it was started"
            pending, fingerprinted = Latch(), Latch()
            self._thread.submit(self._write, self._file, step, pending, fingerprinted)
            self._pending, self.fingerprinted = pending, fingerprinted
            noted()

        self._turn.uninterrupted(submit)

    def forget(self) -> None:
        """What no step changes is changed by a load."""
        self.await_durable()
        self._digests, self._changed = {}, ""

    def take_changed(self) -> str:
        """The name of something that no step changes, and that has changed; "" if none has since the last call."""
        name, self._changed = self._changed, ""
        return name

    def _start(self) -> None:
        thread = ThreadPoolExecutor(
            1, thread_name_prefix="flowstone-journal", initializer=self._turn.leave_out_this_thread
        )
        start(thread)
        self._thread = thread

    def _write(self, file: _File, step: Step, pending: Latch, fingerprinted: Latch) -> None:
        """On the thread."""
        started, failure, length, content = monotonic(), None, 0, step.content
        try:
            fingerprint = self._fingerprint(content, fingerprinted) if isinstance(content, StepContent) else ""
            fingerprinted.open()
            if step.save is not None:
                step.save.captured.tell()
            length = self._make_durable(file, step, fingerprint)
            self.seconds, self.bytes = monotonic() - started, length
        except BaseException as error:
            self.broken, failure = self.broken or str(error), error
            if self._ranks is not None:
                self._ended = Ended(failed=True, is_due=False)
        fingerprinted.open()
        if self._ranks is None:
            pending.open()
        try:
            self._tell(step, length, failure)
        finally:
            pending.open()  # of several ranks: each knows now how the step has ended, and settles it at its next save

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

    def _tell(self, step: Step, length: int, failure: BaseException | None) -> None:
        if step.save is None:
            return
        step.save.captured.tell()
        uncompressed = step.content.uncompressed if isinstance(step.content, StepContent) else ""
        if failure is None:
            self._emit(Journaled(step.step, length, monotonic() - step.began, uncompressed))
        elif isinstance(failure, ReplayError):
            self._emit(NotJournaled(step.step, str(failure.facts["reason"])))
        else:
            self._emit(SaveFailed(step.step, str(failure)))
        step.end(failure)

    def _make_durable(self, file: _File, step: Step, fingerprint: str) -> int:
        """Append the step's frame, and commit it if there are several ranks. Returns the frame's length."""
        if self._ranks is not None:
            return self._make_durable_together(self._ranks, file, step, fingerprint)
        assert isinstance(step.content, StepContent), "a single rank saves whole what it cannot replay"
        if self.broken:
            raise StorageError(f"step {step.step} cannot be journaled", reason=self.broken)
        return self._append(file, step.content, fingerprint)

    def _make_durable_together(self, ranks: JournalRanks, file: _File, step: Step, fingerprint: str) -> int:
        """All ranks do the same in the same order, whether they have a frame or not; a failure of one is one of all."""
        content, length = step.content, 0
        if file.joint is None:
            mine: tuple[Opening, Stepped] | str | Exception
            if not isinstance(content, StepContent):
                mine = content
            elif file.opening is None or file.stepped is None:
                mine = file.why
            else:
                mine = file.opening, file.stepped
            file.joint = ranks.begin(step.step, mine, partial(journals.next_number, self._store))
        said: Said | Exception
        if isinstance(content, StepContent):
            joint = file.joint
            try:
                length = self._append(file, _own(content, joint), fingerprint)
                present = [(act.optimizer, act.parameters) for act in content.acts]
                present += [(act.optimizer, act.compressed_parameters) for act in content.acts if act.compressed]
                shown = fingerprint if joint.alike else ""
                said = Said("", step.is_late, step.is_free, joint.claim(present), shown)
            except Exception as error:
                said = error
        else:
            said = Said(content) if isinstance(content, str) else content
        self._ended = Ended(failed=False, is_due=ranks.end_step(step.step, said))
        return length

    def _append(self, file: _File, content: StepContent, fingerprint: str) -> int:
        """Write a frame, durably. Returns its length."""
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
        file.appending.sync()
        file.steps += 1
        for act in content.acts:
            act.copies()
        return length

    def end(self, *, wait: bool) -> None:
        """End the thread, once the steps under way are durable."""
        self._end_file()
        if self._thread is not None:
            self._thread.shutdown(wait=wait)
        if self._ranks is not None:
            self._ranks.end(wait=wait)


def _own(content: StepContent, joint: Joint) -> StepContent:
    """What this rank logs of a step: of the gradients that other ranks have as well, its share."""
    acts = [
        msgspec.structs.replace(
            act, gradients=tuple(one for one in act.gradients if joint.logs(act.optimizer, one.parameter)),
            compressed=tuple(one for one in act.compressed if joint.logs(act.optimizer, one.parameters[0][0])),
        )
        for act in content.acts
    ]
    return msgspec.structs.replace(content, acts=acts)


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


def _close(file: _File) -> None:
    if file.appending is not None:
        file.appending.close()

