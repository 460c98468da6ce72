"""FlowstoneCheckpointManager: torchtitan's checkpoint manager, by Flowstone's writer, reader and stager of DCP."""

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
from flowstone.adapters.folder import Folder
from flowstone.adapters.outer_exception import OuterException
from flowstone.adapters.step_names import step_at_end
from flowstone.adapters.torchtitan.package import TORCHTITAN, checkpoint_manager_class
from flowstone.adapters.torchtitan.steps import check_loadable, committed_steps, is_flowstones, make_way
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError, FlowstoneError
from flowstone.log import log

CheckpointManager: Any = checkpoint_manager_class()
_COLLECTION: Any = TORCHTITAN.load("torchtitan.tools.utils").GarbageCollection
_MODEL: str = TORCHTITAN.load("torchtitan.components.checkpointer").MODEL
_SYNCHRONOUS, _IN_BACKGROUND = "disabled", "async_with_pinned_mem"
_MODES = (_SYNCHRONOUS, "async", _IN_BACKGROUND)


class _Writer(FlowstoneWriter):
    """A writer whose target may hold what torchtitan itself has saved there: that is set aside first."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinator and self.path is not None:
            make_way(Path(os.path.abspath(self.path)))
        return super().prepare_local_plan(plan)


class FlowstoneCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Saves and loads Flowstone checkpoints, in the place of torchtitan's CheckpointManager and by its policies.

    Its Config has the fields of torchtitan's. `async_mode`:

    disabled                the save is durable when `save` returns
    async                   `save` returns once the state is copied; a thread writes the copy
    async_with_pinned_mem   `save` returns at once; the copy is made during the next forward and backward pass, into
                            pinned memory where tensors lie on a device. A thread writes it, not a process.

    A save that fails is raised on every rank, by the next `save`, `maybe_wait_for_saving` or `close`.

    raises  ArgumentError  a folder that is no directory, or a mode that is not among these
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's. It builds a FlowstoneCheckpointManager."""

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self._outer_exception = OuterException()
        self._writer = _Writer()
        self._folder: Folder | None = None
        self._own_steps: tuple[int, ...] = ()  # the last two that this run has begun to save
        self.save_future: Any = None
        self.enable = False  # until all is there that `close` needs
        if config.enable:
            _check(config, base_folder)
        super().__init__(config, base_folder=base_folder, **parts)
        if not self.enable:
            return
        if self.async_mode.value == _IN_BACKGROUND:
            self.stager = FlowstoneStager(in_background=True)
        if dist.get_rank() == 0 and not self.load_only:
            self._folder = Folder(Path(self.folder).absolute(), EngineOptions())

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save by the one writer of this job. What is for Hugging Face, torchtitan writes as ever."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = step_at_end(checkpoint_id)
        assert step is not None, f"torchtitan calls a checkpoint step-N, not {checkpoint_id!r}"
        given: dict[str, Any] = {"storage_writer": self._writer, "checkpoint_id": checkpoint_id}
        saved: Any = None
        if async_mode.value == _SYNCHRONOUS:
            save(state_dict, **given)
        else:  # without a stager here, the writer is one
            saved = async_save(state_dict, process_group=self.pg, async_stager=self.stager, **given)
        self._own_steps = (*self._own_steps[-1:], step)
        if enable_garbage_collection:
            _COLLECTION.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint of Flowstone, verified; any other as torchtitan does.

        raises  NoCheckpointError, DamagedError
        """
        place = Path(checkpoint_id)
        if from_hf or not is_local(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        elif not is_flowstones(place):
            check_loadable(place)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            load(state_dict, storage_reader=FlowstoneReader(checkpoint_id))
            if _MODEL in self.states:  # its tensors lie beside the other parts of the state, which DCP loads by itself
                self.states[_MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        return max(committed_steps(Path(folder or self.folder)), default=-1)

    def _wait_for_saving(self) -> None:
        try:
            self.save_future.result()
        finally:
            self.save_future = None  # a failure is raised once

    def _purge_stale_checkpoints(self) -> None:
        """Keep the latest `keep_latest_k`, with the one that is being saved; and the last two of this run, which may be
        older after a load of an earlier step."""
        if not self._should_purge():
            return
        assert self._folder is not None, "only rank 0 of a run that saves is asked to purge"
        found = committed_steps(Path(self.folder))
        latest = sorted({*found, *self._own_steps})[-self.keep_latest_k :]
        for step in sorted(found.keys() - {*latest, *self._own_steps}):
            try:
                self._remove_later(found[step], self._folder)
            except (FlowstoneError, OSError) as error:  # it may be gone meanwhile
                log.warning("%s is not removed: %s", found[step], error)

    def _remove_later(self, place: Path, folder: Folder) -> None:
        """Have torchtitan's thread remove a checkpoint, which is none any more before it begins with one of ours."""
        if not is_flowstones(place):
            self.purge_queue.put(str(place))
            return
        retired = folder.retire(place.name)
        if retired is not None:
            self.purge_queue.put(str(folder.place / retired))

    def _close(self) -> None:
        """Wait for the save in flight, and give threads and memory back. Raises what that save has failed of, unless
        training has failed too, with an error which that one would hide."""
        training_failed = self._outer_exception.training_has_failed()
        try:
            self.maybe_wait_for_saving()
        except (Exception, CheckpointException) as error:
            if not training_failed:
                raise
            log.error("the last save has failed too: %s", error)
        finally:
            super()._close()
            self._writer.close()
            if self._folder is not None:
                self._folder.close()


def _check(config: Any, base_folder: str) -> None:
    """Raise ArgumentError for what Flowstone does not do."""
    if config.async_mode not in _MODES:
        raise ArgumentError(
            f"checkpoint.async_mode {config.async_mode!r:.60} is not known to Flowstone", expected=", ".join(_MODES),
            next="set one of these",
        )
    folder = config.folder if "://" in str(config.folder) else os.path.join(base_folder, config.folder)
    if not is_local(folder):
        raise ArgumentError(
            f"checkpoint.folder {folder!r:.200} is no directory",
            next="save to a directory of a shared file system, or use torchtitan's CheckpointManager",
        )
