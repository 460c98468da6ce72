"""The saves of one Checkpointer into one store: all verbs but `save`, which is in conductor.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from flowstone.commit import catalog
from flowstone.commit.writer import newest_step
from flowstone.config import DIGESTED_ON_DEVICES
from flowstone.errors import FlowstoneError, StepExistsError
from flowstone.save.capturing import arena_bytes_for
from flowstone.save.conductor import SaveConductor
from flowstone.session.futures import Save
from flowstone.session.load_outcome import LoadReport
from flowstone.stage.device import check_not_recording, release_streams
from flowstone.stage.fence import SAVE_OUTSIDE
from flowstone.state import describe
from flowstone.trace import Spans

if TYPE_CHECKING:
    from flowstone.events.rare_events import Prepared


class Saves(SaveConductor):
    """The saves of one Checkpointer."""

    def prepare(self, state: Mapping[str, object]) -> Prepared:
        """Allocate staging memory for saves of `state`. See Checkpointer.prepare."""
        from flowstone.save.preparing import staging_bytes  # imported here: many processes never call this

        began, captures = monotonic(), self.captures
        check_not_recording("prepare", SAVE_OUTSIDE)
        with self.fencing.state_lock:
            described = describe(state, rank=self._group.rank, whole=self._group.alone)
        devices = described.places.devices
        captures.preparation.pin_for(captures.open_for(devices), devices)
        digests = self._options.watch in DIGESTED_ON_DEVICES
        captures.preparation.reserve(described.layout, described.places, digests=digests, times=self._gathers_max)
        needed = staging_bytes(described.layout, self._group.size)
        if captures.preparation.device:
            needed = arena_bytes_for(needed, captures.arena)
        captures.preparation.grow(captures.arena, min(needed, captures.arena_bytes_max))
        prepared = captures.preparation.report(captures.arena, began)
        self._emit(prepared)
        if self._group.size == 1:  # in a larger group, other ranks write a part of the tensors
            self.collapsing.prepare(described)
        return prepared

    def check_journaled(self, step: int) -> None:
        """Become the store's only writer, before `save_journaled`. Raises StepExistsError unless `step` is the newest
        step, and exists only in a journal.
        """
        self.sole_writer.check()
        newest, committed = newest_step(self._store), catalog.steps(self._store)
        if newest != step or step in committed:
            remedy = "load the newest step, and continue from it"
            raise StepExistsError(
                f"cannot save step {step} in full: it is not the newest step, or it already has a full checkpoint",
                found=f"newest step {newest}", next=remedy,
            )
        self.in_flight.note_newest(committed[-1] if committed else None)

    def save_journaled(self, step: int, state: Mapping[str, object], spans: Spans) -> Save:
        """Write a full checkpoint of a step that a journal (a log of training steps) already has, on all ranks. Must be
        called after `check_journaled`, with a state that has not changed since that step.
        """
        return self.save(step, state, "manual", spans)

    def notify_skip(self, step: int, error: Exception) -> None:
        """Report to the other ranks, which save `step`, that this rank skips it because of `error`."""
        self._skips.notify(Save(step), error, self._submit)

    @property
    def _gathers_max(self) -> int:
        """The number of gather operations that a device may run at once, and for which memory is allocated. With
        several ranks each save has two: one of them compares replicas.
        """
        return self._saves_in_flight * (1 if self._group.alone else 2)

    # Waiting and ending, on any thread

    def await_all(self) -> None:
        """Wait until the saves in flight have ended, and other ranks know which saves this rank skipped."""
        self.in_flight.await_all()
        self._skips.await_notified()

    def await_ends(self) -> None:
        """Wait until the saves in flight have ended; an interrupt ends this wait and changes nothing."""
        self.in_flight.await_all()

    def await_saves(self) -> None:
        """Wait until all saves called so far are durable. Raises the first failure that no call has raised yet."""
        self.in_flight.await_saves()

    def pass_fence(self) -> None:
        """Wait until all saves called so far are captured; then the state may change."""
        self.fencing.pass_fence()

    def around_load(self, _: Mapping[str, object], load: Callable[[], LoadReport]) -> LoadReport:
        """Call `load`, which changes the state. The Checkpointer has already waited for unfinished saves."""
        return load()

    def rewind(self, step: int) -> None:
        """Set every step above `step` aside on all ranks, so that none is loaded. See Checkpointer.rewind."""
        self.await_all()
        failure: Exception | None = None
        try:
            self.in_flight.await_saves()
        except FlowstoneError as error:
            failure = error
        self.count_alike("the saves before the rewind", failure)
        set_aside = partial(self.sole_writer.rewind, step)
        self._group.decide_on_rank_zero(f"the rewind to step {step}", lambda: self._verb_lock.uninterrupted(set_aside))
        self.in_flight.note_newest(step)

    def count_alike(self, phase: str, error: Exception | None) -> None:
        """Agree with all ranks on the number of calls of `save` for each step (the highest number on any rank). Raises
        `error`, or RankError for another rank's error.
        """
        self._coordinator.count_alike(phase, error)

    def end(self, *, wait: bool = True) -> None:
        """Make no more saves. Optimizer steps no longer wait for captures."""
        self.fencing.end(lift=wait)
        self._threads.end(wait=wait)
        if "collapsing" in vars(self):
            self.collapsing.end() if wait else self.collapsing.pause()
        self._store_writer.release()
        if wait:
            release_streams()
