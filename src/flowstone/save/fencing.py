"""Makes optimizer steps wait for captures, by hooks before each step and a lock while the state is described."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from flowstone.events.phases import Event
from flowstone.runtime.verb_lock import VerbLock
from flowstone.save.pacing import Captures
from flowstone.stage.device import records_graph
from flowstone.stage.fence import OptimizerFence


class Fencing:
    """Makes the optimizer steps of one Checkpointer's state wait until it is captured.

    state_lock  held while `save` lists the state: an optimizer step on another thread waits for it
    hooks       the functions that are called before the optimizers' steps
    """

    def __init__(self, captures: Captures, verb_lock: VerbLock, emit: Callable[[Event], None]) -> None:
        self._captures, self._verb_lock, self._emit = captures, verb_lock, emit
        self.state_lock = threading.RLock()
        self.hooks, self._is_over, self._pid = OptimizerFence(self._before_step), False, os.getpid()

    def pass_fence(self) -> None:
        """Wait until all saves called so far are captured; then the state may change. Can be called on any thread
        except the background threads of saves.
        """
        self._verb_lock.check_thread("fence")
        with self.state_lock:
            fenced = self._captures.fence()
        if fenced is not None:
            self._emit(fenced)
            self._captures.grow_for(fenced)

    def _before_step(self) -> None:
        """Called before an optimizer's step: waits until pending saves have captured the state."""
        if not self._is_over and os.getpid() == self._pid:
            self.pass_fence()
            if records_graph():
                self.hooks.warn_recorded()

    def end(self, *, lift: bool) -> None:
        """From now on, optimizer steps do not wait for saves. `lift`: remove all hooks now; otherwise each hook removes
        itself at the next step of its optimizer.
        """
        self._is_over = True
        if lift:
            self.hooks.remove_hooks()
