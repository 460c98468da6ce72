"""A save under way: its states, from the call of `save` until it is committed, has failed, or was given up.

    called ──────────────────────► capturing ──► handed on ──► committed, or failed
       │                               ▲ └─────► given up
       └──► waiting for its plan ──────┘ (in the background)
                     └──► failed

called     described; nothing has been read yet. A failure here leaves nothing to clean up
waiting    the ranks have not agreed on a plan: `unplanned` has the state, or copies of it. Where the budget has no room
           for copies, the caller waits, too, until what is not lazy is captured
capturing  `capture`: the engine reads the sources. The threads that finish saves know the save, and wait for the
           caller's part: it encodes values that are not tensors, and waits until everything not lazy is captured
           (handover.py)
handed on  `handed_on` is open, and the caller is no longer needed: it has done its part, or the save began in the
           background, and it does not wait any more. `save.captured` follows once no source is read any more
given up   the call was interrupted before that: `handed_on` is open, and `given_up` is true. The caller gives it up; if
           the caller was interrupted even there, the writer's thread does, once it sees that the call ended
ended      `save.committed` is done
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.commit.read import encode_sections
from flowstone.errors import StateChangedError, StorageError
from flowstone.events import Captured, Written
from flowstone.pipeline.base import Base, stored_chunks
from flowstone.pipeline.capturing import Capture
from flowstone.pipeline.changed import state_changed
from flowstone.pipeline.futures import Save
from flowstone.pipeline.messages import Contribution, Try
from flowstone.pipeline.replica_samples import Looked
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.capture import Sources
from flowstone.stage.fence import FENCE_BEFORE
from flowstone.stage.moved import moved
from flowstone.state import Described
from flowstone.store.base import Receipt, Writing
from flowstone.trace import Span, Spans

if TYPE_CHECKING:
    from flowstone.pipeline.collapsing import HostMemory
    from flowstone.pipeline.unplanned import Unplanned


class Sections(msgspec.Struct, frozen=True):
    """The encoded text of all values that are not tensors, by section. `objects`: the values that `replicated` encodes.
    """

    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]


class SaveRun:
    """One save under way. The caller's thread, the watcher and the writer's thread own it in turn.

    this_try   names the draft: see SaveCoordinator.begin_try
    spans      its phases; from the call of `save` on
    watched    its sources, from before its capture has begun
    capturing  how its capture was started
    blocked_s  seconds for which the caller of `save` was blocked, once known
    call       the call of a verb that started it, by Turn's count
    is_agreed  the ranks have agreed on its plan
    loads      how many loads there had been when `save` was called
    looked     samples of replicas, from when `save` was called
    sections   once they are encoded
    base       what a later save may refer to, once it is durable; only if it is committed
    compress   what it encodes, and why; "": nothing
    late       once captured: the host memory that was captured after `save` had returned
    stays      whether that memory outlives this save: parameters and the state of optimizers do
    """

    def __init__(self, save: Save, this_try: Try, spans: Spans) -> None:
        self.save, self.this_try, self.spans = save, this_try, spans
        self.watched: Sources | None = None
        self.capturing: Span | None = None
        self.blocked_s = 0.0
        self.call = 0
        self.compress = ""
        self.loads = 0
        self.base: Base | None = None
        self.is_agreed = False
        self.looked: Looked | None = None
        self.unplanned: Unplanned | None = None
        self.capture: Capture | None = None
        self.sections: Sections | None = None
        self.late: HostMemory | None = None
        self.stays = False
        self.handed_on, self.given_up = Latch(), False
        self._moved: NDArray[np.int64] | None = None  # once captured: pieces whose memory went away before that

    # Waiting for its plan

    @property
    def awaits_plan(self) -> bool:
        """Whether it has not begun, and may still begin."""
        return self.unplanned is not None and self.unplanned.is_pending

    @property
    def holds_copies(self) -> bool:
        return self.unplanned is not None and not self.unplanned.is_over

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies that were made because there was no plan."""
        return 0 if self.unplanned is None else self.unplanned.early_bytes + self.unplanned.snapshot_bytes

    def copy(self, room_bytes: int) -> bool:
        """Copy what is left of a state without a plan, if there is room. Returns whether the state may change now."""
        return self.unplanned is not None and self.unplanned.snapshot(room_bytes)

    # Capturing

    @property
    def begun(self) -> Capture:
        assert self.capture is not None, "its capture has begun"
        return self.capture

    @property
    def writing(self) -> Writing:
        return self.begun.writing

    @property
    def outlasts_save(self) -> bool:
        """Whether sources are still read when `save` returns."""
        return self.begun.plan.lazy_bytes > 0 or bool(self.begun.sources.streams)

    def encode(self, described: Described) -> None:
        """Encode values that are not tensors while bytes move; returns once all but lazy tensors may change."""
        objects = described.objects
        self.sections = Sections(encode_sections(objects), encode_sections(described.per_rank), objects)
        self.spans.lap("encoded")
        if self.outlasts_save:
            self.writing.wait_early()
        else:
            self.writing.wait_captured()
        for stream in self.begun.sources.streams:
            stream.block_current(early=True)
        self.spans.lap("early")

    def expedite(self) -> None:
        """A thread waits for what is not captured yet. Any thread."""
        if self.capture is not None:
            self.writing.expedite()

    def release_sources(self) -> None:
        """Wait until the caller may change the state: on the host, or in its current stream of a device."""
        if self.unplanned is not None or not self.begun.sources.streams:
            self.save.captured.result()  # this expedites it, and copies a state without a plan
            return
        for stream in self.begun.sources.streams:
            stream.check_current("change the state", FENCE_BEFORE)
        self.writing.expedite()
        self.writing.wait_queued()
        self.begun.check.changed()  # from here on a change is no error
        for stream in self.begun.sources.streams:
            stream.block_current()

    def captured(self) -> Captured:
        """Everything has been captured: check the sources one last time, and release them."""
        plan, places = self.begun.plan, self.begun.sources.places
        self.begun.check.changed()
        lazy = np.flatnonzero(plan.lazy & (plan.length > 0))
        if places is not None and self.outlasts_save:
            self._moved = moved(places, lazy)
            from flowstone.pipeline.collapsing import HostMemory  # imported here: a load needs none of it

            self.late = HostMemory.of(places, plan.length, plan.lazy)
        self.let_sources_go()
        captured = self.spans.between("captured", self._capture_began, monotonic(), plan.bytes)
        watched = self.writing.watched
        return Captured(
            self.save.step, self.blocked_s, self.spans.since_call(captured), plan.bytes - plan.lazy_bytes,
            watched.exact_bytes, watched.sampled_bytes, watched.huge_bytes,
        )

    @property
    def _capture_began(self) -> float:
        assert self.capturing is not None, "its capture has begun"
        return self.capturing.begin

    def unwatch(self) -> None:
        """It ends before its capture has begun. Its error refers to all of this, and may be kept."""
        if self.watched is not None and self.capture is None:
            self.watched.rows.unwatch()

    def let_sources_go(self) -> None:
        """Drop the references to the sources: nothing reads them any more."""
        self.watched = None
        self.capture = replace(self.begun, sources=replace(self.begun.sources, places=None, memory=()))

    # Handed on

    def receipt(self) -> Receipt:
        """Blocks until the segments are durable. Raises their failure; StateChangedError names the tensors."""
        receipt = self.writing.receipt()
        self.save.captured.await_end()  # complete `captured` before `committed`
        if self._moved is not None and len(self._moved) and not isinstance(receipt.error, StorageError):
            raise self._gone(self._moved)
        counted = self.begun.check.changed()
        if isinstance(receipt.error, StateChangedError):
            raise self._with_names(receipt.error, counted)
        if receipt.error is not None:
            raise receipt.error
        if counted:
            raise state_changed(counted, path=self.begun.draft.directory)
        return receipt

    def written(self, receipt: Receipt) -> Written:
        """The event: all segments are durable."""
        io, now = receipt.io, monotonic()
        begin, end = receipt.synced or (now, now)
        self.spans.engine(receipt.spans)
        self.spans.between("written", self._capture_began, begin, io.copied_bytes)
        synced = self.spans.between("synced", begin, end)
        return Written(self.save.step, io.copied_bytes, self.spans.since_call(synced))

    def ended(self, file_bytes: int = 0) -> Span:
        """The save is committed, with that many bytes in files, or has failed."""
        return self.spans.whole("save", file_bytes, track="saves")

    def contribution(self, receipt: Receipt) -> Contribution:
        """This rank's part of the commit, once its segments are durable."""
        capture, sections, looked = self.begun, self.sections, self.looked
        assert sections is not None, "only what is encoded is handed on"
        assert looked is not None, "what is captured was looked at before"
        if self.compress:
            receipt = msgspec.structs.replace(receipt, io=msgspec.structs.replace(receipt.io, compress=self.compress))
        segments, places = stored_chunks(
            capture.segments, capture.plan, capture.sources.offsets, capture.referred, receipt
        )
        return Contribution(
            segments, capture.plan.segment, capture.sources.offsets, receipt, sections.replicated,
            sections.per_rank, sections.objects, looked.at(), places,
        )

    def _with_names(self, error: StateChangedError, counted: tuple[str, ...]) -> StateChangedError:
        """The error, naming the tensors whose bytes changed or went away, and those whose version counter moved."""
        plan, offsets = self.begun.plan, self.begun.sources.offsets
        hit = (offsets < error.offset + error.length) & (offsets + plan.length > error.offset)
        inside = [number for number, segment in enumerate(plan.segments) if error.path.endswith(f"/{segment.name}")]
        names = [plan.pieces.names[at] for at in np.flatnonzero(hit & np.isin(plan.segment, inside)).tolist()]
        told = tuple(dict.fromkeys([*names, *(() if error.gone else counted)]))
        return state_changed(told, path=error.path, offset=error.offset, length=error.length, gone=error.gone)

    def _gone(self, pieces: NDArray[np.int64]) -> StateChangedError:
        """The error: the memory of these pieces went away before they were captured."""
        plan, first = self.begun.plan, int(pieces[0])
        names = tuple(plan.pieces.names[at] for at in pieces.tolist())
        path = f"{self.begun.draft.directory}/{plan.segments[int(plan.segment[first])].name}"
        offset, length = int(self.begun.sources.offsets[first]), int(plan.length[first])
        return state_changed(names, path=path, offset=offset, length=length, gone=True)
