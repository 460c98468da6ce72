"""FlowstoneWriter: a storage writer for torch.distributed.checkpoint, used instead of FileSystemWriter."""

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
from flowstone.adapters.dcp.resources import WriterResources
from flowstone.adapters.dcp.segments import resolve_items
from flowstone.adapters.dcp.target import check_target, is_local, target_of
from flowstone.config import EngineOptions
from flowstone.errors import ArgumentError


class FlowstoneWriter(StorageWriter):
    """Writes Flowstone checkpoints for `dcp.save` and `dcp.async_save`.

    The checkpoint id (`path`, or the one in the call) is the directory of the checkpoint, as with FileSystemWriter. The
    checkpoint's step is `step`, or else the number at the end of the directory's name, or else 0. `fs.open(path)` reads
    the checkpoint. A directory with a name such as step-00000100 (eight digits) is a step of a store.

    FileSystemWriter's arguments are accepted. With `overwrite`, the replaced checkpoint stays until the new one is
    committed. `thread_count` is the number of threads that copy and compute digests. At least `per_thread_copy_ahead`
    bytes for each thread are copied before they are written. Staging memory is always reused
    (`cache_staged_state_dict`). Files are safetensors, whatever the `serialization_format`. sync_files=False,
    single_file_per_rank=False and _extensions raise ArgumentError, because every commit is durable, and each rank
    writes one file without transforms.

    step             step of the checkpoints; None: the number at the end of the directory's name
    accept_pickled   whether to store bytes that a custom planner makes of objects; otherwise they are an error
    engine           options of the I/O engine

    Use one writer for all saves, since it reuses its memory, engine and plan. A pickled copy of a writer does not have
    these. For `dcp.async_save`, a writer has a FlowstoneStager of its own. `close` releases the memory.
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
        self._resources = WriterResources()
        self._rank = 0
        self._is_coordinator = False

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_resources": WriterResources()}

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

    # The interface of a stager: by default, dcp.async_save uses the writer as its stager

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into memory that is reused from save to save. See FlowstoneStager."""
        return cast("dict[str, Any]", self._resources.stager.stage(state_dict))

    def synchronize_staging(self) -> None:
        """Does nothing, since the state may change once `stage` has returned."""

    def close(self) -> None:
        """Release the memory and the engine. The next save allocates them again."""
        self._resources.close()

    # The methods in the order in which DCP calls them

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ArgumentError(
                "use_collectives=False is not supported: no rank would commit the checkpoint for all ranks",
                next="leave it out, or let each rank save to its own path with no_dist=True",
            )
        rank = kwargs.get("rank")
        self._is_coordinator = is_coordinator
        self._rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self._resources.discard_draft()
        # A new id for each save: DCP does not call `reset` if the writer has the path, and each checkpoint needs a
        # different id.
        self.save_id = str(uuid.uuid4())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        target = target_of(self.path, self._options.step)
        self._resources.open(target, self._options)
        if self._is_coordinator:
            check_target(self._resources.store, target, overwrite=self._options.overwrite)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the directory of the unfinished checkpoint. This is done here because no rank writes before all ranks
        have their plans.
        """
        self._resources.begin_draft(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one segment with all of this rank's tensors. On return the segment is durable, and the returned future
        is done.
        """
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        with self._resources.writing():
            captured = resolve_items(plan, planner, accept_pickled=self._options.accept_pickled)
            receipt = self._resources.write(captured, rank=self._rank)
        lengths = captured.pieces.lengths().tolist()
        done.set_result([
            WriteResult(index=item.index, size_in_bytes=lengths[row] if row >= 0 else 0, storage_data=receipt)
            for item, row in zip(plan.items, captured.rows, strict=True)
        ])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the segments of all ranks. The checkpoint is durable on return."""
        receipts = [rank[0].storage_data for rank in results if rank]
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        with self._resources.committing():
            self._resources.commit(metadata, receipts, self._rank, identity=self.save_id)
