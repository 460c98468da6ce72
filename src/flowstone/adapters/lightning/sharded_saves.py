"""Sharded saves: every rank writes its own part of a checkpoint, beside training, as DCP's planners divide it.

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
from flowstone.adapters.folder import Folders
from flowstone.adapters.lightning.background import Background
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, SaveFailedError
from flowstone.log import log
from flowstone.runtime.ending import Ending


class _Writer(FlowstoneWriter):
    """A writer that is told the step of each save: names such as epoch=0-step=5.ckpt say none."""

    def set_step(self, step: int) -> None:
        self._options = replace(self._options, step=step)


class ShardedSaves:
    """What the processes of a job save together, one save after the other. All ranks make each call.

    Threads: the caller's, and one that writes, whose collectives are those of a group of its own.
    """

    def __init__(self, engine: EngineOptions) -> None:
        self._folders, self._background = Folders(engine), Background(_cause)
        self._group = dist.new_group(backend="gloo")
        self._leads = dist.get_rank() == 0
        self._stager, self._writer = FlowstoneStager(), _Writer(engine=engine)
        self._has_lost_one = False  # since the last save that was committed
        self._end = Ending(self.close)
        self._end.before_threads_end()

    def save(
        self, target: Target, state: Callable[[], Mapping[str, Any]], *, keep_name: bool, in_background: bool
    ) -> None:
        """Save a checkpoint at the target. What it was made of may change when this returns.

        state      makes what this rank hands to DCP: its own parts, and on rank 0 everything else
        keep_name  an empty directory keeps the name of the target until it is committed

        raises  SaveFailedError on all ranks, if an earlier save failed, or one rank cannot begin this one
        """
        self._background.make_room(target.path)
        if not in_background:
            self.await_all()  # before anything is made that its failure would leave behind
        begun: dict[str, Any] = {}

        def begin() -> None:
            self._background.raise_failure()
            begun.update(state())
            if self._leads:
                self._prepare(target, keep_name)
            if in_background:
                begun.update(cast("dict[str, Any]", self._stager.stage(begun)))

        try:
            _together(begin)
        except BaseException:
            self._give_up(target)
            raise
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._background.hand_over(target.path, partial(self._write, target, begun, device))
        if not in_background:
            self.wait()

    def _prepare(self, target: Target, keep_name: bool) -> None:
        folder = self._folders.at(target.parent)
        folder.store.make_directory()
        check_target(folder.store, target, overwrite=True)
        if keep_name and not folder.store.exists(target.name):
            folder.store.make_directory(target.name)

    def _write(self, target: Target, state: dict[str, Any], device: int | None) -> None:
        """On the thread of each rank."""
        if device is not None:
            torch.cuda.set_device(device)
        self._has_lost_one = True
        try:
            self._writer.set_step(target.step)
            save(state, checkpoint_id=target.path, storage_writer=self._writer, process_group=self._group)
            self._has_lost_one = False
            log.info("saved %s", target.path)
        except BaseException:
            self._give_up(target)
            raise
        finally:
            state.clear()

    def _give_up(self, target: Target) -> None:
        if self._leads:
            with suppress(OSError):  # it holds a checkpoint, or is not there
                target.path.rmdir()

    def remove(self, path: Path, remove_others: Callable[[], None]) -> None:
        """Remove what is at `path`, once the saves before are committed; not if one of them failed. On rank 0.

        remove_others  removes what is no checkpoint of ours
        """
        if self._leads:
            self._background.hand_over(None, partial(self._remove, path, remove_others))

    def _remove(self, path: Path, remove_others: Callable[[], None]) -> None:
        if self._has_lost_one:
            log.warning("%s is kept, since a save after it failed", path)
            return
        if is_lightnings(path):
            remove_others()
        else:
            self._folders.at(path.parent).remove(path.name)

    def wait(self) -> None:
        """Wait until all saves have ended, and raise a failure that was not raised yet."""
        self._background.wait()

    def await_all(self) -> None:
        self._background.await_all()

    def close(self) -> None:
        """Wait for all saves and removals, and give memory, engine and thread back. Raises what `wait` raises."""
        self._end.call_off()
        try:
            self._background.close()
        finally:
            self._stager.close()
            self._writer.close()
            self._folders.close()


def is_lightnings(path: Path) -> bool:
    """Whether Lightning itself has saved it, in files of each rank."""
    return (path / "meta.pt").is_file()


def _together(act: Callable[[], None]) -> None:
    """Let each rank do its part of what none can go on without; a failure of one is raised by all.

    raises  the own failure; SaveFailedError for that of another rank
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
    """The first error of a rank, of those that DCP has collected."""
    if not isinstance(failure, CheckpointException):
        return str(failure)
    rank = min(failure.failures)
    error = failure.failures[rank][0]
    return f"rank {rank}: {error if isinstance(error, FlowstoneError) else repr(error)}"
