"""Copy a checkpoint that was loaded from a farther tier into nearer tiers, for the next restart.

A separate thread copies after the load. The first save cancels the copy: the save itself goes to the nearest tier.
A job that does not save takes no lock and writes nothing, unless a tier in its list has `prefetch`.
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
from flowstone.tiered import lineage
from flowstone.tiered.flush import flush
from flowstone.tiered.flusher import apply_rewinds
from flowstone.tiered.policy import PlacedTier
from flowstone.tiered.restore import check_same_run
from flowstone.tiered.tier_events import Prefetched, TierEvent

_END_S = 10.0  # seconds that a cancelled copy may take to end


class TierPrefetcher:
    """Copies loaded checkpoints into the nearer tiers of one Checkpointer, for one load at a time. Methods can be
    called on any thread.
    """

    def __init__(
        self, placed: Sequence[PlacedTier], emit: Callable[[TierEvent], None], holder: str, first: Callable[[], None]
    ) -> None:
        """`holder`: the name under which this job locks nearer tiers. `first` is called once on the copying thread,
        before anything else.
        """
        self._placed, self._emit, self._holder, self._first = placed, emit, holder, first
        self._thread: threading.Thread | None = None
        self._under_way: tuple[str, int] | None = None  # tier that is being copied to, and step; None: no copy runs
        self._is_called_off, self._is_left_behind = False, False

    def begin(self, tier: int, step: int) -> None:
        """Copy `step`, which was loaded from tier number `tier`, into nearer tiers that have `prefetch`."""
        targets = [entry.store for entry in self._placed[:tier] if entry.tier.prefetch]
        self.cancel()
        if not targets or self._is_left_behind:
            return
        self._is_called_off = False
        self._under_way = targets[0].location, step
        arguments = self._placed[tier].store, targets, step
        self._thread = threading.Thread(target=self._run, args=arguments, name="flowstone-prefetch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started; the load is complete without this copy
            self._thread, self._under_way = None, None
            log.warning("step %d is not prefetched: %s", step, error)

    def cancel(self) -> None:
        """Cancel the copy, and wait until its thread has removed the unfinished checkpoint and has ended. A thread that
        hangs in a store is abandoned.
        """
        self._is_called_off = True
        if (unfinished := self.wait(_END_S)) is not None:
            self._is_left_behind = True
            log.warning("%s does not answer; the prefetch of step %d into it is abandoned", *unfinished)

    def wait(self, timeout_s: float) -> tuple[str, int] | None:
        """Wait at most `timeout_s` for the end of the copy. Returns its tier and step if it is still running, else
        None.
        """
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
                    copied = self._copy(source, target, step)
                except CancelledError:
                    reason = "cancelled by a save, another load or the Checkpointer's end"
                except FlowstoneError as error:
                    reason = error.message
                seconds = time.monotonic() - began
                log.info(
                    "prefetch of step %d into %s: %s", step, target.location,
                    reason or f"{copied} bytes in {seconds:.2f} s",
                )
                self._emit(Prefetched(step, target.location, source.location, copied, seconds, reason))
                if self._is_called_off:
                    return
        finally:
            self._under_way = None

    def _on_batch(self) -> None:
        """Called before each batch of chunks, and before the copy is published. Raises CancelledError to end the copy.
        """
        if self._is_called_off:
            raise CancelledError("the prefetch was cancelled")

    def _copy(self, source: Store, target: Store, step: int) -> int:
        """Copy the checkpoint into the tier `target`, as a flush does. Returns the number of bytes copied."""
        manifest = read_manifest(source, step_directory(step))
        check_no_checkpoint(target)
        if not target.exists(MARKER_NAME):
            target.make_directory()
        target.lock(self._holder)
        try:
            self._prepare(target, manifest)
            contents = apply_rewinds(target, self._others(target))
            if contents.steps and contents.steps[-1] > step:
                raise StorageError(
                    f"{target.location} already has the newer step {contents.steps[-1]}, so step {step} was not copied "
                    "into it; nothing needs to be done"
                )
            return flush(source, target, step, UNPACED, self._on_batch, manifest.id).bytes
        finally:
            if not self._is_left_behind:  # if it is, this process' writer may hold the lock by now
                target.unlock()

    def _prepare(self, target: Store, manifest: Manifest) -> None:
        """Check that the tier belongs to the run, and remove leftovers, as a flusher does when it joins a tier."""
        check_same_run(target, publish.open_store(target, manifest.store), manifest.store)
        catalog.sweep_leftovers(target, lambda name, why, _: log.info("removed %s (%s)", name, why))

    def _others(self, target: Store) -> list[lineage.TierContents]:
        """The contents of the other tiers, except tiers that do not answer."""
        contents = []
        for entry in self._placed:
            if entry.store is not target:
                try:
                    if entry.store.exists(MARKER_NAME):
                        contents.append(lineage.read_contents(entry.store))
                except FlowstoneError as error:
                    log.info("cannot read the rewinds of %s: %s", entry.store.location, error.message)
        return contents
