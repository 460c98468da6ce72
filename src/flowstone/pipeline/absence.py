"""A call of `save` that ended on this rank alone: the others of its group must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from flowstone.pipeline.futures import Save
from flowstone.pipeline.save_coordinator import SaveCoordinator
from flowstone.runtime.turns import Turn
from flowstone.runtime.uninterrupted import Latch


class Absence:
    """Tells the others, on the writer's thread, in the order of the saves; in a group of one there are none."""

    def __init__(self, coordinator: SaveCoordinator, turn: Turn) -> None:
        self._coordinator, self._turn = coordinator, turn
        self._last: object = None  # the Future of the last save that the writer's thread has come to
        self._told = Latch()  # open once the others have been told of the last one
        self._told.open()

    def has_come_to(self, save: Save) -> None:
        """The writer's thread has: the others learn from it there how it ends."""
        self._last = save.committed

    def tell(self, save: Save, error: Exception, submit: Callable[[Callable[[], None]], None]) -> None:
        """This rank does not make `save`, because of `error`. `submit` hands an act to the writer's thread."""
        if self._coordinator.size == 1:
            return
        told = Latch()

        def tell() -> None:
            try:
                if save.committed is not self._last:  # it was handed over, though what did so was interrupted
                    self._coordinator.absent(save.step, error)
            finally:
                told.open()

        def enlist() -> None:
            with suppress(RuntimeError):  # Python is ending, or has no thread: the heartbeat says that this rank goes
                submit(tell)
                self._told = told

        self._turn.uninterrupted(enlist)

    def await_told(self) -> None:
        """Until the others know."""
        self._told.wait()
