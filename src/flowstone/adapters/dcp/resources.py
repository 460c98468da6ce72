"""What a writer keeps between saves, and what a save under way holds. None of it is pickled."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from flowstone import _native
from flowstone.adapters.dcp import publication
from flowstone.adapters.dcp.claim import Claim
from flowstone.adapters.dcp.layout import sections_of
from flowstone.adapters.dcp.options import WriterOptions
from flowstone.adapters.dcp.segments import Held, RankReceipt, SegmentWriter, held_nothing
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.target import Target
from flowstone.errors import FlowstoneError
from flowstone.stage.arena import open_write_arena
from flowstone.store.local import LocalStore


class Resources:
    """A store, memory, the plan of the last save; and on the coordinator the draft that is not committed yet.

    DCP tells no writer that a save has failed: what is left of one goes with the next save, or with the writer.
    """

    def __init__(self) -> None:
        self._store: LocalStore | None = None
        self._arena: _native.Arena | None = None
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
        """Get ready to write to `target`."""
        if self._store is None or self._store.root != target.parent:
            self._close_store()
            self._store = LocalStore(target.parent, options.engine)
        if self._arena is None:
            self._arena = open_write_arena(self._store, options.budget_bytes)
        self._target = target

    def begin_draft(self, ranks: int) -> None:
        """Make the draft that `ranks` ranks write into.

        raises  LockedError where another process saves to the same target, or a Checkpointer writes beside it
        """
        store, target = self.store, self.target
        store.make_directory()
        claim = Claim(target.parent, target.draft_directory, take_over=True)
        self._abandon, self._is_alone = weakref.finalize(self, _abandon, store, target, claim), ranks == 1
        publication.begin(store, target)

    def write(self, held: Held, *, rank: int) -> RankReceipt:
        """Write this rank's segments; durable on return."""
        assert self._arena is not None, "opened with the local plan"
        return self._segments.write(self.store, self.target, held, self._arena, rank=rank)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what a rank does: where no other one writes into the draft, it goes with a failure."""
        try:
            yield
        except BaseException:
            if self._is_alone:
                self.discard_draft()
            raise

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around what the coordinator does once all have written: the draft goes with it, whatever becomes of it."""
        try:
            yield
        finally:
            self.discard_draft()

    def commit(self, metadata: Metadata, receipts: Sequence[RankReceipt], rank: int, *, identity: str) -> None:
        """Publish what all ranks have written, under an identity that no other checkpoint has."""
        objects = {name: node for receipt in receipts for name, node in receipt.objects.items()}
        pickled = [name for receipt in receipts for name in receipt.pickled]
        sections = sections_of(metadata, objects, pickled)
        written = receipts or [self.write(held_nothing(), rank=rank)]
        publication.commit(self.store, self.target, written, sections, identity=identity)

    def discard_draft(self) -> None:
        """Remove what a save that was not committed has left."""
        if self._abandon is not None:
            self._abandon()
            self._abandon = None

    def close(self) -> None:
        """Give memory and engine back."""
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


def _abandon(store: LocalStore, target: Target, claim: Claim) -> None:
    """The end of a save, committed or not."""
    with suppress(FlowstoneError):  # safe: a draft is never read, and the next save to the same target empties it
        if claim.is_held:
            publication.discard(store, target)
    claim.release()
