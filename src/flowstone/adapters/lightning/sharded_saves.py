"""Sharded saves: every rank writes its own part of a checkpoint in the background. DCP plans which rank writes what.

    state --stage--> a copy --dcp.save, on a thread of every rank--> a checkpoint at its path
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from flowstone.adapters.dcp import FlowstoneStager, FlowstoneWriter
from flowstone.adapters.dcp.target import Target, check_target
from flowstone.adapters.folder import FolderCache
from flowstone.adapters.lightning.background import BackgroundThread
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, SaveFailedError
from flowstone.log import log
from flowstone.runtime.exit_hook import ExitHook


class _StepWriter(FlowstoneWriter):
    """A writer that gets the step of each save by `set_step`. It cannot take the step from the end of the checkpoint's
    name, because Lightning's names (such as step=5-loss=0.2.ckpt) need not end with the step.
    """

    def set_step(self, step: int) -> None:
        self._options = replace(self._options, step=step)


class ShardedSaves:
    """The sharded saves of a job, one after the other. All ranks make each call.

    They are written on a separate thread, which has its own process group for collective operations.
    """

    def __init__(self, engine: EngineOptions) -> None:
        self._folders, self._background = FolderCache(engine), BackgroundThread(_cause)
        self._group = dist.new_group(backend="gloo")
        self._is_first_rank = dist.get_rank() == 0
        self._stager, self._writer = FlowstoneStager(), _StepWriter(engine=engine)
        self._last_save_failed = False  # whether a save has failed since the last one that was committed
        self._end = ExitHook(self.close)
        self._end.before_threads_end()

    def save(
        self, target: Target, state: Callable[[], Mapping[str, Any]], *, keep_name: bool, in_background: bool
    ) -> None:
        """Save a checkpoint to the target. The original state may change once this returns.

        state      returns this rank's state for DCP: the rank's own parts, and, on rank 0, everything else
        keep_name  whether an empty directory reserves the target's name until the commit

        raises  SaveFailedError  an earlier save has failed, or some rank cannot begin this one; raised on all ranks
        """
        self._background.await_slot(target.path)
        if not in_background:
            self.await_all()  # waits first, as this may raise, and nothing must be left behind then
        begun: dict[str, Any] = {}

        def begin() -> None:
            self._background.raise_failure()
            begun.update(state())
            if self._is_first_rank:
                self._prepare(target, keep_name)
            if in_background:
                begun.update(cast("dict[str, Any]", self._stager.stage(begun)))

        try:
            _on_all_ranks(begin)
        except BaseException:
            self._abandon(target)
            raise
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._background.submit(target.path, partial(self._write, target, begun, device))
        if not in_background:
            self.wait()

    def _prepare(self, target: Target, keep_name: bool) -> None:
        folder = self._folders.folder_of(target.parent)
        folder.store.make_directory()
        check_target(folder.store, target, overwrite=True)
        if keep_name and not folder.store.exists(target.name):
            folder.store.make_directory(target.name)

    def _write(self, target: Target, state: dict[str, Any], device: int | None) -> None:
        """Write and commit one save. Runs on the writing thread of each rank."""
        if device is not None:
            torch.cuda.set_device(device)
        self._last_save_failed = True
        try:
            self._writer.set_step(target.step)
            save(state, checkpoint_id=target.path, storage_writer=self._writer, process_group=self._group)
            self._last_save_failed = False
            log.info("saved %s", target.path)
        except BaseException:
            self._abandon(target)
            raise
        finally:
            state.clear()

    def _abandon(self, target: Target) -> None:
        if self._is_first_rank:
            with suppress(OSError):  # the directory has a checkpoint, or does not exist
                target.path.rmdir()

    def remove(self, path: Path, remove_others: Callable[[], None]) -> None:
        """Remove the checkpoint at `path` on rank 0, once earlier saves are committed. If one of them has failed, the
        checkpoint stays.

        remove_others  removes a checkpoint that is not Flowstone's
        """
        if self._is_first_rank:
            self._background.submit(None, partial(self._remove, path, remove_others))

    def _remove(self, path: Path, remove_others: Callable[[], None]) -> None:
        if self._last_save_failed:
            log.warning("%s is kept, because a later save failed", path)
            return
        if is_lightning_checkpoint(path):
            remove_others()
        else:
            self._folders.folder_of(path.parent).remove(path.name)

    def wait(self) -> None:
        """Wait for all saves, and raise a failure that was not raised yet."""
        self._background.wait()

    def await_all(self) -> None:
        self._background.await_all()

    def close(self) -> None:
        """Wait for all saves and removals, and release memory, engine and thread. Raises the errors of `wait`."""
        self._end.cancel()
        try:
            self._background.close()
        finally:
            self._stager.close()
            self._writer.close()
            self._folders.close()


def is_lightning_checkpoint(path: Path) -> bool:
    """Whether this is Lightning's own sharded checkpoint."""
    return (path / "meta.pt").is_file()


def _on_all_ranks(act: Callable[[], None]) -> None:
    """Run `act` on each rank; all ranks raise if one fails.

    raises  the failure of this rank; SaveFailedError for that of another rank
    """
    failure: Exception | None = None
    try:
        act()
    except Exception as error:
        failure = error
    causes: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(causes, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, cause in enumerate(causes):
        if cause is not None:
            raise SaveFailedError(f"rank {rank} could not begin a save", cause=cause, next="see the error of that rank")


def _cause(failure: BaseException) -> str:
    """The error of the lowest rank in DCP's CheckpointException."""
    if not isinstance(failure, CheckpointException):
        return str(failure)
    rank = min(failure.failures)
    error = failure.failures[rank][0]
    return f"rank {rank}: {error if isinstance(error, FlowstoneError) else repr(error)}"
