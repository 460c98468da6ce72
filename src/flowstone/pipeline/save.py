"""The save half of the conductor: what a save is made of, and the captures that go on beside training.

    state --Described--> plan --WritePlan--> stage --Staged--> store --Receipt--> commit --Manifest-->
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone._version import __version__
from flowstone.commit import publish
from flowstone.commit.read import encode_sections, join_objects
from flowstone.config import (
    CAPTURE_SHARE_OF_OVERLAP,
    CHUNK_BYTES,
    DRAFT_TRIES,
    FIRST_ARENA_BYTES,
    PACKED_BELOW_BYTES,
    Tuning,
)
from flowstone.errors import RankError, StateChangedError, StorageError
from flowstone.events import BuffersFromOneRank, Captured, Event, Fenced, Written
from flowstone.format.manifest import Manifest, SegmentRow
from flowstone.pipeline.changed import state_changed
from flowstone.pipeline.futures import Save
from flowstone.pipeline.messages import Assignment, Contribution, LookedAt
from flowstone.pipeline.save_coordinator import SaveCoordinator
from flowstone.pipeline.unplanned import Unplanned
from flowstone.plan.write import WritePlan, index_file, plan_writes
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.capture import Headers, Staged, start_capture
from flowstone.stage.early_snapshot import snapshot
from flowstone.stage.moved import moved
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import CounterCheck, Described
from flowstone.store.base import Pace, Receipt, Store, Writing
from flowstone.table.pieces import Layout, Pieces, Places

Waiter: TypeAlias = Literal["nobody", "optimizers", "caller"]
"""Who will wait for the capture before changing what is captured lazily."""
Reserver: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls it, on another thread."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A layout with the plan that was made for it; kept for the next save."""

    layout: Layout
    waiter: Waiter
    plan: WritePlan
    assignment: Assignment | None = None  # in a job of several ranks: what this one writes
    headers: Headers = field(default_factory=Headers)  # of its last save

    def late(self) -> NDArray[np.bool_]:
        """Of each piece of the layout: whether any of it is captured after `save` has returned."""
        if self.assignment is None:
            return self.plan.lazy
        late = np.zeros(len(self.layout.pieces), np.bool_)
        late[self.assignment.positions[self.plan.lazy]] = True
        return late

    def places(self, described: Described) -> Places:
        """Where what is written lies."""
        mine = self.assignment
        return described.places if mine is None else described.places.take(mine.positions.tolist(), mine.blocks)


@dataclass(frozen=True, slots=True)
class Sections:
    """The text of all that is no tensor, by section. `objects`: what `replicated` is the text of."""

    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """A few bytes of what other ranks hold, too, as they were when `save` was called. `rows`: of the layout, or all."""

    rows: NDArray[np.int64] | None
    samples: Samples

    def at(self) -> LookedAt:
        """Blocks until devices have gathered theirs."""
        return LookedAt(self.rows, self.samples.digests())


@dataclass(slots=True, eq=False)
class SaveRun:
    """A save under way.

    arena_bytes  what would hold all of it
    check        whether what is captured late was changed before
    started      in seconds of the monotonic clock
    assignment   in a job of several ranks: what this one writes
    looked       in such a job
    sections     once they are encoded
    blocked_s    what the caller of `save` waited, once he has
    call         in which call of a verb it was started, by Turn's count
    handed_on    open once its caller is not needed any more: he has done his part, or it was `given_up`
    """

    save: Save
    draft: publish.Draft
    staged: Staged
    plan: WritePlan
    arena_bytes: int
    check: CounterCheck
    started: float
    assignment: Assignment | None = None
    looked: Looked | None = None
    moved: NDArray[np.int64] | None = None  # once captured: pieces whose memory went away before they were
    sections: Sections | None = None
    blocked_s: float = 0.0
    call: int = 0
    handed_on: Latch = field(default_factory=Latch)
    given_up: bool = False

    @property
    def writing(self) -> Writing:
        return self.staged.writing

    @property
    def text(self) -> Sections:
        assert self.sections is not None, "only what is encoded is handed on"
        return self.sections

    @property
    def outlasts_save(self) -> bool:
        """Whether sources are still read when `save` returns."""
        return self.plan.lazy_bytes > 0 or bool(self.staged.streams)

    def release_sources(self) -> None:
        """Wait until the caller may change the state, on the host or by its current stream of a device."""
        if not self.staged.streams:
            self.save.captured.result()  # which expedites
            return
        self.writing.expedite()
        self.writing.wait_queued()
        self.check.changed()  # the step that follows is no change
        for stream in self.staged.streams:
            stream.block_current()

    def written(self, receipt: Receipt) -> Written:
        """All segments are durable."""
        io, taken_s = receipt.io, time.monotonic() - self.started
        return Written(self.save.step, io.copied_bytes, io.direct_bytes, taken_s)

    def captured(self) -> Captured:
        """Everything has been captured: the sources are looked at a last time, and let go of."""
        self.check.changed()
        places, lazy = self.staged.places, np.flatnonzero(self.plan.lazy & (self.plan.length > 0))
        if places is not None and self.outlasts_save:
            self.moved = moved(places, lazy)
        self.let_sources_go()
        seconds, watched = time.monotonic() - self.started, self.writing.watched
        early_bytes = self.plan.bytes - self.plan.lazy_bytes
        return Captured(
            self.save.step, self.blocked_s, seconds, early_bytes, watched.exact_bytes, watched.sampled_bytes
        )

    def let_sources_go(self) -> None:
        """Nothing reads them any more."""
        self.staged = replace(self.staged, places=None, sources=())


class Captures:
    """Captures that go on beside training. Their overlap budget, from `save` on, ends with the fence."""

    def __init__(self, cap: int | None) -> None:
        """`cap` is what saves may write, in bytes per second; None for what the device gives."""
        self._cap = cap
        self._runs: list[SaveRun] = []  # replaced, never changed: `expedite` may come from any thread
        self._to_come: list[Unplanned] = []  # that begin in the background, once it is known what they write
        self._overlap_since: float | None = None  # since when the last save leaves training alone
        self._overlaps_s: tuple[float, ...] = ()  # the last four; replaced, as another thread may look
        self.arena_bytes = 0  # that would hold all of the last save
        self._pid = os.getpid()

    def add(self, run: SaveRun) -> None:
        self._runs = [*(other for other in self._runs if not other.save.captured.done()), run]

    def leave_alone(self, run: SaveRun) -> None:
        """Its caller goes on with training."""
        self._overlap_since = time.monotonic()
        self.arena_bytes = run.arena_bytes

    def expect(self, one: Unplanned) -> None:
        """A save begins in the background; `add` does not follow, and its capture has no overlap budget."""
        self._to_come = [*(other for other in self._to_come if not other.is_over), one]

    def wait_for_plan(self) -> bool:
        """Whether a save has yet to begin: those after it wait for their turn, as what they write may change, too."""
        return any(one.is_pending for one in self._to_come)

    def snapshot(self, arena: _native.Arena) -> None:
        """Copy what has no plan yet, oldest first, within the budget: the arena's. Any thread."""
        if os.getpid() != self._pid:
            return
        kept_bytes = max(arena.touched_bytes, min(FIRST_ARENA_BYTES, arena.budget_bytes // 2))
        for one in self._to_come:
            if not one.save.captured.done() and one.snapshot(self.spare_bytes(arena) - kept_bytes):
                one.save.captured.tell()

    def spare_bytes(self, arena: _native.Arena) -> int:
        """What such copies leave of the budget: the arena grows no further."""
        return arena.budget_bytes - sum(one.snapshot_bytes for one in self._to_come)

    def grow(self, arena: _native.Arena, total_bytes: int) -> None:
        """Once no save uses it."""
        arena.grow(min(total_bytes, self.spare_bytes(arena)), when_idle=True)

    def pace(self, plan: WritePlan, tuning: Tuning) -> Pace:
        """Lazy capture is to be done when the fence comes, and no sooner: training has the machine.

        It comes when it has come lately, at the soonest. As long as nobody knows when, only memory is kept free.
        """
        blocks = tuning.queue_depth + tuning.workers
        overlap_s = CAPTURE_SHARE_OF_OVERLAP * min(self._overlaps_s, default=0.0)
        return Pace(blocks, int(plan.bytes / overlap_s) + 1 if overlap_s else None, self._cap)

    def expedite(self) -> None:
        """Somebody waits for what is not captured yet. Any thread."""
        if os.getpid() != self._pid:
            return  # a fork's copies of native objects have no threads behind them
        for run in self._runs:
            run.writing.expedite()

    def fence(self) -> Fenced | None:
        """Wait until the state may change; None when it might."""
        started = time.monotonic()
        if self._overlap_since is not None:
            self._overlaps_s = (*self._overlaps_s, started - self._overlap_since)[-4:]
            self._overlap_since = None
        self._runs = waiting = [run for run in self._runs if not run.save.captured.done()]
        to_come = [one.save for one in self._to_come if not one.save.captured.done()]
        for run in waiting:
            run.release_sources()
        for save in to_come:
            save.captured.result()  # which snapshots what it can
        self._runs = []
        steps = [*(run.save.step for run in waiting), *(save.step for save in to_come)]
        return Fenced(max(steps), time.monotonic() - started) if steps else None


def plan_save(
    described: Described, known: CachedPlan | None, *, fence: Literal["auto", "manual"], rank: int,
    assignment: Assignment | None = None,
) -> CachedPlan:
    """The plan for what is `described`: the `known` one itself when nothing differs that it depends on."""
    waiter, layout = _waiter(described, fence), described.layout
    if known is not None and known.layout is layout and known.waiter == waiter:
        if known.assignment is assignment:
            return known
        if known.assignment and assignment and known.assignment.positions is assignment.positions:
            return replace(known, assignment=assignment)  # a new plan, in which this rank writes what it wrote
    lazy = _lazy(described, waiter)
    if assignment is None:
        plan = plan_writes(layout.pieces, aliases=layout.aliases, lazy=lazy, rank=rank)
    else:
        mine = assignment.positions.tolist()
        late = [lazy[at] for at in mine] if lazy else ()
        pieces = layout.pieces.take(mine, assignment.blocks)
        plan = plan_writes(pieces, lazy=late, rank=rank, alone=False)
    return CachedPlan(layout, waiter, plan, assignment)


def plan_together(
    step: int, described: Described, coordinator: SaveCoordinator, *, fence: Literal["auto", "manual"]
) -> CachedPlan:
    """The plan for a layout that is new, once all ranks have agreed on who writes what. Blocks."""
    is_far = any(memory.device != "cpu" for memory in described.places.apart.values())
    assignment = coordinator.assign(step, described.layout, is_far=is_far)
    try:
        return plan_save(described, None, fence=fence, rank=coordinator.rank, assignment=assignment)
    except Exception as error:
        coordinator.give_up(step, error)
        raise


def look(step: int, described: Described, assignment: Assignment | None) -> Looked:
    """Look at a few bytes of what other ranks hold, too; without a plan, of everything. Before the state can change."""
    compared = None if assignment is None else assignment.compared
    if compared is None:
        lengths = np.array([piece.bytes for piece in described.pieces], np.uint64)
        return Looked(None, take_samples(described.places, np.arange(len(lengths)), lengths, seed=step))
    at = compared.looked_at(step)
    rows = compared.rows[at]
    return Looked(rows, take_samples(described.places, rows, compared.length[at], seed=step))


def first_samples(pieces: Pieces, places: Places) -> NDArray[np.uint16]:
    """Digests of the same few lines of each piece, whenever that is asked."""
    lengths = np.array([piece.bytes for piece in pieces], np.uint64)
    return take_samples(places, np.arange(len(lengths)), lengths, seed=0).digests()


def unplanned(
    save: Save, described: Described, seen: Samples, started: float, *, fence: Literal["auto", "manual"]
) -> Unplanned:
    """A save that waits for its plan, with copies of all that would have to be captured before `save` returns."""
    lazy = _lazy(described, _waiter(described, fence))
    pieces = described.pieces
    late = np.array([one.bytes >= PACKED_BELOW_BYTES for one in pieces], np.bool_) & np.array(lazy or False, np.bool_)
    described.counters.begin(late)
    early = np.flatnonzero(~late).tolist()
    _ = described.objects, described.per_rank
    places, gone = snapshot(pieces, described.places, early)
    if gone:
        raise state_changed(tuple(pieces.names[at] for at in gone), path="", gone=True)
    described = replace(described, places=places)
    return Unplanned(save, described, late, seen, lazy or (False,) * len(pieces), time.monotonic() - started)


def _waiter(described: Described, fence: Literal["auto", "manual"]) -> Waiter:
    optimizers: Waiter = "optimizers" if described.optimizers else "nobody"
    return "caller" if fence == "manual" else optimizers


def _lazy(described: Described, waiter: Waiter) -> Sequence[bool]:
    layout = described.layout
    every: dict[Waiter, Sequence[bool]] = {
        "nobody": (), "optimizers": layout.lazy, "caller": (True,) * len(layout.pieces)
    }
    return every[waiter]


def start(
    store: Store, save: Save, cached: CachedPlan, described: Described, arena: _native.Arena, pace: Pace,
    started: float, spare_bytes: int, reserver: Reserver, identity: str | None = None, looked: Looked | None = None,
) -> SaveRun:
    """Start the capture of a save; `encode` is to follow. What fails leaves no draft. To be called uninterrupted.

    spare_bytes  that the arena may come to
    reserver     reserves the segments, where `_reserves_aside`
    identity  of the checkpoint to be, where several ranks make it
    looked    in such a job: what this rank has seen of what it will compare
    """
    plan, places, late = cached.plan, cached.places(described), cached.late()
    described.counters.begin(late)
    check = CounterCheck(described.counters, cached.layout, late, _lazy(described, cached.waiter))
    is_aside = _reserves_aside(store, cached)
    draft = publish.begin(store, save.step, identity)
    try:
        staged = _capture_into(
            store, draft, cached, places, arena, pace, tries=1 if identity is None else DRAFT_TRIES,
            reserved=not is_aside,
        )
    except BaseException as error:
        if identity is None:
            publish.discard(store, draft)
        elif getattr(error, "errno", 0) != errno.EEXIST:  # a file that is there is not ours
            publish.remove_own(store, draft, [segment.name for segment in plan.segments])
        raise
    arena_bytes = _arena_bytes(plan, staged, arena)
    run = SaveRun(save, draft, staged, plan, arena_bytes, check, started, cached.assignment, looked)
    try:
        arena.grow(min(arena_bytes, FIRST_ARENA_BYTES, spare_bytes))
        if is_aside:
            reserver(staged.writing.reserve)
    except BaseException:
        give_up(run, store)
        raise
    return run


def _reserves_aside(store: Store, cached: CachedPlan) -> bool:
    """Whether the segments are reserved beside the caller, who is not to wait for a file system that is busy.

    Where he waits for everything else, or plans, he waits for that, too. And a disk that has no room for all of it
    refuses the save here, where its caller looks first.
    """
    plan = cached.plan
    return plan.lazy_bytes > 0 and cached.headers.are_known and store.free_bytes() >= plan.file_bytes


def _capture_into(
    store: Store, draft: publish.Draft, cached: CachedPlan, places: Places, arena: _native.Arena, pace: Pace, *,
    tries: int, reserved: bool,
) -> Staged:
    """Start the capture. A rank that gives up may remove the empty directory that others are about to write into."""
    while True:
        try:
            return start_capture(
                store, draft.directory, cached.plan, places, arena, pace, cached.headers, seed=draft.step,
                reserved=reserved,
            )
        except StorageError as error:
            tries -= 1
            if error.errno != errno.ENOENT or tries <= 0:
                raise
        publish.begin(store, draft.step, draft.id)


def _arena_bytes(plan: WritePlan, staged: Staged, arena: _native.Arena) -> int:
    """What would hold all of a save. With bytes from a device, a block keeps room for the rest of a chunk."""
    if not staged.streams:
        return plan.file_bytes
    return plan.file_bytes * arena.block_bytes // (arena.block_bytes - CHUNK_BYTES)


def encode(run: SaveRun, described: Described) -> None:
    """What is no tensor, encoded while bytes move; returns once what is not lazy may change."""
    writing, objects = run.writing, described.objects
    run.sections = Sections(encode_sections(objects), encode_sections(described.per_rank), objects)
    if run.outlasts_save:
        writing.wait_early()
    else:
        writing.wait_captured()
    for stream in run.staged.streams:
        stream.block_current()
    run.blocked_s = time.monotonic() - run.started


def encoded(run: SaveRun, described: Described, store: Store) -> SaveRun:
    """The same on a thread that nobody interrupts; it leaves nothing where that fails."""
    try:
        encode(run, described)
    except BaseException:
        give_up(run, store)
        raise
    return run


def give_up(run: SaveRun, store: Store) -> None:
    """End a save that was started and cannot be finished."""
    run.writing.cancel()
    run.writing.receipt()
    if run.assignment is None:
        publish.discard(store, run.draft)
    else:
        publish.remove_own(store, run.draft, [segment.name for segment in run.plan.segments])


def receipt_of(run: SaveRun) -> Receipt:
    """Blocks until the segments are durable. Raises what went wrong; StateChangedError with the tensors' names."""
    receipt = run.writing.receipt()
    run.save.captured.await_end()  # told before anything that follows from it
    if run.moved is not None and len(run.moved) and not isinstance(receipt.error, StorageError):
        raise _gone(run, run.moved)
    counted = run.check.changed()
    if isinstance(receipt.error, StateChangedError):
        raise _with_names(receipt.error, run, counted)
    if receipt.error is not None:
        raise receipt.error
    if counted:
        raise state_changed(counted, path=run.draft.directory)
    return receipt


def commit(
    run: SaveRun, store: Store, store_id: str, coordinator: SaveCoordinator | None, *, shared: bool,
    emit: Callable[[Event], None],
) -> Manifest:
    """Wait until the segments are durable, then publish. So is the checkpoint when this returns.

    coordinator  publishes together, in a job of several ranks; `shared`: it has agreed on the plan
    raises       what went wrong, here or on another rank
    """
    if coordinator is None:
        try:
            receipt = receipt_of(run)
            emit(run.written(receipt))
            return _publish(run, receipt, store, store_id)
        except BaseException:
            publish.discard(store, run.draft)
            raise
    assignment, step = run.assignment, run.save.step
    assert assignment is not None
    if not shared:
        try:
            assignment = coordinator.assign(step, assignment.layout, begun=assignment)
        except Exception:
            give_up(run, store)  # also where it is undecided: nobody commits what was not shared out
            raise
    made: Contribution | Exception
    try:
        receipt = receipt_of(run)
        emit(run.written(receipt))
        made = contribution(run, receipt)
        if assignment.buffers:
            emit(BuffersFromOneRank(step, assignment.buffers))
    except Exception as error:
        made = error
    try:
        return coordinator.commit(step, made, assignment, store, run.draft, store_id)
    except Exception as error:
        if not (isinstance(error, RankError) and error.undecided):
            publish.remove_own(store, run.draft, [segment.name for segment in run.plan.segments])
        raise


def _publish(run: SaveRun, receipt: Receipt, store: Store, store_id: str) -> Manifest:
    plan, sections = run.plan, run.text
    return publish.publish(
        store, run.draft, store_id=store_id, segments=_segments(run),
        index=index_file(plan, run.staged.offsets, receipt.digests), totals=plan.frame.totals,
        objects=join_objects(sections.replicated, {name: [text] for name, text in sections.per_rank.items()}),
        receipt=receipt, writer=f"flowstone {__version__}", ranks=1,
    )


def contribution(run: SaveRun, receipt: Receipt) -> Contribution:
    """What this rank has to commit, of a save whose segments are durable."""
    return Contribution(
        _segments(run), run.plan.segment, run.staged.offsets, receipt, run.text.replicated,
        run.text.per_rank, run.text.objects, None if run.looked is None else run.looked.at(),
    )


def _segments(run: SaveRun) -> list[SegmentRow]:
    return [
        SegmentRow(at, None, file.name, file.bytes, file.header_bytes, header)
        for at, (file, header) in enumerate(zip(run.plan.segments, run.staged.headers, strict=True))
    ]


def _with_names(error: StateChangedError, run: SaveRun, counted: tuple[str, ...]) -> StateChangedError:
    """The error with the tensors whose bytes had changed, or were gone; and of those that `counted` a change."""
    plan, offsets = run.plan, run.staged.offsets
    hit = (offsets < error.offset + error.length) & (offsets + plan.length > error.offset)
    inside = [number for number, segment in enumerate(plan.segments) if error.path.endswith(f"/{segment.name}")]
    names = [plan.pieces.names[at] for at in np.flatnonzero(hit & np.isin(plan.segment, inside)).tolist()]
    told = tuple(dict.fromkeys([*names, *(() if error.gone else counted)]))
    return state_changed(told, path=error.path, offset=error.offset, length=error.length, gone=error.gone)


def _gone(run: SaveRun, pieces: NDArray[np.int64]) -> StateChangedError:
    """The memory of these pieces went away before all was captured."""
    plan, first = run.plan, int(pieces[0])
    names = tuple(plan.pieces.names[at] for at in pieces.tolist())
    path = f"{run.draft.directory}/{plan.segments[int(plan.segment[first])].name}"
    offset, length = int(run.staged.offsets[first]), int(plan.length[first])
    return state_changed(names, path=path, offset=offset, length=length, gone=True)
