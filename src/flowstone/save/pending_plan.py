"""A save that cannot begin yet: the ranks have not agreed on its plan.

Until then its state stays in the caller's memory. `save` copies the tensors that may change once it returns, and waits
if the budget has no room for these copies. An optimizer step that begins before the plan exists does not wait for the
plan: it first copies all other tensors, if they fit, and the save continues from the copies. This module detects
changes of the state meanwhile: every write into memory that the system can watch, and other changes by version counters
and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.config import PACKED_BELOW_BYTES, Watch
from flowstone.errors import StateChangedError
from flowstone.log import log
from flowstone.runtime.signal_shield import Latch
from flowstone.save.capturing import state_changed
from flowstone.save.plan_cache import FenceMode, lazy_pieces, waiter_of
from flowstone.stage.early_snapshot import choose_copied, snapshot_one, snapshot_pieces
from flowstone.stage.early_watch import EarlyWatch
from flowstone.stage.moved_storage import storage_moved
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import StateDescription, VersionCheck, VersionCounters


class PendingPlan:
    """A save without a plan yet. Two threads use it. Before an optimizer step changes the state, the training thread
    calls `snapshot` to copy it. Once the ranks have a plan, the writer's thread calls `take`.

    early_bytes     bytes that `save` copied; 0 after `release`
    snapshot_bytes  bytes that were copied before an optimizer step; 0 after `release`
    holds_caller    whether `save` waits, because its budget has no room for copies of all pieces that may change after
                    it returns
    released        set once `save` may return
    """

    def __init__(
        self, step: int, described: StateDescription, late: NDArray[np.bool_], watch: EarlyWatch, seen: Samples,
        guarded: Sequence[bool], *, holds_caller: bool,
    ) -> None:
        """`described` lists the state's pieces (tensors or parts of them).

        late     for each piece whether it may be captured after `save` returned; of all others `described` has copies
        watch    detects changes of the late pieces since `save` was called
        seen     samples of every piece, taken when `save` was called
        guarded  for each piece whether a change before its capture is an error
        """
        self._step = step
        self._described: StateDescription | None = described  # until it is taken
        self._taken: StateDescription | None = None  # from `take` until `release`
        self._copies: dict[int, tuple[int, object]] = {}  # late piece -> address and owner of its copy
        self._late, self._watch, self._seen, self._guarded = late, watch, seen, guarded
        self._left = np.flatnonzero(late).tolist()
        self._lengths = described.pieces.lengths()
        self.early_bytes, self.snapshot_bytes = int(self._lengths[~late].sum()), 0
        self.holds_caller, self.released = holds_caller, Latch()
        self._copying = Lock()  # held by the thread that copies, never for long; guards the next attribute
        self._lock = Lock()
        self._has_warned = holds_caller
        self._failure: StateChangedError | None = None
        if not self._left:
            self._close(described)

    @property
    def is_copied(self) -> bool:
        """Whether the state may change, because all of it was copied, or the save has failed."""
        return not self._left

    @property
    def is_pending(self) -> bool:
        """Whether the capture has not begun, and may still begin."""
        return self._described is not None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for: the state was captured, or the save has failed."""
        return self._described is None and self._taken is None

    def snapshot(self, room_bytes: int) -> bool:
        """Copy all pieces of which there is no copy, if they fit into `room_bytes`. Returns whether the state may
        change now. Can be called on any thread.

        Stops as soon as `take` is called. If the copies do not fit, that is logged once.
        """
        with self._copying:
            left_bytes = int(self._lengths[self._left].sum())
            if left_bytes > room_bytes and self.is_pending:
                self._warn_of_no_room(left_bytes, room_bytes)
                return False
            while self._left and self._snapshot_one(self._left[0]):
                pass
            return self.is_copied

    def _snapshot_one(self, position: int) -> bool:
        described = self._described
        if described is None:
            return False
        try:
            memory = described.places.memory(position, described.pieces[position])
            made = snapshot_one(memory, lambda: self._described is None)
        except MemoryError:
            self._warn_of_no_room(int(self._lengths[position]), 0)
            return False
        except OSError:
            with self._lock:
                self._fail((described.pieces.names[position],), gone=True)
            return True
        with self._lock:
            if made is None or self._described is None:  # `take` was called, or the save has failed
                return False
            self._copies[position] = made
            self._left.pop(0)
            self.snapshot_bytes += int(self._lengths[position])
            if not self._left:
                self._close(described)
            return True

    def _close(self, described: StateDescription) -> None:
        """End the watch after all is copied: later changes do not matter to this save. The caller holds the lock."""
        self._check_memory(described)
        names = VersionCheck(described.counters, described.layout, self._late, self._guarded).changed
        self._check_written(described, names)
        self._described = replace(described, counters=VersionCounters.empty())
        self.released.open()

    def _check_written(self, described: StateDescription, counted: tuple[str, ...] = ()) -> None:
        """End the watch. Raise StateChangedError if pieces were written meanwhile. `counted`: names of tensors whose
        version counters changed.
        """
        written = self._watch.changed()
        self._watch.release()
        names = counted or tuple(described.pieces.names[position] for position in written)
        if names:
            self._fail(names)

    def _check_memory(self, described: StateDescription) -> None:
        """Raise StateChangedError for pieces whose memory was freed. Freed memory may still be mapped, so that copying
        it did not fail.
        """
        away = storage_moved(described.places, np.flatnonzero(self._late))
        if len(away):
            self._fail(tuple(described.pieces.names[position] for position in away.tolist()), gone=True)

    def _fail(self, names: tuple[str, ...], *, gone: bool = False) -> None:
        self._failure = self._failure or state_changed(names, path="", gone=gone)
        self._left.clear()

    def _warn_of_no_room(self, needed_bytes: int, room_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "step %d: the next training step waits until other ranks reach this save: copies of %d bytes do "
                "not fit into the free %d bytes of the budget; raise budget_bytes", self._step, needed_bytes,
                max(0, room_bytes),
            )

    def take(self) -> StateDescription:
        """The state to capture. From now on `snapshot` copies nothing. Blocks until devices have been checked for
        changes.

        On devices, the current streams must be those that were current when `save` was called.

        raises  StateChangedError  samples, version counters or storages show that the state has changed since `save`
                StorageError       a device has failed
        """
        with self._lock:
            described = self._taken = self._described
            self._described = None
            assert described is not None, "take() is called once, before release()"
            if self._left:
                self._check_memory(described)
            failure = self._failure
        if failure is not None:
            raise failure
        described = replace(described, places=described.places.with_copies(self._copies))
        late, names = np.flatnonzero(self._late), described.pieces.names
        try:
            now = take_samples(described.places, late, self._lengths[late], seed=self._step).wait_digests()
        except OSError as error:
            away = storage_moved(described.places, late)
            gone = tuple(names[position] for position in (away if len(away) else late).tolist())
            raise state_changed(gone, path="", gone=True) from error
        changed = late[now != self._seen.wait_digests()[late]]
        if len(changed):
            raise state_changed(tuple(names[position] for position in changed.tolist()), path="")
        return described

    def check_unwritten(self) -> None:
        """Check for writes since `save` was called. Must be called after `take`, once the capture has begun its own
        watch, so that no write between the two watches goes undetected.

        raises  StateChangedError  a piece without a copy was written
        """
        with self._lock:
            described = self._taken
            assert described is not None, "the check is made before release()"
            if self._left:
                self._check_memory(described)
            self._check_written(described)
            failure = self._failure
        if failure is not None:
            raise failure

    def release(self) -> None:
        """Release the copies, after the capture or a failure."""
        with self._lock:
            self._watch.release()
            self._described = self._taken = None
            self._copies, self.early_bytes, self.snapshot_bytes = {}, 0, 0
        self.released.open()


def copy_until_planned(
    step: int, described: StateDescription, seen: Samples, *, fence: FenceMode, watch: Watch, room_bytes: int
) -> PendingPlan:
    """Make the PendingPlan of a save, with copies of the tensors that must be captured before `save` returns.

    seen        samples of all tensors, to detect later changes
    watch       how changes of tensors without copies are detected: see EngineOptions
    room_bytes  memory for the copies. Tensors that do not fit are not copied, and `save` waits until they are captured
    """
    lazy = lazy_pieces(described.layout, waiter_of(described, fence))
    pieces = described.pieces
    lengths = pieces.lengths()
    early = ~((lengths >= PACKED_BELOW_BYTES) & np.array(lazy or False, np.bool_))
    copied = choose_copied(lengths, early, room_bytes)
    described.counters.watch(~copied)
    watched = EarlyWatch(described.places, np.flatnonzero(~copied), lengths, watch)
    _ = described.objects, described.per_rank
    places, gone = snapshot_pieces(pieces, described.places, np.flatnonzero(copied).tolist())
    if gone:
        raise state_changed(tuple(pieces.names[position] for position in gone), path="", gone=True)
    holds_caller = bool((early & ~copied).any())
    if holds_caller:
        log.warning(
            "step %d: save waits until all ranks have called it: copies of %d bytes do not fit into the free "
            "%d bytes of the budget; raise budget_bytes", step, int(lengths[early].sum()), max(0, room_bytes),
        )
    return PendingPlan(
        step, replace(described, places=places), ~copied, watched, seen, lazy or (False,) * len(pieces),
        holds_caller=holds_caller,
    )
