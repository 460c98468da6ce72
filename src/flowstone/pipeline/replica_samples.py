"""Samples that a save takes of replicas before the state can change; the ranks compare them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.pipeline.messages import Assignment, LookedAt
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import Described
from flowstone.table.pieces import Pieces, Places


class Looked(msgspec.Struct, frozen=True, eq=False):
    """A few bytes of each replica, as they were when `save` was called. `rows`: of the layout, or all."""

    rows: NDArray[np.int64] | None
    samples: Samples

    def at(self) -> LookedAt:
        """The digests. Blocks until devices have gathered their samples."""
        return LookedAt(self.rows, self.samples.digests())


def look(step: int, described: Described, assignment: Assignment | None) -> Looked:
    """Sample replicas; without a plan, all pieces. Call it before the state can change."""
    if assignment is None:
        lengths = described.pieces.lengths()
        return Looked(None, take_samples(described.places, np.arange(len(lengths)), lengths, seed=step))
    compared = assignment.compared
    at = compared.looked_at(step)
    rows = compared.rows[at]
    return Looked(rows, take_samples(described.places, rows, compared.length[at], seed=step))


def first_samples(pieces: Pieces, places: Places) -> NDArray[np.uint16]:
    """Digests of the same few lines of each piece, at every call."""
    lengths = pieces.lengths()
    return take_samples(places, np.arange(len(lengths)), lengths, seed=0).digests()
