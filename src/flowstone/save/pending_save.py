"""One save from the call of `save` until it has ended: PendingSave, and its states.

    CALLED ──────────────────────► CAPTURING ────► HANDED_OVER ──► COMMITTED
       └──► AWAITING_PLAN ─────────┘ │                  │
                 │  └────────────────┴──► ABANDONED     │
                 │                            └─────────┴────────► FAILED
                 └───────────────────────────────────────────────► FAILED

CALLED         the caller's thread lists the state and plans the writes. A failure here leaves nothing to clean up
AWAITING_PLAN  the ranks have to agree on the plan first. Meanwhile `pending_plan` holds the state, or copies of it. If
               the budget has no room for copies, `save` does not return until everything except lazy tensors is
               captured (lazy tensors are those that are captured after `save` has returned)
CAPTURING      `capture`: the engine reads the tensors. The save is registered with the threads that finish saves. They
               wait until the values that are not tensors are encoded, and everything except lazy tensors is captured
HANDED_OVER    the caller is no longer needed: it has done its part, or the capture began in the background while the
               caller did not wait. `save.captured` is completed once no tensor is read any more (ownership.py)
ABANDONED      the call was interrupted before the hand-over. The caller abandons the save. If the caller is interrupted
               again, the thread that finishes saves abandons the save, once it sees that the call has ended
COMMITTED      `save.committed` has the checkpoint
FAILED         `save.committed` has the error

No save returns to an earlier state. Threads enter states without a lock, because an interrupt could leave a lock held.
A save's state is the highest SaveState that it has entered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.commit.read import encode_sections
from flowstone.coordination.messages import Assignment, Contribution, SaveAttempt
from flowstone.errors import StateChangedError, StorageError
from flowstone.events.phases import Captured, Written
from flowstone.format.index import ChunkPlaces
from flowstone.format.manifest import SegmentRow
from flowstone.reading.checkpoint import Checkpoint
from flowstone.runtime.signal_shield import Latch
from flowstone.save.capturing import Capture, state_changed
from flowstone.save.plan_cache import CachedPlan, FenceMode
from flowstone.save.replica_samples import ReplicaSamples
from flowstone.session.futures import Save
from flowstone.stage.capture import CaptureSources
from flowstone.stage.fence import FENCE_BEFORE
from flowstone.stage.moved_storage import storage_moved
from flowstone.state import StateDescription
from flowstone.store.base import Receipt, WriteHandle
from flowstone.trace import Span, Spans

if TYPE_CHECKING:
    from flowstone.delta.base import Base
    from flowstone.save.collapsing import HostMemory
    from flowstone.save.pending_plan import PendingPlan


class Sections(msgspec.Struct, frozen=True):
    """The encoded text of all values that are not tensors, by section. `objects`: the values of which `replicated` is
    the text.
    """

    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]


class SaveState(IntEnum):
    """The state of a save. The module's docstring has a diagram of all states."""

    CALLED = 0
    AWAITING_PLAN = 1
    CAPTURING = 2
    HANDED_OVER = 3
    ABANDONED = 4
    FAILED = 5
    COMMITTED = 6


class SaveRequest(msgspec.Struct, frozen=True, eq=False):
    """The arguments of `save`, and the results of describing the state.

    described   the state
    fence       until when the state must not change
    assignment  the pieces that this rank writes; None: the ranks have to agree first
    last_plan   the plan of the previous save, if this save may use it
    describing  the time span in which the state was listed
    streams     makes a context in which any thread has the caller's current device streams
    """

    described: StateDescription
    fence: FenceMode
    assignment: Assignment | None
    last_plan: CachedPlan | None
    describing: Span
    streams: Callable[[], AbstractContextManager[object]]


class PendingSave:
    """One save. First the thread that called `save` owns it, then the background threads that finish saves.

    attempt    names the draft (the unpublished checkpoint): see SaveCoordinator.begin_attempt
    spans      spans of its phases, since `save` was called
    call       number of the call of `save`, as counted by VerbLock
    waited_s   seconds for which it waited for earlier saves
    loads      number of loads before `save` was called
    samples    samples of replicas, taken when `save` was called
    plan       plan of this rank's writes, once the ranks have agreed
    agreed     this rank's assignment, once the ranks have agreed to save this step
    watched    the tensors that it captures, once their changes are detected
    capture_span  the span in which its capture was started
    compress   text that says which tensors are encoded, and why; "": none
    blocked_s  seconds for which the caller of `save` was blocked; set once the save was handed over
    sections   the encoded values that are not tensors
    base       what later saves may refer to, once the segments are durable; used only if this save is committed
    late       the host memory that was captured after `save` had returned; set once it is captured
    caller_done   open once the save was handed over or abandoned
    is_expedited  whether it is captured at full speed, because a thread waits for this save or a later one
    """

    def __init__(self, save: Save, attempt: SaveAttempt, spans: Spans, *, call: int, loads: int) -> None:
        self.save, self.attempt, self.spans, self.call, self.loads = save, attempt, spans, call, loads
        self._entered = [SaveState.CALLED]
        self.waited_s = 0.0
        self._request: SaveRequest | None = None
        self.samples: ReplicaSamples | None = None
        self.pending_plan: PendingPlan | None = None
        self.plan: CachedPlan | None = None
        self.agreed: Assignment | None = None
        self.watched: CaptureSources | None = None
        self.capture: Capture | None = None
        self.capture_span: Span | None = None
        self.compress = ""
        self.blocked_s = 0.0
        self.sections: Sections | None = None
        self.base: Base | None = None
        self.late: HostMemory | None = None
        self.is_expedited = False
        self.caller_done = Latch()
        self._moved: NDArray[np.int64] | None = None  # pieces whose memory was freed before their capture

    @property
    def state(self) -> SaveState:
        return max(self._entered)

    # Called

    def note_waited(self) -> None:
        """Record how long this save has waited for earlier saves."""
        self.waited_s = self.spans.lap("waited").seconds

    def note_request(self, request: SaveRequest, samples: ReplicaSamples) -> None:
        """Record that the state is described."""
        self._request, self.samples = request, samples

    @property
    def request(self) -> SaveRequest:
        """The arguments of `save`, until everything is encoded."""
        assert self._request is not None, "the state is described and not encoded yet"
        return self._request

    def note_plan(self, plan: CachedPlan) -> None:
        """Record the plan of this rank's writes."""
        self.plan = plan

    @property
    def planned(self) -> CachedPlan:
        assert self.plan is not None, "the save has a plan"
        return self.plan

    @property
    def outlives_save(self) -> bool:
        """Whether lazily captured memory outlives this save: that of parameters and optimizers does, copies do not."""
        return self.plan is not None and self.plan.waiter == "optimizers" and self.pending_plan is None

    def note_watched(self, sources: CaptureSources) -> None:
        """Record the sources, whose changes are detected from now on."""
        self.watched = sources

    def note_blocked(self, blocked: Span) -> None:
        """Record the time for which the caller of `save` was blocked."""
        self.blocked_s = blocked.seconds

    # Waiting for its plan

    def note_pending_plan(self, pending_plan: PendingPlan) -> None:
        """Record that the ranks have to agree first. Until then `pending_plan` has the state, or copies of it."""
        self.pending_plan = pending_plan

    def await_plan(self) -> None:
        """Record that this save waits for its plan. The writer's thread plans it later, when it comes to this save."""
        self._entered.append(SaveState.AWAITING_PLAN)
        if self.pending_plan is not None and self.pending_plan.is_copied:
            self.save.captured.complete()

    @property
    def holds_caller(self) -> bool:
        """Whether the caller waits for the plan, because there was no room for copies."""
        return self.pending_plan is not None and self.pending_plan.holds_caller

    @property
    def awaits_plan(self) -> bool:
        """Whether this save still waits for its plan, so that its capture has not begun."""
        return self.pending_plan is not None and self.pending_plan.is_pending

    @property
    def holds_copies(self) -> bool:
        return self.pending_plan is not None and not self.pending_plan.is_over

    @property
    def copied_bytes(self) -> int:
        """Length in bytes of the copies of tensors that were made because there was no plan."""
        return 0 if self.pending_plan is None else self.pending_plan.early_bytes + self.pending_plan.snapshot_bytes

    def copy(self, room_bytes: int) -> bool:
        """If there is no plan yet, copy the tensors of which there is no copy, if they fit into `room_bytes`. Returns
        whether the state may change now.
        """
        return self.pending_plan is not None and self.pending_plan.snapshot(room_bytes)

    def agree(self, assignment: Assignment) -> None:
        """Record that the ranks have agreed to save this step, and this rank's assignment."""
        self.agreed = assignment

    # Capturing

    @property
    def begun(self) -> Capture:
        assert self.capture is not None, "the capture has begun"
        return self.capture

    def begin(self, capture: Capture, compress: str) -> None:
        """Record that the capture of this save has begun."""
        self.compress = compress
        self.capture, self.capture_span = capture, self.spans.lap("begun")
        self._entered.append(SaveState.CAPTURING)
        if self.is_expedited:
            self.writing.expedite()

    @property
    def writing(self) -> WriteHandle:
        return self.begun.writing

    @property
    def outlasts_save(self) -> bool:
        """Whether tensors of the state are still read after `save` has returned."""
        return self.begun.plan.lazy_bytes > 0 or bool(self.begun.sources.streams)

    def encode(self, described: StateDescription | None = None) -> None:
        """Encode values that are not tensors, while tensors are captured. Returns once all tensors may change, except
        those that are captured lazily.

        described  the list of the state's copies; None: the list that `save` made. Both are dropped afterwards
        """
        described = described or self.request.described
        objects = described.objects
        self.sections = Sections(encode_sections(objects), encode_sections(described.per_rank), objects)
        self._request = None
        self.spans.lap("encoded")
        if self.outlasts_save:
            self.writing.wait_early()
        else:
            self.writing.wait_captured()
        for stream in self.begun.sources.streams:
            stream.block_current(early=True)
        self.spans.lap("early")

    def expedite(self) -> None:
        """Capture at full speed, because a thread waits for pieces that are not captured yet. Can be called on any
        thread.
        """
        self.is_expedited = True  # set before `capture` is read; `begin` sets `capture` before it reads `is_expedited`
        if self.capture is not None:
            self.writing.expedite()

    def release_sources(self) -> None:
        """Wait until the caller may change the state, on the host and in the current streams of devices."""
        if self.pending_plan is not None or not self.begun.sources.streams:
            self.save.captured.result()  # this wait makes the capture run at full speed, or the state be copied
            return
        for stream in self.begun.sources.streams:
            stream.check_current("change the state", FENCE_BEFORE)
        self.writing.expedite()
        self.writing.wait_queued()
        self.begun.check.settle()  # later changes are no error
        for stream in self.begun.sources.streams:
            stream.block_current()

    def end_capture(self) -> Captured:
        """After everything was captured, check the tensors for changes one last time, and release them. Returns the
        event Captured.
        """
        plan, places = self.begun.plan, self.begun.sources.places
        self.begun.check.settle()
        lazy = np.flatnonzero(plan.lazy & (plan.length > 0))
        if places is not None and self.outlasts_save:
            self._moved = storage_moved(places, lazy)
            from flowstone.save.collapsing import HostMemory  # imported here: a load needs none of it

            self.late = HostMemory.of(places, plan.length, plan.lazy)
        self.release_memory()
        captured = self.spans.between("captured", self._capture_began, monotonic(), plan.bytes)
        watched = self.writing.watched
        return Captured(
            self.save.step, self.blocked_s, self.spans.since_call(captured), plan.bytes - plan.lazy_bytes,
            watched.exact_bytes, watched.sampled_bytes, watched.huge_bytes,
        )

    @property
    def _capture_began(self) -> float:
        assert self.capture_span is not None, "the capture has begun"
        return self.capture_span.begin

    def unwatch(self) -> None:
        """End the watch, because the capture will not begin. Otherwise it would last until the caller drops the error,
        which refers to this save.
        """
        if self.watched is not None and self.capture is None:
            self.watched.rows.unwatch()

    def release_memory(self) -> None:
        """Drop the references to the state's tensors, because no thread reads them any more."""
        self.watched = None
        self.capture = replace(self.begun, sources=replace(self.begun.sources, places=None, memory=()))

    # Handed over, or abandoned

    def hand_over(self) -> None:
        """Record that the caller's part is done."""
        self._entered.append(SaveState.HANDED_OVER)
        self.caller_done.open()

    def abandon(self) -> bool:
        """Abandon the save after the call was interrupted. Returns False if it was handed over or abandoned before."""
        if self.state >= SaveState.HANDED_OVER:
            self.caller_done.open()  # again, as an earlier call may have been interrupted before this line
            return False
        self._entered.append(SaveState.ABANDONED)
        self.save.committed.mark_reported()  # the interrupted call raises the cause itself
        return True

    def receipt(self) -> Receipt:
        """Wait until the segments are durable. Raises the failure of a write; StateChangedError names the tensors."""
        receipt = self.writing.receipt()
        self.save.captured.await_end()  # complete `captured` before `committed`
        if self._moved is not None and len(self._moved) and not isinstance(receipt.error, StorageError):
            raise self._gone(self._moved)
        counted = self.begun.check.changed
        if isinstance(receipt.error, StateChangedError):
            raise self._with_names(receipt.error, counted)
        if receipt.error is not None:
            raise receipt.error
        if counted:
            raise state_changed(counted, path=self.begun.draft.directory)
        return receipt

    def written(self, receipt: Receipt) -> Written:
        """The event Written, which says that this rank's segment files are durable."""
        io, now = receipt.io, monotonic()
        begin, end = receipt.synced or (now, now)
        self.spans.add_engine_spans(receipt.spans)
        self.spans.between("written", self._capture_began, begin, io.copied_bytes)
        synced = self.spans.between("synced", begin, end)
        return Written(self.save.step, io.copied_bytes, self.spans.since_call(synced))

    def note_base(self, base: Base) -> None:
        """Record the `Base` to which later saves may refer. It is used if this save is committed."""
        self.base = base

    def end_span(self, file_bytes: int = 0) -> Span:
        """End the time span of the save. `file_bytes`: length of its files if it was committed, 0 if it has failed."""
        return self.spans.since_begin("save", file_bytes, track="saves")

    def commit(self, checkpoint: Checkpoint) -> None:
        """Complete the futures with the checkpoint, which is durable now."""
        self._entered.append(SaveState.COMMITTED)
        self.save.committed.set_result(checkpoint)

    def fail(self, error: BaseException) -> None:
        """Complete the futures with `error`, because the save was not committed."""
        self._entered.append(SaveState.FAILED)
        self._request = None
        self.save.captured.complete()
        self.save.committed.set_exception(error)

    def contribution(
        self, receipt: Receipt, segments: Sequence[SegmentRow], places: ChunkPlaces | None
    ) -> Contribution:
        """What this rank reports for the commit, once its segment files are durable. `places`: see Contribution."""
        capture, sections, samples = self.begun, self.sections, self.samples
        assert sections is not None, "the values are encoded before the save is handed over"
        assert samples is not None, "replicas are sampled before the capture"
        if self.compress:
            receipt = msgspec.structs.replace(receipt, io=msgspec.structs.replace(receipt.io, compress=self.compress))
        return Contribution(
            segments, capture.plan.segment, capture.sources.offsets, receipt, sections.replicated,
            sections.per_rank, sections.objects, samples.digests(), places,
        )

    def _with_names(self, error: StateChangedError, counted: tuple[str, ...]) -> StateChangedError:
        """The error, with the names of the tensors whose bytes or version counters changed, or that were freed."""
        plan, offsets = self.begun.plan, self.begun.sources.offsets
        hit = (offsets < error.offset + error.length) & (offsets + plan.length > error.offset)
        inside = [number for number, segment in enumerate(plan.segments) if error.path.endswith(f"/{segment.name}")]
        names = [plan.pieces.names[piece] for piece in np.flatnonzero(hit & np.isin(plan.segment, inside)).tolist()]
        tensors = tuple(dict.fromkeys([*names, *(() if error.gone else counted)]))
        return state_changed(tensors, path=error.path, offset=error.offset, length=error.length, gone=error.gone)

    def _gone(self, pieces: NDArray[np.int64]) -> StateChangedError:
        """The error for pieces whose memory was freed before they were captured."""
        plan, first = self.begun.plan, int(pieces[0])
        names = tuple(plan.pieces.names[piece] for piece in pieces.tolist())
        path = f"{self.begun.draft.directory}/{plan.segments[int(plan.segment[first])].name}"
        offset, length = int(self.begun.sources.offsets[first]), int(plan.length[first])
        return state_changed(names, path=path, offset=offset, length=length, gone=True)
