"""The fence: an optimizer's step waits for what a save has not captured yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle


class Fence:
    """Hooks in front of optimizers' steps. One hook for each optimizer, however many saves it was in.

    The hooks hold neither `wait`'s owner nor the optimizers alive, and are not part of what an
    optimizer pickles, copies or saves.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is a bound method; it returns once the state may change, at once when nothing is under way."""
        self._wait = weakref.WeakMethod(wait)
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """From now on the next steps of these wait."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_before_step(self._wait))

    def lift(self) -> None:
        """Take the hooks away."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


def _before_step(wait: weakref.WeakMethod[Callable[[], None]]) -> Callable[..., None]:
    # A compiled step breaks its graph here: waiting is for the interpreter.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(*_: Any) -> None:
        alive = wait()
        if alive is not None:
            alive()

    return cast("Callable[..., None]", before_step)
