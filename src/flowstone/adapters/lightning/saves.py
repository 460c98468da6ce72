"""Saves that go on beside training, one after the other, with the removals that come between them.

    checkpoint --validated--> what can be stored --stage--> a copy --commit, on a thread--> a checkpoint at its path
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from flowstone import _native
from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import Claim
from flowstone.adapters.dcp.segments import Held, SegmentWriter
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.target import Target, check_target
from flowstone.adapters.folder import Folder, Folders
from flowstone.adapters.lightning.background import Background
from flowstone.config import FIRST_ARENA_BYTES, EngineOptions
from flowstone.log import log
from flowstone.runtime.ending import Ending
from flowstone.stage.arena import open_write_arena
from flowstone.state import describe


class Job(msgspec.Struct, eq=False):
    """A save that was begun. state: of which nothing changes any more; let go once it is written."""

    folder: Folder
    target: Target
    claim: Claim
    state: dict[str, object]


class Saves:
    """What one process saves and removes. Threads: its caller's, and one that commits."""

    def __init__(self, engine: EngineOptions) -> None:
        self._folders, self._background = Folders(engine), Background()
        self._arena: _native.Arena | None = None
        self._stager, self._segments = FlowstoneStager(), SegmentWriter()
        self._has_lost_one = False  # since the last save that was committed
        self._end = Ending(self.close)
        self._end.before_threads_end()

    def save(self, target: Target, state: dict[str, object], *, keep_name: bool, in_background: bool) -> None:
        """Save a validated checkpoint at the target. What it was made of may change when this returns.

        raises  SaveFailedError, if an earlier save failed; what the system refuses
        """
        self._background.raise_failure()
        self._background.make_room(target.path)
        if not in_background:
            self.wait()  # before anything is made that its failure would leave behind
        folder = self._folders.at(target.parent)
        check_target(folder.store, target, overwrite=True)
        claim = folder.begin(target, keep_name=keep_name)
        try:
            if in_background:
                state = cast("dict[str, object]", self._stager.stage(state))
            job = Job(folder, target, claim, state)
            del state
        except BaseException:
            folder.give_up(target, claim)
            raise
        if in_background:
            self._background.hand_over(target.path, partial(self._commit, job))
        else:
            self._commit(job)

    def _commit(self, job: Job) -> None:
        try:
            self._has_lost_one = True
            self._write(job)
            self._has_lost_one = False
        except BaseException:
            job.folder.give_up(job.target, job.claim)
            raise
        finally:
            job.state = {}
        job.claim.release()
        log.info("saved %s", job.target.path)

    def _write(self, job: Job) -> None:
        described = describe(job.state, whole=True, anew=True)
        held = Held(described.layout.pieces, described.places, (), {}, (), (job.state, described))
        if self._arena is None:
            self._arena = open_write_arena(job.folder.store, FIRST_ARENA_BYTES)
        receipt = self._segments.write(job.folder.store, job.target, held, self._arena, rank=0)
        publication.commit(job.folder.store, job.target, [receipt], described.objects, described.layout.aliases)

    def remove(self, path: Path) -> None:
        """Remove what is at `path`, once the saves before are committed; not if one of them failed."""
        folder = self._folders.at(path.parent)

        def act() -> None:
            if self._has_lost_one:
                log.warning("%s is kept, since a save after it failed", path)
            else:
                folder.remove(path.name)

        if self._background.is_idle:
            act()
        else:
            self._background.hand_over(None, act)

    def wait(self) -> None:
        """Wait until all saves have ended, and raise a failure that was not raised yet."""
        self._background.wait()

    def await_all(self) -> None:
        self._background.await_all()

    def raise_failure(self) -> None:
        """Raise the failure of an earlier save, once."""
        self._background.raise_failure()

    def close(self) -> None:
        """Wait for all saves, and give memory, engine and thread back. Raises what `wait` raises."""
        self._end.call_off()
        try:
            self._background.close()
        finally:
            self._stager.close()
            if self._arena is not None:
                self._arena.close()
            self._folders.close()
