"""The resources of a writer, between saves and during a save. They are never pickled."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from flowstone._native import Arena
from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import SaveClaim
from flowstone.adapters.dcp.dcp_record import sections_of
from flowstone.adapters.dcp.options import WriterOptions
from flowstone.adapters.dcp.segments import CapturedItems, RankReceipt, SegmentWriter, no_items
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.target import Target
from flowstone.errors import FlowstoneError
from flowstone.stage.arena import open_write_arena
from flowstone.store.local import LocalStore


class WriterResources:
    """A writer's store, memory and last plan; on the coordinator also the unfinished checkpoint.

    DCP does not report a failed save to the writer. The unfinished checkpoint of such a save is removed by the next
    save, or when the writer is closed or no longer exists.
    """

    def __init__(self) -> None:
        self._store: LocalStore | None = None
        self._arena: Arena | None = None
        self._stager: FlowstoneStager | None = None
        self._segments = SegmentWriter()
        self._target: Target | None = None
        self._is_alone = False
        self._abandon: weakref.finalize[..., Any] | None = None

    @property
    def stager(self) -> FlowstoneStager:
        if self._stager is None:
            self._stager = FlowstoneStager()
        return self._stager

    @property
    def store(self) -> LocalStore:
        assert self._store is not None, "opened with the local plan"
        return self._store

    @property
    def target(self) -> Target:
        assert self._target is not None, "opened with the local plan"
        return self._target

    def open(self, target: Target, options: WriterOptions) -> None:
        """Prepare to write to `target`."""
        if self._store is None or self._store.root != target.parent:
            self._close_store()
            self._store = LocalStore(target.parent, options.engine)
        if self._arena is None:
            self._arena = open_write_arena(self._store, options.budget_bytes)
        self._target = target

    def begin_draft(self, ranks: int) -> None:
        """Create the directory in which `ranks` ranks write an unfinished checkpoint.

        raises  LockedError  another process saves to the same target, or a Checkpointer writes to the same store
        """
        store, target = self.store, self.target
        store.make_directory()
        claim = SaveClaim(target.parent, target.draft_directory, take_over=True)
        self._abandon, self._is_alone = weakref.finalize(self, _end_save, store, target, claim), ranks == 1
        publication.begin(store, target)

    def write(self, captured: CapturedItems, *, rank: int) -> RankReceipt:
        """Write this rank's segments. They are durable on return."""
        assert self._arena is not None, "opened with the local plan"
        return self._segments.write(self.store, self.target, captured, self._arena, rank=rank)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context of a rank's writes. After a failure, it removes the unfinished checkpoint if there is only one rank.
        """
        try:
            yield
        except BaseException:
            if self._is_alone:
                self.discard_draft()
            raise

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Context of the coordinator's commit. At its end, the unfinished checkpoint's directory is removed in any
        case.
        """
        try:
            yield
        finally:
            self.discard_draft()

    def commit(self, metadata: Metadata, receipts: Sequence[RankReceipt], rank: int, *, identity: str) -> None:
        """Publish the segments of all ranks as a checkpoint with the id `identity`."""
        objects = {name: node for receipt in receipts for name, node in receipt.objects.items()}
        pickled = [name for receipt in receipts for name in receipt.pickled]
        sections = sections_of(metadata, objects, pickled)
        written = receipts or [self.write(no_items(), rank=rank)]
        publication.commit(self.store, self.target, written, sections, identity=identity)

    def discard_draft(self) -> None:
        """Remove the unfinished checkpoint of a save that was not committed."""
        if self._abandon is not None:
            self._abandon()
            self._abandon = None

    def close(self) -> None:
        """Release the memory and the engine."""
        self.discard_draft()
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        self._close_store()

    def _close_store(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _end_save(store: LocalStore, target: Target, claim: SaveClaim) -> None:
    """Remove what is left of a save, committed or not."""
    with suppress(FlowstoneError):  # readers ignore what stays, and the next save to the same target removes it
        if claim.is_held:
            publication.discard(store, target)
    claim.release()
