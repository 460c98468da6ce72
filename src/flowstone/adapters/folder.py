"""A folder of checkpoints whose names a framework chooses. Each checkpoint is removed atomically, by a rename.

    epoch=0-step=100.ckpt/                        a checkpoint, or an empty directory that reserves its name
    .saving-00000100-dcp-<digest of the name>/    the same checkpoint while it is written; locked while its process
    lives
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import SaveClaim, claim_file, is_claimed
from flowstone.adapters.dcp.target import Target, is_draft, is_draft_of
from flowstone.commit import removal
from flowstone.commit.entries import EntryKind, is_checkpoint_file, new_deleting, parse_entry
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.local import LocalStore


class CheckpointFolder:
    """A directory of checkpoints. Opening it removes what dead processes have left."""

    def __init__(self, place: Path, engine: EngineOptions) -> None:
        self.path, self.store = place, LocalStore(place, engine)
        if place.is_dir():
            self._sweep()

    def begin(self, target: Target, *, keep_name: bool) -> SaveClaim:
        """Create the directory in which a checkpoint is written. `keep_name`: whether an empty directory reserves the
        checkpoint's name until the commit.

        raises  LockedError, StorageError
        """
        self.store.make_directory()
        claim = SaveClaim(self.path, target.draft_directory)
        try:
            publication.begin(self.store, target)
            if keep_name and not self.store.exists(target.name):
                self.store.make_directory(target.name)
        except BaseException:
            self.abandon(target, claim)
            raise
        return claim

    def abandon(self, target: Target, claim: SaveClaim) -> None:
        """Remove what a failed save has left."""
        with suppress(FlowstoneError):  # readers ignore the directory, and the next process removes it
            publication.discard(self.store, target)
        with suppress(OSError):  # the directory has a checkpoint, or does not exist
            target.path.rmdir()
        claim.release()

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or a file or link of the framework. A checkpoint is renamed first, so that it is never
        seen incomplete.
        """
        store, path = self.store, self.path / name
        if path.is_symlink() or path.is_file():
            store.remove(name)
        elif path.is_dir():
            retired = self.retire(name)
            if retired is not None:
                removal.empty_directory(store, retired)

    def retire(self, name: str) -> str | None:
        """Rename a checkpoint so that it no longer counts as one, durably.

        returns  the directory, which the caller removes next; None if it has files of other programs
        raises   StorageError
        """
        path = self.path / name
        foreign = [entry for entry in os.listdir(path) if not is_checkpoint_file(entry)]
        if foreign:
            log.warning("%s is not removed: it holds files that are not Flowstone's: %s", path, foreign[0])
            return None
        deleting = new_deleting(0)
        self.store.rename(name, deleting.name)
        self.store.sync_directory()
        return deleting.name

    def _sweep(self) -> None:
        """Remove what dead processes have left: unfinished checkpoints, the empty directories that reserve the names of
        these checkpoints, and directories whose removal had begun.
        """
        names = os.listdir(self.path)
        claimed = [name.removeprefix(claim_file("")) for name in names]
        for draft in {name for name in (*names, *claimed) if is_draft(name)}:
            with suppress(FlowstoneError, OSError):  # another process is removing the entry, or has removed it
                self._sweep_draft(draft, names)
        # if the folder is a store, its Checkpointer removes such entries
        for name in () if MARKER_NAME in names else names:
            entry = parse_entry(name)
            if entry is not None and entry.kind is EntryKind.DELETING:
                with suppress(FlowstoneError):
                    removal.empty_directory(self.store, name)

    def _sweep_draft(self, draft: str, names: list[str]) -> None:
        if is_claimed(self.path, draft):
            return
        claim = SaveClaim(self.path, draft)
        try:
            for name in names:
                if is_draft_of(draft, name) and (self.path / name).is_dir() and not os.listdir(self.path / name):
                    (self.path / name).rmdir()
            if draft in names:
                removal.empty_directory(self.store, draft)
        finally:
            claim.release()

    def close(self) -> None:
        self.store.close()


class FolderCache:
    """The CheckpointFolder of each directory that this process has saved into."""

    def __init__(self, engine: EngineOptions) -> None:
        self._engine, self._folders = engine, dict[Path, CheckpointFolder]()

    def folder_of(self, place: Path) -> CheckpointFolder:
        if place not in self._folders:
            self._folders[place] = CheckpointFolder(place, self._engine)
        return self._folders[place]

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()
