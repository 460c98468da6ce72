"""A call of `save` that ended on this rank alone: the other ranks of its group must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from flowstone.pipeline.futures import Save
from flowstone.pipeline.save_coordinator import SaveCoordinator
from flowstone.runtime.turns import Turn
from flowstone.runtime.uninterrupted import Latch


class Absence:
    """Tells the other ranks, on the writer's thread, in the order of the saves. A group of one has no other ranks."""

    def __init__(self, coordinator: SaveCoordinator, turn: Turn) -> None:
        self._coordinator, self._turn = coordinator, turn
        self._last: object = None  # the Future of the last save that the writer's thread has begun to finish
        self._told = Latch()  # open once the other ranks know of the last absence
        self._told.open()

    def has_come_to(self, save: Save) -> None:
        """The writer's thread has begun to finish `save`: the other ranks learn its outcome there."""
        self._last = save.committed

    def tell(self, save: Save, error: Exception, submit: Callable[[Callable[[], None]], None]) -> None:
        """This rank does not make `save`, because of `error`. `submit` passes an act to the writer's thread."""
        if self._coordinator.size == 1:
            return
        told = Latch()

        def tell() -> None:
            try:
                if save.committed is not self._last:  # else it was handed over, though the handover was interrupted
                    self._coordinator.absent(save.step, error)
            finally:
                told.open()

        def enlist() -> None:
            with suppress(RuntimeError):  # Python is ending, or has no thread: the heartbeat reports that
                submit(tell)
                self._told = told

        self._turn.uninterrupted(enlist)

    def await_told(self) -> None:
        """Wait until the other ranks know."""
        self._told.wait()
