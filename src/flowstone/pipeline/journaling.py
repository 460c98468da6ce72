"""A journal being written, and the thread that makes steps durable (docs/ORDERING.md, Journal).

On the caller's thread    `Journaling.add`: waits until the step before is durable, then returns
On `flowstone-journal`    fingerprint, digests, the write and its sync; `committed` is completed there
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from time import monotonic
from typing import cast

import msgspec

from flowstone._version import __version__
from flowstone.commit.durable import sync
from flowstone.commit.entries import journal_directory, journal_file
from flowstone.commit.manifests import inside
from flowstone.config import JOURNAL_AHEAD_BYTES, JOURNAL_WINDOWS
from flowstone.errors import StateChangedError, StorageError
from flowstone.events import Journaled, SaveFailed
from flowstone.format.journal import OPENING, Opening, OptimizerRow, SourceRow, encode_head
from flowstone.pipeline.futures import Save
from flowstone.pipeline.shared import Shared
from flowstone.runtime.threads import start
from flowstone.runtime.uninterrupted import Latch
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
    """What stays the same for all steps of a journal."""

    optimizers: tuple[OptimizerRow, ...]
    proven: tuple[str, ...]
    environment: Environment
    sources: tuple[SourceRow, ...] = ()


class _File(msgspec.Struct):
    """A journal of this process. `appending`: None until its first step is written; `steps`: how many it has."""

    opening: Opening
    maker: FrameMaker
    appending: Appending | None = None
    steps: int = 0


class Journaling:
    """The journals of one Checkpointer.

    fingerprinted  open unless a fingerprint is being computed; the state must not change before that
    seconds        of the last record: from its begin on the thread until it was durable
    bytes          of it
    """

    def __init__(self, shared: Shared) -> None:
        self._store, self._turn, self._emit, self._group = shared.store, shared.turn, shared.emit, shared.group
        self._thread: ThreadPoolExecutor | None = None
        self._file: _File | None = None
        self._pending: Latch | None = None
        self.fingerprinted = Latch()
        self.fingerprinted.open()
        self.seconds, self.bytes = 0.0, 0
        self.broken = ""  # why nothing more can be appended; set by the thread

    def begin(self, lineage: Lineage, kept: Kept, number: int) -> str:
        """From now on steps go into a new journal, which begins at `lineage`. Returns its id. Writes nothing yet."""
        identity = secrets.token_hex(8)
        opening = Opening(
            id=identity, number=number, after=lineage.step, checkpoint=lineage.checkpoint, parent=lineage.journal,
            rank=self._group.rank, ranks=self._group.size, exactness="exact", torch=kept.environment.torch,
            processor=kept.environment.processor, threads=kept.environment.threads,
            writer=f"flowstone {__version__}", created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizers=kept.optimizers, proven=kept.proven, windows=JOURNAL_WINDOWS, sources=kept.sources,
        )
        self._end_file()
        self._file = _File(opening, FrameMaker(identity, opening.version))
        self.broken = ""
        return identity

    def _end_file(self) -> None:
        """On the thread, behind the steps that are under way."""
        file, self._file = self._file, None
        if file is not None and self._thread is not None:
            self._thread.submit(_close, file)

    def await_durable(self) -> None:
        """Wait until every step so far is durable, or has failed."""
        if self._pending is not None:
            self._pending.wait()

    def add(
        self, save: Save, content: StepContent, end: Callable[[BaseException | None], None], began: float
    ) -> None:
        """Append a step. Returns once the one before is durable. `end`: called on the thread, with what went wrong."""
        assert self._file is not None, "a journal has begun"
        if self._thread is None:
            self._turn.uninterrupted(self._start)
        self.await_durable()
        self._pending, self.fingerprinted = pending, _ = Latch(), Latch()
        assert self._thread is not None, "it was started"
        self._thread.submit(self._write, self._file, save, content, end, began, pending, self.fingerprinted)

    def _start(self) -> None:
        thread = ThreadPoolExecutor(
            1, thread_name_prefix="flowstone-journal", initializer=self._turn.leave_out_this_thread
        )
        start(thread)
        self._thread = thread

    def _write(
        self, file: _File, save: Save, content: StepContent, end: Callable[[BaseException | None], None], began: float,
        pending: Latch, fingerprinted: Latch,
    ) -> None:
        """On the thread."""
        started, failure = monotonic(), None
        try:
            fingerprint = "" if content.window is None else content.window.fingerprint()
            fingerprinted.open()
            save.captured.tell()
            if self.broken:
                raise StorageError(f"step {content.step} cannot be journaled", reason=self.broken)
            length = self._append(file, content, fingerprint)
            self.seconds, self.bytes = monotonic() - started, length
        except BaseException as error:
            self.broken, failure = self.broken or str(error), error
        fingerprinted.open()
        save.captured.tell()
        pending.open()
        self._emit(
            Journaled(content.step, length, monotonic() - began, content.uncompressed) if failure is None
            else SaveFailed(content.step, str(failure))
        )
        end(failure)

    def _append(self, file: _File, content: StepContent, fingerprint: str) -> int:
        """Write a frame, durably. Returns its length."""
        if file.appending is None:
            file.appending = _create(self._store, file.opening)
        parts = file.maker.make(file.steps + 1, content, fingerprint)

        def confirm() -> None:
            """The head, which makes it a frame, is written only if what it tells of has not changed meanwhile."""
            if not all(act.is_unchanged for act in content.acts):
                raise StateChangedError(
                    f"a gradient changed before it was written: step {content.step} cannot be replayed",
                    path=journal_directory(file.opening.after, file.opening.id), offset=0, length=length,
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

