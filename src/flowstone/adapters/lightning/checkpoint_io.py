"""FlowstoneIO: the plug-in that saves and loads for Trainer and Fabric, in the place of TorchCheckpointIO."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any, cast

import torch

from flowstone.adapters.dcp.target import Target, is_local, target_of
from flowstone.adapters.lightning.background import close_saves
from flowstone.adapters.lightning.packages import checkpoint_io_classes, torch_checkpoint_io
from flowstone.adapters.lightning.reading import await_writer, checked, read
from flowstone.adapters.lightning.saves import Saves
from flowstone.adapters.lightning.values import validated
from flowstone.adapters.outer_exception import OuterException
from flowstone.config import DEADLINE_S, STEP_MAX, EngineOptions
from flowstone.errors import ArgumentError

if TYPE_CHECKING:
    CheckpointIO = object
else:
    CheckpointIO = new_class("CheckpointIO", checkpoint_io_classes())


AT_ONCE = "hpc_ckpt_"  # saved for a scheduler that is about to end the process


class FlowstoneIO(CheckpointIO):
    """Writes Flowstone checkpoints: `Trainer(plugins=[FlowstoneIO()])`, `Fabric(plugins=[FlowstoneIO()])`.

    The path that Lightning gives is the directory that becomes the checkpoint; its step is `global_step`. Saves are
    committed beside training, in order; a checkpoint is removed only once those that were saved after it are committed.
    The end of fit waits for the last one. A failure is raised by the next save, by the end of fit, or ends the process
    with status 1; once.

    asynchronous       False: a save returns once it is durable, and no copy of the state is made
    reads_torch_files  files that Lightning itself has saved are loaded too, by Lightning, as it does: by unpickling
    engine             how bytes move
    deadline_s         how long a load waits for a save of another rank to the same path

    For one process, and for strategies in which rank 0 has the whole state: DDP and its relatives.
    """

    def __init__(
        self, *, asynchronous: bool = True, reads_torch_files: bool = False, engine: EngineOptions | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if engine is not None and not isinstance(engine, EngineOptions):
            raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write fs.EngineOptions(...)")
        super().__init__()
        self._asynchronous, self._reads_torch_files = asynchronous, reads_torch_files
        self._engine, self._deadline_s = engine or EngineOptions(), deadline_s
        self._saves: Saves | None = None
        self._outer_exception = OuterException()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_saves": None}

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Save what Lightning hands over. It may change as soon as this returns.

        raises  UnsupportedStateError  values that are neither tensors nor plain, by name
                SaveFailedError        an earlier save failed, and its failure was not raised yet
                NotAStoreError         there are other files at `path`
                LockedError            another process saves to `path`
        """
        if storage_options is not None:
            raise ArgumentError(
                f"storage_options {storage_options!r:.60} is not taken", next="leave it out: FlowstoneIO(engine=...)"
            )
        target = target_for(checkpoint, path)
        at_once = not self._asynchronous or target.name.startswith(AT_ONCE)
        self._mine().save(
            target, validated(checkpoint), keep_name=not is_last(checkpoint, target), in_background=not at_once
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved at `path`, in fresh host memory, every chunk verified; by each rank that calls.

        map_location  None, or a device that tensors are copied to
        weights_only  says nothing here, since nothing is pickled

        raises  NoCheckpointError, NotAStoreError, DamagedError
                LockedError  another rank still saves to `path` after `deadline_s`
        """
        if not isinstance(map_location, str | torch.device | None):
            raise ArgumentError(f"map_location {map_location!r:.60} is no device", next="give a device, or none")
        saves = self._of_this_process()
        if saves is not None:
            saves.await_all()
        if self._reads_torch_files and is_local(path) and Path(path).is_file():
            return cast("dict[str, Any]", torch_checkpoint_io().load_checkpoint(path, weights_only=weights_only))
        await_writer(path, self._deadline_s)
        if saves is not None and not os.path.exists(path):
            saves.raise_failure()
        return cast("dict[str, Any]", _moved(read(checked(path)), map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once those that were saved after it are committed."""
        if not is_local(path):
            raise ArgumentError(f"{path!r:.200} is no path of a directory", next="give a directory")
        place = Path(os.path.abspath(path))
        self._mine().remove(place)

    def wait(self) -> None:
        """Wait until all that was saved is durable. Raises SaveFailedError for a failure that was not raised yet."""
        saves = self._of_this_process()
        if saves is not None:
            saves.wait()

    def teardown(self) -> None:
        """Wait for all saves, and give the memory back; the next save takes it anew. Lightning calls it at the end."""
        training_failed = self._outer_exception.training_has_failed()
        self._outer_exception = OuterException()  # a caller may train again in its except block
        saves, self._saves = self._of_this_process(), None
        if saves is not None:
            close_saves(saves, training_has_failed=training_failed)

    def _of_this_process(self) -> Saves | None:
        if self._pid != os.getpid():  # a process that was forked has none of its parent's threads
            self._saves, self._pid = None, os.getpid()
        return self._saves

    def _mine(self) -> Saves:
        saves = self._of_this_process()
        if saves is None:
            self._saves = saves = Saves(self._engine)
        return saves


def target_for(checkpoint: Mapping[str, Any], path: Any) -> Target:
    """Where it goes. The step is that of training, where the checkpoint says one."""
    named = target_of(path, None)
    step = checkpoint.get("global_step") if isinstance(checkpoint, Mapping) else None
    if type(step) is not int or not 0 <= step <= STEP_MAX or named.name == f"step-{named.step:08d}":
        return named
    return Target(named.parent, named.name, step)


def is_last(checkpoint: Mapping[str, Any], target: Target) -> bool:
    """Whether a callback has it for its newest checkpoint, which it overwrites, and which a resume looks for by name.

    An empty directory of that name would be taken for one.
    """
    callbacks = checkpoint.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    lasts = [state.get("last_model_path") for state in states if isinstance(state, Mapping)]
    return any(isinstance(last, str) and last and Path(os.path.abspath(last)) == target.path for last in lasts)


def _moved(value: Any, device: object) -> Any:
    """The same containers, their tensors on `device`."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)  # type: ignore[call-overload]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, device)
    elif isinstance(value, list):
        value[:] = [_moved(item, device) for item in value]
    elif type(value) is tuple:
        return tuple(_moved(item, device) for item in value)
    return value
