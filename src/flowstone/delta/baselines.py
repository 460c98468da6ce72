"""Which earlier checkpoint (the *base*) the saves of one Checkpointer refer to, and how: a save need not write chunks
that its base has. The core calls delta saves only through the class Baselines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.commit.publish import Draft
from flowstone.coordination.messages import Assignment
from flowstone.delta.base import (
    Base,
    BaseReferences,
    captured_digests,
    places_of,
    refer,
    root_digests,
    stored_chunks,
    unneeded,
)
from flowstone.format.codec import CAST
from flowstone.format.index import ChunkPlaces
from flowstone.format.manifest import SegmentRow
from flowstone.plan.write import WritePlan
from flowstone.session.shared import Shared
from flowstone.store.base import Receipt


class SavedChunks(msgspec.Struct, frozen=True, eq=False):
    """Where the chunks of a save are.

    segments  this rank's segment files, including those of earlier checkpoints
    places    where each chunk is stored; None: where the plan has put its piece
    unneeded  names of files that were created for the save, and that `segments` does not contain
    planned   `places`; if it is None, the places of the plan
    """

    segments: Sequence[SegmentRow]
    places: ChunkPlaces | None
    unneeded: Sequence[str]
    planned: ChunkPlaces


class Baselines:
    """The base of one Checkpointer's saves, on this rank. The thread that finishes saves replaces it."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._outcome = shared, shared.outcome
        self._base: Base | None = None  # the last committed save
        self._adopted: tuple[int, Base | None] | None = None  # number of loads before, and the base that was found then
        self._links = shared.store.capabilities.links

    def current(self) -> Base | None:
        """The base of the next save, without a search in the store. None: there is none, or it is not known yet. After
        a load, the last save is no base any more, because the load may have found its bytes damaged. Then `find` may
        make the loaded checkpoint the base.
        """
        if self._base is not None and self._base.loads == self._outcome.loads:
            return self._base
        return self._adopted[1] if self._adopted is not None and self._adopted[0] == self._outcome.loads else None

    def find(self, assignment: Assignment) -> Base | None:
        """The base of a save. At the first save, and at the first save after a load, it is searched in the store."""
        loads, base = self._outcome.loads, self.current()
        if base is None and self._links and (self._adopted is None or self._adopted[0] != loads):
            from flowstone.delta.adopted_base import adopted_base  # imported here: most processes need it once

            base = adopted_base(self._shared, assignment)
            self._adopted = loads, base
        return base

    def refer(self, draft: Draft, plan: WritePlan, kept: _native.BaseCache | None) -> BaseReferences | None:
        """The files that a save refers to, linked into its directory. None if no piece is expected to be unchanged. See
        base.refer.
        """
        if not plan.unchanged.any() and kept is None:
            return None
        return refer(self._shared.store, draft, self.current(), plan, kept)

    def stored_chunks(
        self, segments: Sequence[SegmentRow], plan: WritePlan, offsets: NDArray[np.uint64],
        referred: BaseReferences | None, receipt: Receipt,
    ) -> SavedChunks:
        """Where the chunks of a save are stored.

        segments  the manifest's rows for those of this rank's segment files whose headers list pieces. The result also
                  has the files with the entry `__chunks__` (docs/FORMAT.md, Delta), and files of the base
        offsets   offset of each piece in its segment file, in bytes
        """
        rows, places = stored_chunks(segments, plan, offsets, referred, receipt)
        return SavedChunks(rows, places, unneeded(plan, referred, rows), places or places_of(plan, offsets))

    def base_of(
        self, draft: Draft, assignment: Assignment, plan: WritePlan, referred: BaseReferences | None,
        stored: SavedChunks, receipt: Receipt, loads: int,
    ) -> Base:
        """The base to which later saves refer, once this save is committed. `loads`: number of loads before this save.
        """
        captured = captured_digests(plan, receipt)
        return Base(
            draft.step, draft.id, plan.pieces, assignment.lazy(), captured, stored.segments, stored.planned, None,
            loads, _with_bytes(stored.planned), roots=root_digests(receipt, referred, captured),
        )

    def advance(self, base: Base | None, referred: BaseReferences | None) -> None:
        """Let later saves refer to the files of this save, `base`. If the store refused to link files for this save
        (`referred`), later saves refer to nothing.
        """
        self._links = self._links and (referred is None or not referred.refused)
        self._base = base if self._links else None

    def forget(self) -> None:
        """Forget the base, so that the next save writes every chunk."""
        self._base = None


def _with_bytes(places: ChunkPlaces) -> NDArray[np.bool_] | None:
    """For each chunk, whether it has stored bytes to which a later save may refer; None: all have."""
    if places.forms is None:
        return None
    stored: NDArray[np.bool_] = places.forms.codec != CAST.id
    return None if stored.all() else stored
