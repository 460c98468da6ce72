"""Saves that run in the background during training, in order, and removals in between.

    checkpoint --validated--> storable state --stage--> a copy --commit, on a thread--> a checkpoint at its path
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from flowstone._native import Arena
from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import SaveClaim
from flowstone.adapters.dcp.segments import CapturedItems, SegmentWriter
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.target import Target, check_target
from flowstone.adapters.folder import CheckpointFolder, FolderCache
from flowstone.adapters.lightning.background import BackgroundThread
from flowstone.config import FIRST_ARENA_BYTES, EngineOptions
from flowstone.log import log
from flowstone.runtime.exit_hook import ExitHook
from flowstone.stage.arena import open_write_arena
from flowstone.state import describe


class PendingCommit(msgspec.Struct, eq=False):
    """A save that has started. Its `state` no longer changes, and is dropped once it is written."""

    folder: CheckpointFolder
    target: Target
    claim: SaveClaim
    state: dict[str, object]

    def drop_state(self) -> None:
        self.state = {}


class LightningSaves:
    """The saves and removals of one process. Their own thread commits them."""

    def __init__(self, engine: EngineOptions) -> None:
        self._folders, self._background = FolderCache(engine), BackgroundThread()
        self._arena: Arena | None = None
        self._stager, self._segments = FlowstoneStager(), SegmentWriter()
        self._last_save_failed = False  # whether a save has failed since the last one that was committed
        self._end = ExitHook(self.close)
        self._end.before_threads_end()

    def save(self, target: Target, state: dict[str, object], *, keep_name: bool, in_background: bool) -> None:
        """Save a validated checkpoint to the target. The original state may change once this returns.

        raises  SaveFailedError  an earlier save has failed
                errors of the system
        """
        self._background.raise_failure()
        self._background.await_slot(target.path)
        if not in_background:
            self.wait()  # waits first, as this may raise, and nothing must be left behind then
        folder = self._folders.folder_of(target.parent)
        check_target(folder.store, target, overwrite=True)
        claim = folder.begin(target, keep_name=keep_name)
        try:
            if in_background:
                state = cast("dict[str, object]", self._stager.stage(state))
            job = PendingCommit(folder, target, claim, state)
            del state
        except BaseException:
            folder.abandon(target, claim)
            raise
        if in_background:
            self._background.submit(target.path, partial(self._commit, job))
        else:
            self._commit(job)

    def _commit(self, job: PendingCommit) -> None:
        try:
            self._last_save_failed = True
            self._write(job)
            self._last_save_failed = False
        except BaseException:
            job.folder.abandon(job.target, job.claim)
            raise
        finally:
            job.drop_state()
        job.claim.release()
        log.info("saved %s", job.target.path)

    def _write(self, job: PendingCommit) -> None:
        described = describe(job.state, whole=True, anew=True)
        captured = CapturedItems(described.layout.pieces, described.places, (), {}, (), (job.state, described))
        if self._arena is None:
            self._arena = open_write_arena(job.folder.store, FIRST_ARENA_BYTES)
        receipt = self._segments.write(job.folder.store, job.target, captured, self._arena, rank=0)
        publication.commit(job.folder.store, job.target, [receipt], described.objects, described.layout.aliases)

    def remove(self, path: Path) -> None:
        """Remove the checkpoint at `path`, once all saves that were called before this removal have ended. If the last
        of them failed, the checkpoint stays.
        """
        folder = self._folders.folder_of(path.parent)

        def act() -> None:
            if self._last_save_failed:
                log.warning("%s is kept, because a later save failed", path)
            else:
                folder.remove(path.name)

        if self._background.is_idle:
            act()
        else:
            self._background.submit(None, act)

    def wait(self) -> None:
        """Wait for all saves, and raise a failure that was not raised yet."""
        self._background.wait()

    def await_all(self) -> None:
        self._background.await_all()

    def raise_failure(self) -> None:
        """Raise the failure of an earlier save, once."""
        self._background.raise_failure()

    def close(self) -> None:
        """Wait for all saves, and release memory, engine and thread. Raises the errors of `wait`."""
        self._end.cancel()
        try:
            self._background.close()
        finally:
            self._stager.close()
            if self._arena is not None:
                self._arena.close()
            self._folders.close()
