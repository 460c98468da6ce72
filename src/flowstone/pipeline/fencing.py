"""Optimizer steps wait for captures: hooks before each step, and a lock that is held while the state is described."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from flowstone.events import Event
from flowstone.pipeline.pacing import Captures
from flowstone.runtime.turns import Turn
from flowstone.stage.device import records_graph
from flowstone.stage.fence import Fence


class Fencing:
    """The fence of one Checkpointer.

    state_lock  held while the state is described: a step on another thread waits
    hooks       run before the optimizers' steps
    """

    def __init__(self, captures: Captures, turn: Turn, emit: Callable[[Event], None]) -> None:
        self._captures, self._turn, self._emit = captures, turn, emit
        self.state_lock = threading.RLock()
        self.hooks, self._is_over, self._pid = Fence(self._before_step), False, os.getpid()

    def pass_fence(self) -> None:
        """Wait until the state may change: every save so far is captured. Any thread except those that saves need."""
        self._turn.check_thread("fence")
        with self.state_lock:
            fenced = self._captures.fence()
        if fenced is not None:
            self._emit(fenced)
            self._captures.grow_for(fenced)

    def _before_step(self) -> None:
        """Called when an optimizer is about to step."""
        if not self._is_over and os.getpid() == self._pid:
            self.pass_fence()
            if records_graph():
                self.hooks.tell_recorded()

    def end(self, *, lift: bool) -> None:
        """Steps stop waiting. `lift`: remove the hooks now; else each removes itself at its next step."""
        self._is_over = True
        if lift:
            self.hooks.lift()
