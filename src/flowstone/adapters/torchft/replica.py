"""ReplicaCheckpointer: one of torchft's replica groups saves the state that all groups share."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from torch import nn

from flowstone.adapters.torchft.package import check_manager, optimizer_wrapper
from flowstone.checkpointer import Checkpointer
from flowstone.errors import ArgumentError, LockedError
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint
from flowstone.torch.fsdp2 import with_shards

_KEY, _SECTION = "flowstone", "torchft"


class ReplicaCheckpointer:
    """Saves the state of torchft's replica groups, and restores it if all groups have failed.

    path     the store, shared by all groups
    manager  torchft's Manager. If it has functions state_dict and load_state_dict, these are for values that are not
             in `state`
    state    the state, as for Checkpointer.save, the same on all groups. Of a torchft Optimizer, the inner optimizer is
             saved
    every    how many steps there are from one save to the next
    options  further options of a Checkpointer: keep, budget_bytes, ...

    The constructor loads the newest checkpoint, if there is one, and the manager's step count. From then on, the
    manager sends this state to groups that are behind. All ranks of a group create a ReplicaCheckpointer, and call the
    same methods.

    raises  FrameworkError, ArgumentError; and the errors of Checkpointer.load
    """

    def __init__(
        self, path: str | os.PathLike[str], manager: Any, state: dict[str, object], *, every: int = 1, **options: Any
    ) -> None:
        check_manager()
        if _SECTION in state:
            raise ArgumentError(
                f"the section {_SECTION!r} is reserved for the manager", next="rename your section"
            )
        if type(every) is not int or every < 1:
            raise ArgumentError(
                f"`every` must be a whole number of at least 1, got {every!r:.40}",
                next="give the number of steps from one save to the next; 1 saves every step",
            )
        wrapped = optimizer_wrapper()
        self._state: dict[str, Any] = {
            name: value.optim if isinstance(value, wrapped) else value for name, value in state.items()
        }
        self._caller_state, self._manager, self._every = state, manager, every
        self._path, self._options = path, options
        self._checkpointer, self._has_saved = Checkpointer(path, **options), False
        self.loaded = self._load()
        self._last_step = manager.current_step()
        manager.register_state_dict_fn(_KEY, self._heal, self._state_for_healing)

    def save(self) -> None:
        """Save the last step in the background, if torchft committed it, and it is this group's turn to save.

        A step is saved by the group with `participating_rank()` 0 among those that took part in it. After torchft has
        restarted groups, this may be a different group. Until the previous group has released the store, the new group
        skips its saves, with a warning. If it cannot see whether the previous group is alive, for example on another
        machine, each of these calls first waits for the lock, for a limited time.

        raises  the error of an earlier save
        """
        step = self._manager.current_step()
        if step == self._last_step:
            return
        if step % self._every:
            return
        self._last_step = step
        if self._manager.participating_rank() != 0:
            self._release_store()
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
        """Wait until all saves of this group are durable. Raises the error of a failed one."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait until all saves are durable, and release the store. Raises the error of a failed save."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.__exit__(kind, error, trace)

    def _load(self) -> int | None:
        """Load the newest checkpoint. Returns its step; None if there is no checkpoint."""
        if self._checkpointer.latest() is None:
            return None
        targets = {**self._state, _SECTION: self._manager}
        step = self._checkpointer.load(targets).step
        self._replace_values(targets)
        return step

    def _replace_values(self, loaded: dict[str, object]) -> None:
        """Put loaded plain values, such as numbers, into the caller's state."""
        for name, value in loaded.items():
            if name in self._state and value is not self._state[name]:
                self._state[name] = self._caller_state[name] = value

    def _release_store(self) -> None:
        """Release the store, so that the group that saves now can lock it."""
        if self._has_saved:
            self._checkpointer.close()
            self._checkpointer, self._has_saved = Checkpointer(self._path, **self._options), False

    def _state_for_healing(self) -> dict[str, object]:
        """The state that is sent to a group that is behind. The manager calls this on another thread, during a step."""
        live = {name: with_shards(v) if isinstance(v, nn.Module) else v for name, v in self._state.items()}
        return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in live.items()}

    def _heal(self, given: dict[str, object]) -> None:
        """Load the state `given` of another group into this one's. The manager calls this between a backward pass and
        the step.
        """
        self._checkpointer.fence()
        for name, value in given.items():
            target: Any = self._state[name]
            if hasattr(target, "load_state_dict"):
                target.load_state_dict(value)
            else:
                self._state[name] = self._caller_state[name] = value
