"""Pacing: how fast lazy captures, those that continue after `save` has returned, run during training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from flowstone._native import Arena
from flowstone.config import (
    CAPTURE_SHARE_OF_OVERLAP,
    COPIES_BYTES,
    COPIES_SHARE,
    COPY_BYTES_PER_S,
    FENCE_WAIT_S,
    FIRST_ARENA_BYTES,
    Tuning,
)
from flowstone.events.phases import Fenced
from flowstone.plan.write import WritePlan
from flowstone.save.pending_save import PendingSave
from flowstone.stage.arena import default_budget_bytes, open_write_arena
from flowstone.stage.device import side_stream
from flowstone.store.base import Pace, Store

if TYPE_CHECKING:
    from flowstone.save.preparing import Preparation

_BLOCKS_MIN = 4  # fewest arena blocks that a save uses, so that some are written while others are filled


class Captures:
    """Captures that run during training. The time from the return of `save` to the wait of the next optimizer step is
    their overlap budget.
    """

    def __init__(self, store: Store, budget_bytes: int | None, cap: int | None, *, copies: bool = False) -> None:
        """`cap`: limit of bytes per second; None: no limit. `copies`: whether tensors may be copied while their save
        waits for a plan.
        """
        self._store, self._budget_bytes, self._cap = store, budget_bytes, cap
        self._copies = copies
        self._arena: Arena | None = None
        self._pending: list[PendingSave] = []  # replaced, never changed: `expedite` may run on any thread
        self._overlap_since: float | None = None  # when the caller of the last save resumed training
        self._overlaps_s: tuple[float, ...] = ()  # of the last four saves; replaced, as another thread may read it
        self.arena_bytes = 0  # size of an arena that would hold the full last save
        self._pid = os.getpid()

    @property
    def arena(self) -> Arena:
        """The staging memory of saves, opened by the first save. It grows in the background, within the budget."""
        if self._arena is None:
            self._arena = open_write_arena(self._store, self.budget_bytes)
        return self._arena

    def open_for(self, devices: Iterable[str]) -> Arena:
        """The staging memory (arena). If it is not open yet, its blocks get a size that suits memory of these devices.
        """
        if self._arena is None:
            is_far = any(side_stream(device) is not None for device in devices)
            self._arena = open_write_arena(self._store, self.budget_bytes, is_far=is_far)
        return self._arena

    @cached_property
    def budget_bytes(self) -> int:
        """The budget of the arena, rounded to blocks."""
        return default_budget_bytes() if self._budget_bytes is None else self._budget_bytes

    @property
    def left_bytes(self) -> int:
        """How much of the memory budget the arena has not taken, in bytes."""
        return self.budget_bytes - (0 if self._arena is None else self._arena.touched_bytes)

    @cached_property
    def preparation(self) -> Preparation:
        """The object that pins and places the arena for devices, and reports how it was prepared."""
        from flowstone.save.preparing import Preparation  # imported here: most processes need neither

        return Preparation()

    def close(self) -> None:
        """Release the arena's memory."""
        if self._arena is not None:
            self._arena.close()

    def add(self, pending: PendingSave) -> None:
        """Add a save that is captured from now on, or waits for its plan. The time that a save waits does not count
        as its overlap budget.
        """
        self._pending = [*self._left(), pending]

    def _left(self) -> list[PendingSave]:
        return [pending for pending in self._pending if pending.holds_copies or not pending.save.captured.done()]

    def begin_overlap(self, pending: PendingSave) -> None:
        """Record that the caller of `save` continues training, so that the overlap budget begins."""
        self._overlap_since = time.monotonic()
        self.arena_bytes = pending.begun.arena_bytes

    @property
    def any_awaits_plan(self) -> bool:
        """Whether a save still waits for its plan. Later saves must then wait, too, because that plan may change which
        rank writes which tensors.
        """
        return any(pending.awaits_plan for pending in self._pending)

    def snapshot(self) -> None:
        """Copy the states of saves that have no plan yet, oldest first, as far as the memory budget allows. Can be
        called on any thread.
        """
        if os.getpid() != self._pid:
            return
        for pending in self._pending:
            if not pending.save.captured.done() and pending.copy(self.room_for_copies):
                pending.save.captured.complete()

    @property
    def _copied_bytes(self) -> int:
        return sum(pending.copied_bytes for pending in self._pending)

    @property
    def arena_bytes_max(self) -> int:
        """The largest size of the arena: the budget, less the bytes that are reserved for copies. A save copies tensors
        while it waits for its plan, that is, until the ranks have agreed which rank writes which tensors.

        With the reserved bytes, small states can always be copied, and `save` need not wait for other ranks. Nothing is
        reserved if states are never copied, or the budget is only a few blocks.
        """
        arena, copied = self.arena, self._copied_bytes
        if not self._copies or arena.budget_bytes < arena.block_bytes / COPIES_SHARE:
            return arena.budget_bytes - copied
        most = arena.budget_bytes - max(copied, min(COPIES_BYTES, int(arena.budget_bytes * COPIES_SHARE)))
        return most // arena.block_bytes * arena.block_bytes

    @property
    def room_for_copies(self) -> int:
        """How many bytes may still be copied: the budget, less existing copies, less the arena's size (or, before the
        first save, its expected size).
        """
        arena = self.arena
        kept_bytes = max(arena.touched_bytes, min(FIRST_ARENA_BYTES, arena.budget_bytes // 2))
        return arena.budget_bytes - self._copied_bytes - kept_bytes

    def grow(self, total_bytes: int) -> None:
        """Grow the arena to `total_bytes`, once no save uses it."""
        self.arena.grow(min(total_bytes, self.arena_bytes_max), when_idle=True)

    def pace(self, plan: WritePlan, tuning: Tuning) -> Pace:
        """The rate at which a save's tensors are captured: lazy capture should end just before the next optimizer step
        waits for it, and no sooner, so that training keeps the machine's cores and memory bandwidth.

        An overlap is the time from when training continues after a save until the next fence (`fence()`, or before an
        optimizer step). The next optimizer step is expected after the shortest of the last four overlaps. Until one has
        been measured, there is no limit based on that time; the number of blocks is limited in any case.
        """
        # Blocks for twice the queue depth: the device ends all its requests at about the same time, and would otherwise
        # have to wait for new ones.
        requests = 2 * tuning.queue_depth + tuning.workers
        block_bytes = self.arena.block_bytes
        blocks = max(_BLOCKS_MIN, requests * min(tuning.request_bytes, block_bytes) // block_bytes)
        overlap_s = CAPTURE_SHARE_OF_OVERLAP * min(self._overlaps_s, default=0.0)
        return Pace(blocks, int(plan.bytes / overlap_s) + 1 if overlap_s else None, self._cap)

    def expedite(self) -> None:
        """Capture at full speed, because a thread waits for pieces that are not captured yet. Can be called on any
        thread.
        """
        if os.getpid() != self._pid:
            return  # native objects have no threads in a forked child
        for pending in self._pending:
            pending.expedite()

    def expedite_captured(self, step: int) -> None:
        """Capture at full speed, because a thread waits for `captured` of this save. If the save has no plan yet, copy
        its state instead. Can be called on any thread.
        """
        if any(pending.save.step == step and pending.pending_plan is not None for pending in self._pending):
            self.snapshot()
        else:
            self.expedite()

    def fence(self) -> Fenced | None:
        """Wait until all pending saves are captured, so that the state may change. Returns the event about the wait;
        None if no wait was needed.
        """
        started = time.monotonic()
        if self._overlap_since is not None:
            self._overlaps_s = (*self._overlaps_s, started - self._overlap_since)[-4:]
            self._overlap_since = None
        waiting = [pending for pending in self._pending if not pending.save.captured.done()]
        for pending in waiting:
            pending.release_sources()
        self._pending = self._left()
        if not waiting:
            return None
        newest = max(waiting, key=lambda pending: pending.save.step)
        fenced = newest.spans.between("fenced", started, time.monotonic())
        return Fenced(newest.save.step, fenced.seconds)

    def grow_for(self, fenced: Fenced) -> None:
        """Grow the arena after an optimizer step had to wait: training steps are shorter than writes, so the next save
        needs more blocks.
        """
        if fenced.waited_s > FENCE_WAIT_S and self._arena is not None:
            more = self._arena.touched_bytes + int(fenced.waited_s * COPY_BYTES_PER_S)
            self.grow(min(more, self.arena_bytes))
