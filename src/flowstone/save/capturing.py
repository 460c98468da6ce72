"""The start of a capture: create this rank's segment files, and start the engine that fills them. On failure no file is
left.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from flowstone._native import Arena
from flowstone.commit import publish
from flowstone.config import CHUNK_BYTES, DRAFT_ATTEMPTS, NAMES_LISTED_MAX, Watch
from flowstone.coordination.messages import Assignment
from flowstone.errors import StateChangedError, StorageError
from flowstone.format.manifest import SegmentRow
from flowstone.plan.write import WritePlan
from flowstone.save.plan_cache import CachedPlan, lazy_pieces
from flowstone.stage.capture import CaptureSources, WriteTarget, start_capture, watch_sources
from flowstone.state import StateDescription, VersionCheck
from flowstone.store.base import Pace, Store, WriteHandle

if TYPE_CHECKING:
    from flowstone.delta.base import BaseReferences
    from flowstone.delta.baselines import Baselines


class Capture(msgspec.Struct, frozen=True, eq=False):
    """A capture that has begun.

    check        detects changes, before their capture, of lazy tensors (those captured after `save` has returned)
    arena_bytes  size of the staging memory that would hold the full save
    referred     chunks of an earlier checkpoint to which this save refers, because their tensors are unchanged
    is_reserved  whether the segment files have their full size; otherwise another thread is allocating their space
    """

    draft: publish.Draft
    plan: WritePlan
    referred: BaseReferences | None
    assignment: Assignment
    sources: CaptureSources
    writing: WriteHandle
    check: VersionCheck
    arena_bytes: int
    is_reserved: bool

    @property
    def segments(self) -> list[SegmentRow]:
        """The manifest's rows for those of this rank's segment files whose headers list pieces. The other files, with
        the entry `__chunks__` (docs/FORMAT.md, Delta), get rows only if they are used: see delta/base.py.
        """
        return [
            SegmentRow(number, None, file.name, file.bytes, file.header_bytes, header)
            for number, (file, header) in enumerate(zip(self.plan.segments, self.sources.headers, strict=True))
            if not file.chunks
        ]

    def remove(self, store: Store) -> None:
        """Remove this rank's files of a save that was certainly not published."""
        _remove(store, self.draft, self.plan, self.referred)

    def abandon(self, store: Store) -> None:
        """Cancel the capture of a save that cannot be finished, and remove its files."""
        self.writing.cancel()
        self.writing.receipt()
        self.remove(store)


def watch(cached: CachedPlan, described: StateDescription, how: Watch, step: int) -> CaptureSources:
    """Detect changes of lazily captured tensors from now on. A save that is interrupted, or captures nothing, leaves no
    watch behind.
    """
    described.counters.watch(cached.late())
    return watch_sources(cached.plan, cached.places(described), cached.headers, watch=how, seed=step)


def begin_capture(
    target: WriteTarget, draft: publish.Draft, cached: CachedPlan, described: StateDescription, sources: CaptureSources,
    pace: Pace, baselines: Baselines | None,
) -> Capture:
    """Start the capture of a save into its unpublished files, `target`. Must be called where no signal handler can
    interrupt it.
    """
    store, plan, lazy = target.store, cached.plan, lazy_pieces(cached.layout, cached.waiter)
    check = VersionCheck(described.counters, cached.layout, cached.late(), lazy)
    is_aside = _reserves_aside(store, sources)
    referred: BaseReferences | None = None
    try:
        if baselines is not None:
            referred = baselines.refer(draft, plan, cached.kept)
        chunks = None if referred is None else referred.chunks
        writing = _capture_into(replace(target, base=chunks), draft, sources, pace, reserved=not is_aside)
    except BaseException as error:
        if getattr(error, "errno", 0) != errno.EEXIST:  # a file that exists already belongs to another save
            _remove(store, draft, plan, referred)
        raise
    arena_bytes = arena_bytes_for(plan.file_bytes, target.arena) if sources.streams else plan.file_bytes
    return Capture(
        draft, plan, referred, cached.assignment, sources, writing, check, arena_bytes, is_reserved=not is_aside
    )


def _remove(store: Store, draft: publish.Draft, plan: WritePlan, referred: BaseReferences | None) -> None:
    linked = [] if referred is None else [row.name for row in referred.segments]
    publish.remove_own_files(store, draft, [*(segment.name for segment in plan.segments), *linked])


def _reserves_aside(store: Store, sources: CaptureSources) -> bool:
    """Whether another thread allocates the disk space of the segment files, so that the caller does not wait for a busy
    file system.

    The caller itself allocates the space if it waits for the full save anyway, or if no earlier save has used this
    plan. It also does so if free space seems too small, so that the call of `save` fails; but not in stores that check
    free space themselves.
    """
    plan = sources.plan
    if plan.lazy_bytes == 0 or not sources.planned:
        return False
    return store.capabilities.checks_room or store.free_bytes() >= plan.file_bytes


def _capture_into(
    target: WriteTarget, draft: publish.Draft, sources: CaptureSources, pace: Pace, *, reserved: bool
) -> WriteHandle:
    """Start the capture. Tries again if another rank abandons its save and so removes the empty directory."""
    tries = DRAFT_ATTEMPTS
    while True:
        try:
            return start_capture(target, sources, pace, reserved=reserved)
        except StorageError as error:
            tries -= 1
            if error.errno != errno.ENOENT or tries <= 0:
                raise
        publish.begin_draft(target.store, draft.step, draft.id)


def arena_bytes_for(file_bytes: int, arena: Arena) -> int:
    """Size of the staging memory that holds `file_bytes` from devices. Each of its blocks has extra room for the end of
    a chunk.
    """
    return file_bytes * arena.block_bytes // (arena.block_bytes - CHUNK_BYTES)


def state_changed(
    names: tuple[str, ...], *, path: str, offset: int = 0, length: int = 0, gone: bool = False
) -> StateChangedError:
    """The error for tensors that changed (`gone`: were freed) before their capture. `path`, `offset` and `length` say
    where their bytes would have been stored.
    """
    listed = ", ".join(names[:NAMES_LISTED_MAX]) + f" and {len(names) - NAMES_LISTED_MAX} more" * (
        len(names) > NAMES_LISTED_MAX
    )
    if gone:
        subject = f"the memory of {listed} was freed"
        remedy = "call fence() before you share, resize or free memory that is being saved"
    else:
        subject = f"{listed} changed"
        remedy = "put the optimizer that changes these tensors into the state, or call fence() before you change them"
    was = "it was" if len(names) == 1 or gone else "they were"
    return StateChangedError(
        f"{subject} before {was} captured", path=path, offset=offset, length=length, names=names, gone=gone, next=remedy
    )
