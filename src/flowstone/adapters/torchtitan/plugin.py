"""FlowstoneCheckpointManager: torchtitan's checkpoint manager with Flowstone's DCP writer, reader and stager."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from flowstone.adapters.dcp import FlowstoneReader, FlowstoneStager, FlowstoneWriter
from flowstone.adapters.dcp.target import is_local
from flowstone.adapters.folder import CheckpointFolder
from flowstone.adapters.outer_exception import OuterException
from flowstone.adapters.step_names import step_at_end
from flowstone.adapters.torchtitan.package import TORCHTITAN, checkpoint_manager_class
from flowstone.adapters.torchtitan.steps import (
    check_loadable,
    committed_steps,
    is_flowstone_checkpoint,
    set_aside_torchtitan_save,
)
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, FlowstoneError
from flowstone.log import log

CheckpointManager: Any = checkpoint_manager_class()
_COLLECTION: Any = TORCHTITAN.load("torchtitan.tools.utils").GarbageCollection
_MODEL: str = TORCHTITAN.load("torchtitan.components.checkpointer").MODEL
_SYNCHRONOUS, _IN_BACKGROUND = "disabled", "async_with_pinned_mem"
_MODES = (_SYNCHRONOUS, "async", _IN_BACKGROUND)


class _ReplacingWriter(FlowstoneWriter):
    """A writer that first renames a checkpoint of torchtitan's own format, if there is one at its target."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinator and self.path is not None:
            set_aside_torchtitan_save(Path(os.path.abspath(self.path)))
        return super().prepare_local_plan(plan)


class FlowstoneCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Saves and loads Flowstone checkpoints. Use it instead of torchtitan's CheckpointManager; it saves and keeps the
    same steps.

    Its Config has the fields of torchtitan's. `async_mode`:

    disabled                the save is durable when `save` returns
    async                   `save` returns once the state is copied; a thread writes the copy
    async_with_pinned_mem   `save` returns immediately. The copy is made during the next forward and backward pass;
                            tensors on a device are copied into pinned memory. A thread, not a process, writes the copy

    The error of a failed save is raised on every rank, by the next `save`, `maybe_wait_for_saving` or `close`.

    raises  ArgumentError  the folder is not a directory, or the mode is not one of these
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's Config. Builds a FlowstoneCheckpointManager."""

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self._outer_exception = OuterException()
        self._writer = _ReplacingWriter()
        self._folder: CheckpointFolder | None = None
        self._own_steps: tuple[int, ...] = ()  # the last two steps that this run has started to save
        self.save_future: Any = None
        self.enable = False  # set to True once everything that `close` needs exists
        if config.enable:
            _check(config, base_folder)
        super().__init__(config, base_folder=base_folder, **parts)
        if not self.enable:
            return
        if self.async_mode.value == _IN_BACKGROUND:
            self.stager = FlowstoneStager(in_background=True)
        if dist.get_rank() == 0 and not self.load_only:
            self._folder = CheckpointFolder(Path(self.folder).absolute(), EngineOptions())

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save with this job's writer. Exports for Hugging Face are written by torchtitan itself."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = step_at_end(checkpoint_id)
        assert step is not None, f"torchtitan calls a checkpoint step-N, not {checkpoint_id!r}"
        given: dict[str, Any] = {"storage_writer": self._writer, "checkpoint_id": checkpoint_id}
        saved: Any = None
        if async_mode.value == _SYNCHRONOUS:
            save(state_dict, **given)
        else:  # if the stager is None, the writer is used as the stager
            saved = async_save(state_dict, process_group=self.pg, async_stager=self.stager, **given)
        self._own_steps = (*self._own_steps[-1:], step)
        if enable_garbage_collection:
            _COLLECTION.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load and verify a Flowstone checkpoint. Any other checkpoint is loaded by torchtitan itself.

        raises  NoCheckpointError, DamagedError
        """
        place = Path(checkpoint_id)
        if from_hf or not is_local(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        elif not is_flowstone_checkpoint(place):
            check_loadable(place)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            load(state_dict, storage_reader=FlowstoneReader(checkpoint_id))
            if _MODEL in self.states:  # DCP loads everything else into the state by itself
                self.states[_MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        return max(committed_steps(Path(folder or self.folder)), default=-1)

    def _wait_for_saving(self) -> None:
        try:
            self.save_future.result()
        finally:
            self.save_future = None  # so that a failure is raised only once

    def _purge_stale_checkpoints(self) -> None:
        """Remove old checkpoints. The latest `keep_latest_k` are kept, including the one that is being saved; so are
        the last two of this run, which may not be the latest if an earlier step was loaded.
        """
        if not self._should_purge():
            return
        assert self._folder is not None, "only rank 0 of a run that saves purges"
        committed = committed_steps(Path(self.folder))
        latest = sorted({*committed, *self._own_steps})[-self.keep_latest_k :]
        for step in sorted(committed.keys() - {*latest, *self._own_steps}):
            try:
                self._remove_later(committed[step], self._folder)
            except (FlowstoneError, OSError) as error:  # the checkpoint may already be removed
                log.warning("could not remove %s: %s", committed[step], error)

    def _remove_later(self, place: Path, folder: CheckpointFolder) -> None:
        """Let torchtitan's thread remove a checkpoint. A Flowstone checkpoint is renamed first, so that it is never
        seen incomplete.
        """
        if not is_flowstone_checkpoint(place):
            self.purge_queue.put(str(place))
            return
        retired = folder.retire(place.name)
        if retired is not None:
            self.purge_queue.put(str(folder.path / retired))

    def _close(self) -> None:
        """Wait for the save in flight, and release threads and memory. Raises the error of the save, unless the
        training has failed, too.
        """
        training_failed = self._outer_exception.training_has_failed()
        try:
            self.maybe_wait_for_saving()
        except (Exception, CheckpointException) as error:
            if not training_failed:
                raise
            log.error("the last save failed too: %s", error)
        finally:
            super()._close()
            self._writer.close()
            if self._folder is not None:
                self._folder.close()


def _check(config: Any, base_folder: str) -> None:
    """Raise ArgumentError if the configuration has settings that Flowstone does not support."""
    if config.async_mode not in _MODES:
        raise ArgumentError(
            f"checkpoint.async_mode {config.async_mode!r:.60} is not supported", expected=", ".join(_MODES),
            next="set one of these",
        )
    folder = config.folder if "://" in str(config.folder) else os.path.join(base_folder, config.folder)
    if not is_local(folder):
        raise ArgumentError(
            f"checkpoint.folder {folder!r:.200} is not a directory",
            next="save to a directory of a shared file system, or use torchtitan's CheckpointManager",
        )
