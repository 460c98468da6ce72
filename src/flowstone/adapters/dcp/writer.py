"""FlowstoneWriter: the storage writer of torch.distributed.checkpoint, in the place of FileSystemWriter."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flowstone.adapters.dcp.options import WriterOptions, check_layout, engine_options, staging_bytes
from flowstone.adapters.dcp.resources import Resources
from flowstone.adapters.dcp.segments import held_of
from flowstone.adapters.dcp.target import check_target, is_local, target_of
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError


class FlowstoneWriter(StorageWriter):
    """Writes Flowstone checkpoints for `dcp.save` and `dcp.async_save`.

    The checkpoint id (`path`, or that of the call) is the directory that becomes the checkpoint, as with
    FileSystemWriter. Its step is the number at the end of the directory's name, else 0, unless `step` says it.
    `fs.open(path)` reads it; in a directory called step-00000100 (eight digits) beside others, it is a step of a store.

    Of FileSystemWriter's arguments, `overwrite` means what it does there, but what is replaced stays until the new
    checkpoint is committed; `thread_count` threads copy and digest; at least `per_thread_copy_ahead` bytes for each of
    them are copied ahead of the file. Staging memory is always kept (`cache_staged_state_dict`). Segments are
    safetensors files, whichever `serialization_format`. ArgumentError for sync_files=False, single_file_per_rank=False
    and _extensions: a commit is durable, of one segment for each rank, without transforms.

    step             of the checkpoints; None: as above
    accept_pickled   keep bytes that a planner of the user's makes of objects as they are, instead of refusing them
    engine           how bytes move

    A writer that is kept for all saves keeps its memory, engine and plan. Without them it may be pickled. It stages
    for `dcp.async_save` by a FlowstoneStager of its own; `close` gives the memory back.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, single_file_per_rank: bool = True, sync_files: bool = True,
        thread_count: int = 1, per_thread_copy_ahead: int = 10_000_000, cache_staged_state_dict: bool = False,
        overwrite: bool = True, _extensions: Sequence[object] | None = None, serialization_format: object = None, *,
        step: int | None = None, accept_pickled: bool = False, engine: EngineOptions | None = None,
    ) -> None:
        super().__init__()
        check_layout(single_file_per_rank, sync_files, _extensions, serialization_format)
        budget_bytes = staging_bytes(per_thread_copy_ahead, thread_count)
        self._options = WriterOptions(
            overwrite, step, budget_bytes, accept_pickled, engine_options(engine, thread_count)
        )
        self.path = path
        self.save_id = str(uuid.uuid4())
        self._resources = Resources()
        self._rank = 0
        self._is_coordinator = False

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_resources": Resources()}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    # What dcp.async_save asks of a stager, which a writer is where it is given no other

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in memory that is kept from save to save. See FlowstoneStager."""
        return cast("dict[str, Any]", self._resources.stager.stage(state_dict))

    def synchronize_staging(self) -> None:
        """Nothing: the state may change once `stage` has returned."""

    def close(self) -> None:
        """Give memory and engine back. The next save takes them anew."""
        self._resources.close()

    # In the order in which DCP calls them

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ArgumentError(
                "use_collectives=False makes a checkpoint of each rank's own, which no rank commits for all",
                next="leave it out, or let each rank save to a path of its own with no_dist=True",
            )
        rank = kwargs.get("rank")
        self._is_coordinator = is_coordinator
        self._rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self._resources.discard_draft()
        # Of each save anew: `reset` is not called where the writer has the path, and identities have to differ.
        self.save_id = str(uuid.uuid4())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        target = target_of(self.path, self._options.step)
        self._resources.open(target, self._options)
        if self._is_coordinator:
            check_target(self._resources.store, target, overwrite=self._options.overwrite)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the draft: no rank writes before all have their plan."""
        self._resources.begin_draft(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one segment with all of this rank's tensors; durable when the future is done, which it is on return."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        with self._resources.writing():
            held = held_of(plan, planner, accept_pickled=self._options.accept_pickled)
            receipt = self._resources.write(held, rank=self._rank)
        lengths = held.pieces.lengths().tolist()
        done.set_result([
            WriteResult(index=item.index, size_in_bytes=lengths[row] if row >= 0 else 0, storage_data=receipt)
            for item, row in zip(plan.items, held.rows, strict=True)
        ])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written. The checkpoint is durable when this returns."""
        receipts = [rank[0].storage_data for rank in results if rank]
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        with self._resources.committing():
            self._resources.commit(metadata, receipts, self._rank, identity=self.save_id)
