"""Reports to the other ranks that a call of `save` failed on this rank only, so that they do not wait for this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.runtime.signal_shield import Latch
from flowstone.runtime.verb_lock import VerbLock
from flowstone.session.futures import Save


class SkipNotifier:
    """Notifies the other ranks of saves that this rank skips, on the writer's thread, in the order of the saves. Does
    nothing in a group of one.
    """

    def __init__(self, coordinator: SaveCoordinator, verb_lock: VerbLock) -> None:
        self._coordinator, self._verb_lock = coordinator, verb_lock
        self._last: object = None  # the Future of the last save that the writer's thread has begun to finish
        self._notified = Latch()  # open once the other ranks know of the last skipped save
        self._notified.open()

    def mark_finishing(self, save: Save) -> None:
        """Record that the writer's thread has begun to finish `save`, which reports its outcome to the other ranks."""
        self._last = save.committed

    def notify(self, save: Save, error: Exception, submit: Callable[[Callable[[], None]], None]) -> None:
        """Report that this rank skips `save` because of `error`. `submit` passes a call to the writer's thread."""
        if self._coordinator.size == 1:
            return
        notified = Latch()

        def announce() -> None:
            try:
                if save.committed is not self._last:  # else the save was handed over before the interrupt
                    self._coordinator.absent(save.step, error)
            finally:
                notified.open()

        def submit_notice() -> None:
            with suppress(RuntimeError):  # Python ends and starts no thread; other ranks notice the missing heartbeat
                submit(announce)
                self._notified = notified

        self._verb_lock.uninterrupted(submit_notice)

    def await_notified(self) -> None:
        """Wait until the other ranks know of the last save that this rank skipped."""
        self._notified.wait()
