"""A save that cannot begin yet: the ranks have not agreed on its plan.

Until then its state stays in the caller's memory, except for what must be captured early, which is copied; what the
budget has no room for, `save` waits for. A step that comes before the plan does not wait for it: it copies the rest of
the state, if there is memory for all of it, and the save continues from the copies. Changes of the state meanwhile are
detected and reported here: every write into memory that the system can watch, others by counters and samples.
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
from flowstone.pipeline.changed import state_changed
from flowstone.pipeline.plan_cache import FenceMode, lazy_pieces, waiter_of
from flowstone.runtime.uninterrupted import Latch
from flowstone.stage.early_snapshot import snapshot, snapshot_one, within_room
from flowstone.stage.early_watch import EarlyWatch
from flowstone.stage.moved import moved
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import CounterCheck, Counters, Described


class Unplanned:
    """The state of such a save, shared by two threads: the fence's, which may `snapshot` it, and the writer's, which
    calls `take`.

    early_bytes     size of the copies that `save` made, until `let_go`
    snapshot_bytes  that of those that a step made, until then
    holds_caller    there was no room for copies of all that must not change once `save` has returned: so it waits
    released        open once it need not wait any longer
    """

    def __init__(
        self, step: int, described: Described, late: NDArray[np.bool_], watch: EarlyWatch, seen: Samples,
        guarded: Sequence[bool], *, holds_caller: bool,
    ) -> None:
        """`described` refers to copies of every piece that is not `late`.

        watch    of those that are, from when `save` was called
        seen     samples of every piece, from when `save` was called
        guarded  pieces that must not change before they are captured
        """
        self._step = step
        self._described: Described | None = described
        self._copies: dict[int, tuple[int, object]] = {}  # of pieces that were late: address and owner
        self._late, self._watch, self._seen, self._guarded = late, watch, seen, guarded
        self._left = np.flatnonzero(late).tolist()
        self._lengths = described.pieces.lengths()
        self.early_bytes, self.snapshot_bytes = int(self._lengths[~late].sum()), 0
        self.holds_caller, self.released = holds_caller, Latch()
        self._copying = Lock()  # one thread copies; guards the next, and is never held for long
        self._lock = Lock()
        self._is_taken, self._is_told = False, holds_caller
        self._failure: StateChangedError | None = None
        if not self._left:
            self._close(described)

    @property
    def is_copied(self) -> bool:
        """Whether the state may change: all of it has been copied, or is known to be lost."""
        return not self._left

    @property
    def is_pending(self) -> bool:
        """Whether it has not begun, and may still begin."""
        return not self._is_taken and self._described is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for: the state was captured, from its memory or from copies, or is lost."""
        return self._described is None

    def snapshot(self, room_bytes: int) -> bool:
        """Copy the rest, if there is room for all of it. Returns whether the state may change now. Any thread.

        Stops as soon as the state is taken. Lack of room is logged, once.
        """
        with self._copying:
            left_bytes = int(self._lengths[self._left].sum())
            if left_bytes > room_bytes and self.is_pending:
                self._tell_no_room(left_bytes, room_bytes)
                return False
            while self._left and self._snapshot_one(self._left[0]):
                pass
            return self.is_copied

    def _snapshot_one(self, at: int) -> bool:
        described = self._described
        if described is None or self._is_taken:
            return False
        try:
            made = snapshot_one(described.places.memory(at, described.pieces[at]), lambda: self._is_taken)
        except MemoryError:
            self._tell_no_room(int(self._lengths[at]), 0)
            return False
        except OSError:
            with self._lock:
                self._fail((described.pieces.names[at],), gone=True)
            return True
        with self._lock:
            if made is None or self._is_taken or self._described is None:  # it may have failed, and been released
                return False
            self._copies[at] = made
            self._left.pop(0)
            self.snapshot_bytes += int(self._lengths[at])
            if not self._left:
                self._close(described)
            return True

    def _close(self, described: Described) -> None:
        """All is copied: later changes do not matter to this save. Call it with the lock held."""
        self._check_memory(described)
        names = CounterCheck(described.counters, described.layout, self._late, self._guarded).changed()
        self._check_written(described, names)
        self._described = replace(described, counters=Counters.none())
        self.released.open()

    def _check_written(self, described: Described, counted: tuple[str, ...] = ()) -> None:
        """Watch no more. `counted`: pieces that have changed according to their counters."""
        written = self._watch.changed()
        self._watch.release()
        names = counted or tuple(described.pieces.names[at] for at in written)
        if names:
            self._fail(names)

    def _check_memory(self, described: Described) -> None:
        """Memory that was freed may still be mapped, and have been copied in that condition."""
        away = moved(described.places, np.flatnonzero(self._late))
        if len(away):
            self._fail(tuple(described.pieces.names[at] for at in away.tolist()), gone=True)

    def _fail(self, names: tuple[str, ...], *, gone: bool = False) -> None:
        self._failure = self._failure or state_changed(names, path="", gone=gone)
        self._left.clear()

    def _tell_no_room(self, needed_bytes: int, room_bytes: int) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning(
                "step %d: the next step waits until other ranks have reached this save: copies of %d bytes do "
                "not fit into the rest of the budget, %d bytes; raise budget_bytes", self._step, needed_bytes,
                max(0, room_bytes),
            )

    def take(self) -> Described:
        """The state to capture; from now on nothing more of it is copied. Blocks while a device is asked.

        On devices, the current streams must be those that were current when `save` was called.
        raises  StateChangedError  the state has changed since then, according to samples, counters and storages
                StorageError       a device has failed
        """
        with self._lock:
            self._is_taken = True
            described = self._described
            assert described is not None, "it is taken once, before it is let go"
            if self._left:
                self._check_memory(described)
            failure = self._failure
        if failure is not None:
            raise failure
        described = replace(described, places=described.places.with_copies(self._copies))
        late, names = np.flatnonzero(self._late), described.pieces.names
        try:
            now = take_samples(described.places, late, self._lengths[late], seed=self._step).digests()
        except OSError as error:
            away = moved(described.places, late)
            gone = tuple(names[at] for at in (away if len(away) else late).tolist())
            raise state_changed(gone, path="", gone=True) from error
        changed = late[now != self._seen.digests()[late]]
        if len(changed):
            raise state_changed(tuple(names[at] for at in changed.tolist()), path="")
        return described

    def check_unwritten(self) -> None:
        """Call it after `take`, once the plan's own watch has begun, so that no write escapes both.

        raises  StateChangedError  what was not copied was written since `save` was called
        """
        with self._lock:
            described = self._described
            assert described is not None, "it is checked before it is let go"
            if self._left:
                self._check_memory(described)
            self._check_written(described)
            failure = self._failure
        if failure is not None:
            raise failure

    def let_go(self) -> None:
        """The save was captured, or has failed: release the copies."""
        with self._lock:
            self._watch.release()
            self._described, self._copies, self.early_bytes, self.snapshot_bytes = None, {}, 0, 0
        self.released.open()


def unplanned(
    step: int, described: Described, seen: Samples, *, fence: FenceMode, watch: Watch, room_bytes: int
) -> Unplanned:
    """The state of a save that waits for its plan, with copies of what to capture before `save` returns.

    watch       how changes of the rest are detected: see EngineOptions
    room_bytes  for these copies. What does not fit stays where it is: then `save` waits until it is captured
    """
    lazy = lazy_pieces(described.layout, waiter_of(described, fence))
    pieces = described.pieces
    lengths = pieces.lengths()
    early = ~((lengths >= PACKED_BELOW_BYTES) & np.array(lazy or False, np.bool_))
    copied = within_room(lengths, early, room_bytes)
    described.counters.begin(~copied)
    watched = EarlyWatch(described.places, np.flatnonzero(~copied), lengths, watch)
    _ = described.objects, described.per_rank
    places, gone = snapshot(pieces, described.places, np.flatnonzero(copied).tolist())
    if gone:
        raise state_changed(tuple(pieces.names[at] for at in gone), path="", gone=True)
    holds_caller = bool((early & ~copied).any())
    if holds_caller:
        log.warning(
            "step %d: save waits until all ranks have reached it: copies of %d bytes do not fit into the rest of the "
            "budget, %d bytes; raise budget_bytes", step, int(lengths[early].sum()), max(0, room_bytes),
        )
    return Unplanned(
        step, replace(described, places=places), ~copied, watched, seen, lazy or (False,) * len(pieces),
        holds_caller=holds_caller,
    )
