"""ReplicaCheckpointer: the state that all replica groups of torchft share, saved by one of them."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from torch import nn

from flowstone.adapters.torchft.package import check_manager, optimizer_wrapper
from flowstone.checkpoint import Checkpoint
from flowstone.checkpointer import Checkpointer
from flowstone.errors import ArgumentError, LockedError
from flowstone.log import log
from flowstone.state.fsdp2 import with_shards

_KEY, _SECTION = "flowstone", "torchft"


class ReplicaCheckpointer:
    """Saves what torchft's replica groups train together, and resumes all of them once none is left.

    path     the store, which all groups see
    manager  of torchft: made without state_dict and load_state_dict, or with those of what is not in `state`
    state    as for Checkpointer.save, the same on all groups; in its place a torchft Optimizer has the one in it
    every    how many steps lie between two saves
    options  of a Checkpointer: keep, budget_bytes, ...

    Making one loads the newest checkpoint, if there is one, with the manager's count of steps. From then on the manager
    heals a group that is behind with this state, from a group that is not. All ranks of a group make one, and call the
    same methods.

    raises  FrameworkError, ArgumentError; what Checkpointer.load raises
    """

    def __init__(
        self, path: str | os.PathLike[str], manager: Any, state: dict[str, object], *, every: int = 1, **options: Any
    ) -> None:
        check_manager()
        if _SECTION in state:
            raise ArgumentError(
                f"the section {_SECTION!r} is the manager's own", next="give the manager alone, or name yours otherwise"
            )
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every={every!r:.40} is no number of steps", next="give 1 or more")
        wrapped = optimizer_wrapper()
        self._state: dict[str, Any] = {
            name: one.optim if isinstance(one, wrapped) else one for name, one in state.items()
        }
        self._given, self._manager, self._every = state, manager, every
        self._path, self._options = path, options
        self._checkpointer, self._has_saved = Checkpointer(path, **options), False
        self.loaded = self._load()
        self._last_step = manager.current_step()
        manager.register_state_dict_fn(_KEY, self._heal, self._share)

    def save(self) -> None:
        """Save the step that was just taken, if it was, and if this group is the one that saves. Returns at once.

        A step that torchft has discarded is not saved. The group that saves is the first of those that took the step:
        as torchft restarts groups, this may become another one, which goes on once the store is free.

        raises  what has failed of an earlier save
        """
        step = self._manager.current_step()
        if step == self._last_step:
            return
        if step % self._every:
            return
        self._last_step = step
        if self._manager.participating_rank() != 0:
            self._leave()
            return
        try:
            self._checkpointer.save(step, {**self._state, _SECTION: self._manager})
            self._has_saved = True
        except LockedError as error:
            log.warning("step %d is not saved by this replica group: %s", step, error)

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint."""
        return self._checkpointer.latest()

    def wait(self) -> None:
        """Wait until all saves of this group are durable. Raises what has failed of one."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait as `wait` does, and give the store back."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.__exit__(kind, error, trace)

    def _load(self) -> int | None:
        """The step that was loaded; None where there is no checkpoint yet."""
        if self._checkpointer.latest() is None:
            return None
        wanted = {**self._state, _SECTION: self._manager}
        step = self._checkpointer.load(wanted).step
        self._take(wanted)
        return step

    def _take(self, loaded: dict[str, object]) -> None:
        """Hand values that are no objects to the caller's state, where they are replaced."""
        for name, value in loaded.items():
            if name in self._state and value is not self._state[name]:
                self._state[name] = self._given[name] = value

    def _leave(self) -> None:
        """Give the store to the group that saves now."""
        if self._has_saved:
            self._checkpointer.close()
            self._checkpointer, self._has_saved = Checkpointer(self._path, **self._options), False

    def _share(self) -> dict[str, object]:
        """What a group that is behind takes over; the manager calls it on another thread, during a step."""
        live = {name: with_shards(one) if isinstance(one, nn.Module) else one for name, one in self._state.items()}
        return {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in live.items()}

    def _heal(self, given: dict[str, object]) -> None:
        """Take over the state of another group; the manager calls it, between a backward pass and its step."""
        self._checkpointer.fence()
        for name, value in given.items():
            one: Any = self._state[name]
            if hasattr(one, "load_state_dict"):
                one.load_state_dict(value)
            else:
                self._state[name] = self._given[name] = value
