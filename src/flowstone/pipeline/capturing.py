"""The begin of a capture: a draft's segments, and the engine that fills them. What fails leaves no file behind."""

from __future__ import annotations

import errno

import msgspec

from flowstone import _native
from flowstone.commit import publish
from flowstone.config import CHUNK_BYTES, DRAFT_TRIES
from flowstone.errors import StorageError
from flowstone.format.manifest import SegmentRow
from flowstone.pipeline.messages import Assignment
from flowstone.pipeline.plan_cache import CachedPlan, lazy_pieces
from flowstone.plan.write import WritePlan
from flowstone.stage.capture import Staged, WriteTarget, start_capture
from flowstone.state import CounterCheck, Described
from flowstone.store.base import Pace, Store
from flowstone.table.pieces import Places


class Capture(msgspec.Struct, frozen=True, eq=False):
    """A capture that has begun.

    check        whether what is captured late was changed before
    arena_bytes  what would hold all of it
    is_reserved  the segments have their size; else another thread gives it to them: see `_reserves_aside`
    """

    draft: publish.Draft
    plan: WritePlan
    assignment: Assignment
    staged: Staged
    check: CounterCheck
    arena_bytes: int
    is_reserved: bool

    @property
    def segments(self) -> list[SegmentRow]:
        return [
            SegmentRow(at, None, file.name, file.bytes, file.header_bytes, header)
            for at, (file, header) in enumerate(zip(self.plan.segments, self.staged.headers, strict=True))
        ]

    def remove(self, store: Store) -> None:
        """Remove what this rank has written of a draft that is surely not published."""
        _remove(store, self.draft, self.plan)

    def abandon(self, store: Store) -> None:
        """End it, of a save that cannot be finished."""
        self.staged.writing.cancel()
        self.staged.writing.receipt()
        self.remove(store)


def begin_capture(
    store: Store, draft: publish.Draft, cached: CachedPlan, described: Described, arena: _native.Arena, pace: Pace
) -> Capture:
    """Start the capture of a save into its draft. To be called uninterrupted."""
    plan, places, late = cached.plan, cached.places(described), cached.late()
    described.counters.begin(late)
    lazy = lazy_pieces(cached.layout, cached.waiter)
    check = CounterCheck(described.counters, cached.layout, late, lazy)
    is_aside = _reserves_aside(store, cached)
    try:
        staged = _capture_into(store, draft, cached, places, arena, pace, reserved=not is_aside)
    except BaseException as error:
        if getattr(error, "errno", 0) != errno.EEXIST:  # a file that is there is not ours
            _remove(store, draft, plan)
        raise
    return Capture(
        draft, plan, cached.assignment, staged, check, _arena_bytes(plan, staged, arena), is_reserved=not is_aside
    )


def _remove(store: Store, draft: publish.Draft, plan: WritePlan) -> None:
    publish.remove_own(store, draft, [segment.name for segment in plan.segments])


def _reserves_aside(store: Store, cached: CachedPlan) -> bool:
    """Whether the segments are reserved beside the caller, who is not to wait for a file system that is busy.

    Where he waits for everything else, or plans, he waits for that, too. And a disk that has no room for all of it
    refuses the save here, where its caller looks first.
    """
    plan = cached.plan
    return plan.lazy_bytes > 0 and cached.headers.are_known and store.free_bytes() >= plan.file_bytes


def _capture_into(
    store: Store, draft: publish.Draft, cached: CachedPlan, places: Places, arena: _native.Arena, pace: Pace, *,
    reserved: bool,
) -> Staged:
    """Start the capture. A rank that gives up may remove the empty directory that others are about to write into."""
    tries = DRAFT_TRIES
    while True:
        try:
            return start_capture(
                WriteTarget(store, draft.directory, arena), cached.plan, places, pace, cached.headers,
                seed=draft.step, reserved=reserved,
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
