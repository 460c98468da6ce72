"""Pacing: how fast lazy captures run during training, until a thread waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from flowstone import _native
from flowstone.config import (
    CAPTURE_SHARE_OF_OVERLAP,
    COPIES_BYTES,
    COPIES_SHARE,
    COPY_BYTES_PER_S,
    FENCE_WAIT_S,
    FIRST_ARENA_BYTES,
    Tuning,
)
from flowstone.events import Fenced
from flowstone.pipeline.save_run import SaveRun
from flowstone.plan.write import WritePlan
from flowstone.stage.arena import default_budget_bytes, open_write_arena
from flowstone.stage.device import side_stream
from flowstone.store.base import Pace, Store

if TYPE_CHECKING:
    from flowstone.pipeline.preparing import Preparation

_BLOCKS_MIN = 4  # for a save: some are written while others are filled


class Captures:
    """Captures that run during training. The overlap budget begins with `save` and ends with the fence."""

    def __init__(self, store: Store, budget_bytes: int | None, cap: int | None, *, copies: bool = False) -> None:
        """`cap`: bytes per second that saves may write; None: no limit. `copies`: states may wait for a plan."""
        self._store, self._budget_bytes, self._cap = store, budget_bytes, cap
        self._copies = copies
        self._arena: _native.Arena | None = None
        self._runs: list[SaveRun] = []  # replaced, never changed: `expedite` may run on any thread
        self._overlap_since: float | None = None  # since when the last save runs beside training
        self._overlaps_s: tuple[float, ...] = ()  # of the last four saves; replaced, since another thread may read it
        self.arena_bytes = 0  # size of an arena that would hold the whole last save
        self._pid = os.getpid()

    @property
    def arena(self) -> _native.Arena:
        """The arena for saves, opened by the first one. It grows in the background, within the budget."""
        if self._arena is None:
            self._arena = open_write_arena(self._store, self.budget_bytes)
        return self._arena

    def open_for(self, devices: Iterable[str]) -> _native.Arena:
        """The arena; made with blocks that suit memory of these devices, if it is not open yet."""
        if self._arena is None:
            is_far = any(side_stream(device) is not None for device in devices)
            self._arena = open_write_arena(self._store, self.budget_bytes, is_far=is_far)
        return self._arena

    @cached_property
    def budget_bytes(self) -> int:
        """That of the arena, about: it has whole blocks."""
        return default_budget_bytes() if self._budget_bytes is None else self._budget_bytes

    @property
    def left_bytes(self) -> int:
        """What the arena has not taken of the budget."""
        return self.budget_bytes - (0 if self._arena is None else self._arena.touched_bytes)

    @cached_property
    def preparation(self) -> Preparation:
        """How it was made ready for devices, or by `prepare`."""
        from flowstone.pipeline.preparing import Preparation  # imported here: most processes need neither

        return Preparation()

    def close(self) -> None:
        """Release its memory."""
        if self._arena is not None:
            self._arena.close()

    def add(self, run: SaveRun) -> None:
        """Add a save that is captured from now on, or waits for its plan; the latter gets no overlap budget."""
        self._runs = [*self._left(), run]

    def _left(self) -> list[SaveRun]:
        return [run for run in self._runs if run.holds_copies or not run.save.captured.done()]

    def leave_alone(self, run: SaveRun) -> None:
        """The caller of `save` goes on with training: the overlap budget begins."""
        self._overlap_since = time.monotonic()
        self.arena_bytes = run.begun.arena_bytes

    def wait_for_plan(self) -> bool:
        """Whether a save still waits for its plan: later ones queue behind it, since their assignment may change too.
        """
        return any(run.awaits_plan for run in self._runs)

    def snapshot(self) -> None:
        """Copy the states of saves without a plan, oldest first, as far as the arena's budget allows. Any thread."""
        if os.getpid() != self._pid:
            return
        for run in self._runs:
            if not run.save.captured.done() and run.copy(self.room_for_copies):
                run.save.captured.tell()

    @property
    def _copied_bytes(self) -> int:
        return sum(run.copied_bytes for run in self._runs)

    @property
    def arena_bytes_max(self) -> int:
        """The arena does not grow beyond what copies of states without a plan leave of the budget.

        Where there may be some, a part of it is theirs for good. So small ones fit, and `save` need not wait for other
        ranks, however large the arena has become. An arena of few blocks has none to spare.
        """
        arena, copied = self.arena, self._copied_bytes
        if not self._copies or arena.budget_bytes < arena.block_bytes / COPIES_SHARE:
            return arena.budget_bytes - copied
        most = arena.budget_bytes - max(copied, min(COPIES_BYTES, int(arena.budget_bytes * COPIES_SHARE)))
        return most // arena.block_bytes * arena.block_bytes

    @property
    def room_for_copies(self) -> int:
        """For further copies: the arena keeps what it has, or needs for a first save."""
        arena = self.arena
        kept_bytes = max(arena.touched_bytes, min(FIRST_ARENA_BYTES, arena.budget_bytes // 2))
        return arena.budget_bytes - self._copied_bytes - kept_bytes

    def grow(self, total_bytes: int) -> None:
        """Grow the arena once no save uses it."""
        self.arena.grow(min(total_bytes, self.arena_bytes_max), when_idle=True)

    def pace(self, plan: WritePlan, tuning: Tuning) -> Pace:
        """Make lazy capture end just before the fence, no sooner, so that training keeps the machine.

        The fence is expected after the shortest of the last overlaps. While none is known, only memory is kept free.
        """
        # Twice what the device has: it ends all requests at about the same time, and would wait for the next ones.
        requests = 2 * tuning.queue_depth + tuning.workers
        block_bytes = self.arena.block_bytes
        blocks = max(_BLOCKS_MIN, requests * min(tuning.request_bytes, block_bytes) // block_bytes)
        overlap_s = CAPTURE_SHARE_OF_OVERLAP * min(self._overlaps_s, default=0.0)
        return Pace(blocks, int(plan.bytes / overlap_s) + 1 if overlap_s else None, self._cap)

    def expedite(self) -> None:
        """A thread waits for pieces that are not captured yet. Any thread."""
        if os.getpid() != self._pid:
            return  # native objects have no threads in a forked child
        for run in self._runs:
            run.expedite()

    def fence(self) -> Fenced | None:
        """Wait until the state may change; None if no wait was needed."""
        started = time.monotonic()
        if self._overlap_since is not None:
            self._overlaps_s = (*self._overlaps_s, started - self._overlap_since)[-4:]
            self._overlap_since = None
        waiting = [run for run in self._runs if not run.save.captured.done()]
        for run in waiting:
            run.release_sources()
        self._runs = self._left()
        if not waiting:
            return None
        newest = max(waiting, key=lambda run: run.save.step)
        fenced = newest.spans.between("fenced", started, time.monotonic())
        return Fenced(newest.save.step, fenced.seconds)

    def grow_for(self, fenced: Fenced) -> None:
        """Grow the arena if a step had to wait: steps are shorter than writes, so the next save needs more memory to
        copy to.
        """
        if fenced.waited_s > FENCE_WAIT_S and self._arena is not None:
            more = self._arena.touched_bytes + int(fenced.waited_s * COPY_BYTES_PER_S)
            self.grow(min(more, self.arena_bytes))
