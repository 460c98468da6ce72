"""The begin of a capture: create a draft's segments, start the engine that fills them. On failure no file is left."""

from __future__ import annotations

import errno

import msgspec
from msgspec.structs import replace

from flowstone import _native
from flowstone.commit import publish
from flowstone.config import CHUNK_BYTES, DRAFT_TRIES, Watch
from flowstone.errors import StorageError
from flowstone.format.manifest import SegmentRow
from flowstone.pipeline.base import Base, Referred, refer
from flowstone.pipeline.messages import Assignment
from flowstone.pipeline.plan_cache import CachedPlan, lazy_pieces
from flowstone.plan.write import WritePlan
from flowstone.stage.capture import Sources, WriteTarget, start_capture, watch_sources
from flowstone.state import CounterCheck, Described
from flowstone.store.base import Pace, Store, Writing


class Capture(msgspec.Struct, frozen=True, eq=False):
    """A capture that has begun.

    check        whether pieces that are captured late changed before their capture
    arena_bytes  size of an arena that would hold the whole save
    referred     to what the base has, if some pieces rest
    is_reserved  the segments have their full size; else another thread allocates it: see `_reserves_aside`
    """

    draft: publish.Draft
    plan: WritePlan
    referred: Referred | None
    assignment: Assignment
    sources: Sources
    writing: Writing
    check: CounterCheck
    arena_bytes: int
    is_reserved: bool

    @property
    def segments(self) -> list[SegmentRow]:
        """Those that list tensors."""
        return [
            SegmentRow(at, None, file.name, file.bytes, file.header_bytes, header)
            for at, (file, header) in enumerate(zip(self.plan.segments, self.sources.headers, strict=True))
            if not file.chunks
        ]

    def remove(self, store: Store) -> None:
        """Remove this rank's files of a draft that is certainly not published."""
        _remove(store, self.draft, self.plan, self.referred)

    def abandon(self, store: Store) -> None:
        """Cancel the capture of a save that cannot be finished, and remove its files."""
        self.writing.cancel()
        self.writing.receipt()
        self.remove(store)


def watch(cached: CachedPlan, described: Described, how: Watch, step: int) -> Sources:
    """Watch what is captured late from now on. Nothing is left of it if it is interrupted, or never captured."""
    described.counters.begin(cached.late())
    return watch_sources(cached.plan, cached.places(described), cached.headers, watch=how, seed=step)


def begin_capture(
    target: WriteTarget, draft: publish.Draft, cached: CachedPlan, described: Described, sources: Sources, pace: Pace,
    base: Base | None,
) -> Capture:
    """Start the capture of a save into its draft, `target`. Call it uninterrupted."""
    store, plan, lazy = target.store, cached.plan, lazy_pieces(cached.layout, cached.waiter)
    check = CounterCheck(described.counters, cached.layout, cached.late(), lazy)
    is_aside = _reserves_aside(store, sources)
    referred: Referred | None = None
    try:
        if plan.rests.any() or cached.kept is not None:
            referred = refer(store, draft, base, plan, cached.kept)
        chunks = None if referred is None else referred.chunks
        writing = _capture_into(replace(target, base=chunks), draft, sources, pace, reserved=not is_aside)
    except BaseException as error:
        if getattr(error, "errno", 0) != errno.EEXIST:  # a file that existed before is not ours
            _remove(store, draft, plan, referred)
        raise
    arena_bytes = with_rests(plan.file_bytes, target.arena) if sources.streams else plan.file_bytes
    return Capture(
        draft, plan, referred, cached.assignment, sources, writing, check, arena_bytes, is_reserved=not is_aside
    )


def _remove(store: Store, draft: publish.Draft, plan: WritePlan, referred: Referred | None) -> None:
    linked = [] if referred is None else [row.name for row in referred.segments]
    publish.remove_own(store, draft, [*(segment.name for segment in plan.segments), *linked])


def _reserves_aside(store: Store, sources: Sources) -> bool:
    """Whether another thread allocates the segments, so that the caller does not wait for a busy file system.

    The caller does it if it waits for the whole save anyway, or still has to plan; also if free space looks too
    small, so that the call of `save` itself fails (a store may see to that by itself).
    """
    plan = sources.plan
    if plan.lazy_bytes == 0 or not sources.planned:
        return False
    return store.capabilities.checks_room or store.free_bytes() >= plan.file_bytes


def _capture_into(
    target: WriteTarget, draft: publish.Draft, sources: Sources, pace: Pace, *, reserved: bool
) -> Writing:
    """Start the capture. Retries if a rank that gives up removes the empty directory in between."""
    tries = DRAFT_TRIES
    while True:
        try:
            return start_capture(target, sources, pace, reserved=reserved)
        except StorageError as error:
            tries -= 1
            if error.errno != errno.ENOENT or tries <= 0:
                raise
        publish.begin(target.store, draft.step, draft.id)


def with_rests(file_bytes: int, arena: _native.Arena) -> int:
    """Size of an arena that holds so many bytes of devices: a block of these also has room for the rest of a chunk."""
    return file_bytes * arena.block_bytes // (arena.block_bytes - CHUNK_BYTES)
