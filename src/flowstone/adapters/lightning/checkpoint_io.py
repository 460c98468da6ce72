"""FlowstoneIO: the plugin for Trainer and Fabric, used instead of TorchCheckpointIO."""

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
from flowstone.adapters.lightning.reading import await_writer, checkpoint_directory, read
from flowstone.adapters.lightning.saves import LightningSaves
from flowstone.adapters.lightning.values import validated
from flowstone.adapters.outer_exception import OuterException
from flowstone.config import DEADLINE_S, STEP_MAX, EngineOptions
from flowstone.errors import ArgumentError

if TYPE_CHECKING:
    CheckpointIO = object
else:
    CheckpointIO = new_class("CheckpointIO", checkpoint_io_classes())


SYNCHRONOUS_PREFIX = "hpc_ckpt_"  # such a checkpoint is saved when a scheduler is about to end the process


class FlowstoneIO(CheckpointIO):
    """Writes Flowstone checkpoints: `Trainer(plugins=[FlowstoneIO()])`, `Fabric(plugins=[FlowstoneIO()])`.

    Lightning's path is the directory of the checkpoint, and its `global_step` is the step. Saves are committed in the
    background, in order. A checkpoint is removed only once all later saves are committed. The end of fit waits for the
    last save. A failure is raised once, by the next save or at the end of fit. If neither follows, the process exits
    with status 1.

    asynchronous       False: a save copies nothing, and returns once it is durable
    reads_torch_files  whether to load Lightning's own files, too, which Lightning unpickles
    engine             options of the I/O engine
    deadline_s         how many seconds a load waits for a save of another rank to the same path

    For one process, and for strategies with the full state on rank 0, such as DDP.
    """

    def __init__(
        self, *, asynchronous: bool = True, reads_torch_files: bool = False, engine: EngineOptions | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if engine is not None and not isinstance(engine, EngineOptions):
            raise ArgumentError(f"engine must be EngineOptions, got {engine!r:.60}", next="write fs.EngineOptions(...)")
        super().__init__()
        self._asynchronous, self._reads_torch_files = asynchronous, reads_torch_files
        self._engine, self._deadline_s = engine or EngineOptions(), deadline_s
        self._saves: LightningSaves | None = None
        self._outer_exception = OuterException()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_saves": None}

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Save Lightning's checkpoint, which may change once this returns.

        raises  UnsupportedStateError  some values are neither tensors nor plain values; the error names them
                SaveFailedError        an earlier save failed, and its failure was not raised yet
                NotAStoreError         `path` has files of other programs
                LockedError            another process saves to `path`
        """
        if storage_options is not None:
            raise ArgumentError(
                f"storage_options={storage_options!r:.60} is not supported", next="leave it out"
            )
        target = target_for(checkpoint, path)
        at_once = not self._asynchronous or target.name.startswith(SYNCHRONOUS_PREFIX)
        self._open_saves().save(
            target, validated(checkpoint), keep_name=not is_last(checkpoint, target), in_background=not at_once
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at `path` into new host memory, on each rank that calls this, and verify it.

        map_location  a device to which tensors are copied, or None
        weights_only  ignored, as nothing is unpickled

        raises  NoCheckpointError, NotAStoreError, DamagedError
                LockedError  another rank is still saving to `path` after `deadline_s`
        """
        if not isinstance(map_location, str | torch.device | None):
            raise ArgumentError(f"map_location must be a device, got {map_location!r:.60}", next="give 'cpu', or None")
        saves = self._of_this_process()
        if saves is not None:
            saves.await_all()
        if self._reads_torch_files and is_local(path) and Path(path).is_file():
            return cast("dict[str, Any]", torch_checkpoint_io().load_checkpoint(path, weights_only=weights_only))
        await_writer(path, self._deadline_s)
        if saves is not None and not os.path.exists(path):
            saves.raise_failure()
        return cast("dict[str, Any]", _to_device(read(checkpoint_directory(path)), map_location))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once all saves that were called before this removal have ended. If the last of them
        failed, the checkpoint stays.
        """
        if not is_local(path):
            raise ArgumentError(f"{path!r:.200} is not the path of a directory", next="give a directory")
        place = Path(os.path.abspath(path))
        self._open_saves().remove(place)

    def wait(self) -> None:
        """Wait until all saves are durable. Raises SaveFailedError for a failure that was not raised yet."""
        saves = self._of_this_process()
        if saves is not None:
            saves.wait()

    def teardown(self) -> None:
        """Called at the end: wait for all saves, and free the memory. The next save allocates it again."""
        training_failed = self._outer_exception.training_has_failed()
        self._outer_exception = OuterException()  # the caller may train again in its except block
        saves, self._saves = self._of_this_process(), None
        if saves is not None:
            close_saves(saves, training_has_failed=training_failed)

    def _of_this_process(self) -> LightningSaves | None:
        if self._pid != os.getpid():  # a forked process has none of its parent's threads
            self._saves, self._pid = None, os.getpid()
        return self._saves

    def _open_saves(self) -> LightningSaves:
        saves = self._of_this_process()
        if saves is None:
            self._saves = saves = LightningSaves(self._engine)
        return saves


def target_for(checkpoint: Mapping[str, Any], path: Any) -> Target:
    """The directory and the step of a checkpoint to save. The step is the checkpoint's `global_step`, if it has one."""
    named = target_of(path, None)
    step = checkpoint.get("global_step") if isinstance(checkpoint, Mapping) else None
    if type(step) is not int or not 0 <= step <= STEP_MAX or named.name == f"step-{named.step:08d}":
        return named
    return Target(named.parent, named.name, step)


def is_last(checkpoint: Mapping[str, Any], target: Target) -> bool:
    """Whether this is the checkpoint "last" of a callback. Each save overwrites it, and a resume finds it by its name,
    so no empty directory may reserve this name: it would be taken for a checkpoint.
    """
    callbacks = checkpoint.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    lasts = [state.get("last_model_path") for state in states if isinstance(state, Mapping)]
    return any(isinstance(last, str) and last and Path(os.path.abspath(last)) == target.path for last in lasts)


def _to_device(value: Any, device: object) -> Any:
    """Move tensors to `device`, within the same containers."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)  # type: ignore[call-overload]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _to_device(item, device)
    elif isinstance(value, list):
        value[:] = [_to_device(item, device) for item in value]
    elif type(value) is tuple:
        return tuple(_to_device(item, device) for item in value)
    return value
