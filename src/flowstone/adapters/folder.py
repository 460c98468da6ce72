"""A folder of checkpoints under the names that a framework gives them, each removed in one step.

    epoch=0-step=100.ckpt/                        a checkpoint, or an empty directory that keeps its name free
    .saving-00000100-dcp-<digest of the name>/    what is being written, beside it; claimed while its process lives
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import Claim, claim_file, is_claimed
from flowstone.adapters.dcp.target import Target, is_draft, is_draft_of
from flowstone.commit import removal
from flowstone.commit.entries import Kind, is_ours, new_deleting, parse
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.local import LocalStore


class Folder:
    """One directory that checkpoints lie in. It first removes what dead processes have left there."""

    def __init__(self, place: Path, engine: EngineOptions) -> None:
        self.place, self.store = place, LocalStore(place, engine)
        if place.is_dir():
            self._sweep()

    def begin(self, target: Target, *, keep_name: bool) -> Claim:
        """Make the draft of a checkpoint. `keep_name`: an empty directory keeps its name until it is committed.

        raises  LockedError, StorageError
        """
        self.store.make_directory()
        claim = Claim(self.place, target.draft_directory)
        try:
            publication.begin(self.store, target)
            if keep_name and not self.store.exists(target.name):
                self.store.make_directory(target.name)
        except BaseException:
            self.give_up(target, claim)
            raise
        return claim

    def give_up(self, target: Target, claim: Claim) -> None:
        """The end of a save that failed."""
        with suppress(FlowstoneError):  # safe: nothing reads a draft, and the next process removes it
            publication.discard(self.store, target)
        with suppress(OSError):  # it holds a checkpoint, or is not there
            target.path.rmdir()
        claim.release()

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or a file or link that the framework has made; in two steps, so that none is torn."""
        store, path = self.store, self.place / name
        if path.is_symlink() or path.is_file():
            store.remove(name)
        elif path.is_dir():
            retired = self.retire(name)
            if retired is not None:
                removal.empty(store, retired)

    def retire(self, name: str) -> str | None:
        """Turn a checkpoint into none, durably.

        returns  the directory to be removed then, or None if it has foreign files
        raises   StorageError
        """
        path = self.place / name
        foreign = [entry for entry in os.listdir(path) if not is_ours(entry)]
        if foreign:
            log.warning("%s is not removed: it holds files that are not Flowstone's: %s", path, foreign[0])
            return None
        deleting = new_deleting(0)
        self.store.rename(name, deleting.name)
        self.store.sync_directory()
        return deleting.name

    def _sweep(self) -> None:
        """Remove drafts of dead processes, the names that they kept, and what they were removing."""
        names = os.listdir(self.place)
        claimed = [name.removeprefix(claim_file("")) for name in names]
        for draft in {name for name in (*names, *claimed) if is_draft(name)}:
            with suppress(FlowstoneError, OSError):  # another process is at it, or it is gone
                self._sweep_draft(draft, names)
        for name in () if MARKER_NAME in names else names:  # in a store, its Checkpointer removes them
            entry = parse(name)
            if entry is not None and entry.kind is Kind.DELETING:
                with suppress(FlowstoneError):
                    removal.empty(self.store, name)

    def _sweep_draft(self, draft: str, names: list[str]) -> None:
        if is_claimed(self.place, draft):
            return
        claim = Claim(self.place, draft)
        try:
            for name in names:
                if is_draft_of(draft, name) and (self.place / name).is_dir() and not os.listdir(self.place / name):
                    (self.place / name).rmdir()
            if draft in names:
                removal.empty(self.store, draft)
        finally:
            claim.release()

    def close(self) -> None:
        self.store.close()


class Folders:
    """The folders that one process has saved into."""

    def __init__(self, engine: EngineOptions) -> None:
        self._engine, self._folders = engine, dict[Path, Folder]()

    def at(self, place: Path) -> Folder:
        if place not in self._folders:
            self._folders[place] = Folder(place, self._engine)
        return self._folders[place]

    def close(self) -> None:
        for folder in self._folders.values():
            folder.close()
