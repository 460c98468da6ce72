"""What was loaded from a farther tier comes into nearer ones, so that the next restart finds it there.

A thread of its own does that, from the load on until the first save, which calls it off: that comes to the nearest tier
itself. Loads of a job that does not save take no lock and write nothing, unless a tier of its list says `prefetch`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from flowstone.commit import catalog, publish
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.manifests import read_manifest
from flowstone.errors import CancelledError, FlowstoneError, StorageError
from flowstone.format.manifest import MARKER_NAME, Manifest
from flowstone.log import log
from flowstone.store.base import UNPACED, Store
from flowstone.tier_events import Prefetched, TierEvent
from flowstone.tiers import lineage
from flowstone.tiers.flush import flush
from flowstone.tiers.flusher import align
from flowstone.tiers.policy import Placed
from flowstone.tiers.restore import check_same_run

_END_S = 10.0  # for a copy that is called off to end


class Prefetch:
    """The copies into the nearer tiers of one Checkpointer, one load after the other. Methods: any thread."""

    def __init__(
        self, placed: Sequence[Placed], emit: Callable[[TierEvent], None], holder: str, first: Callable[[], None]
    ) -> None:
        """`holder`: under which nearer tiers are locked meanwhile. `first` is called on the thread."""
        self._placed, self._emit, self._holder, self._first = placed, emit, holder, first
        self._thread: threading.Thread | None = None
        self._under_way: tuple[str, int] | None = None  # the tier, and the step
        self._is_called_off, self._is_left_behind = False, False

    def begin(self, tier: int, step: int) -> None:
        """A load took `step` from tier number `tier`. Does nothing where no nearer tier wants it."""
        wanting = [one.store for one in self._placed[:tier] if one.tier.prefetch]
        self.call_off()
        if not wanting or self._is_left_behind:
            return
        self._is_called_off = False
        self._under_way = wanting[0].location, step
        arguments = self._placed[tier].store, wanting, step
        self._thread = threading.Thread(target=self._run, args=arguments, name="flowstone-prefetch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread may be made: the load is whole all the same
            self._thread, self._under_way = None, None
            log.warning("step %d is not prefetched: %s", step, error)

    def call_off(self) -> None:
        """End it, and wait until it has; what is half there is removed. One that hangs in a store is left behind."""
        self._is_called_off = True
        if self.wait(_END_S) is not None:
            self._is_left_behind = True
            log.warning("%s does not answer, and is left behind", self._under_way)

    def wait(self, timeout_s: float) -> tuple[str, int] | None:
        """Wait until nothing is under way; the tier and the step, if something still is."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._under_way

    def _run(self, source: Store, targets: Sequence[Store], step: int) -> None:
        self._first()
        try:
            for target in targets:
                self._under_way = target.location, step
                began = time.monotonic()
                copied, reason = 0, ""
                try:
                    copied = self._bring(source, target, step)
                except CancelledError:
                    reason = "a save, another load or the end has called it off"
                except FlowstoneError as error:
                    reason = error.message
                seconds = time.monotonic() - began
                log.info("step %d into %s: %s", step, target.location, reason or f"{copied} bytes in {seconds:.2f} s")
                self._emit(Prefetched(step, target.location, source.location, copied, seconds, reason))
                if self._is_called_off:
                    return
        finally:
            self._under_way = None

    def _rest(self) -> None:
        """Before each batch, and before the copy is published."""
        if self._is_called_off:
            raise CancelledError("the prefetch was called off")

    def _bring(self, source: Store, target: Store, step: int) -> int:
        """Copy the checkpoint into that tier, as a flush does. Returns the bytes that were copied."""
        manifest = read_manifest(source, step_directory(step))
        check_no_checkpoint(target)
        if not target.exists(MARKER_NAME):
            target.make_directory()
        target.lock(self._holder)
        try:
            self._prepare(target, manifest)
            held = align(target, self._others(target))
            if held.steps and held.steps[-1] > step:
                raise StorageError(f"{target.location} has step {held.steps[-1]}, which is newer")
            return flush(source, target, step, UNPACED, self._rest, manifest.id).bytes
        finally:
            if not self._is_left_behind:  # else the writer of this very process holds it by now
                target.unlock()

    def _prepare(self, target: Store, manifest: Manifest) -> None:
        """As the writer of a tier does before it flushes: one run, and nothing torn."""
        check_same_run(target, publish.open_store(target, manifest.store), manifest.store)
        catalog.sweep(target, lambda name, why, _: log.info("removed %s (%s)", name, why))

    def _others(self, target: Store) -> list[lineage.Held]:
        """What the other tiers hold. One that does not answer says nothing."""
        found = []
        for one in self._placed:
            if one.store is not target:
                try:
                    if one.store.exists(MARKER_NAME):
                        found.append(lineage.look(one.store))
                except FlowstoneError as error:
                    log.info("%s says nothing about rewinds: %s", one.store.location, error.message)
        return found
