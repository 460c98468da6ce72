"""What a save learns of replicas before the state can change: samples, of devices digests; the ranks compare them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.pipeline.messages import Assignment, LookedAt
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import Described
from flowstone.table.pieces import Pieces, Places


class Looked(msgspec.Struct, frozen=True, eq=False):
    """What replicas were when `save` was called.

    sampled  a few bytes of each; with their rows of the layout, or None for all
    whole    of those that devices digest, waits for the rows and digests; None: none was to be
    """

    sampled: tuple[NDArray[np.int64] | None, Samples]
    whole: Callable[[], tuple[NDArray[np.int64], NDArray[np.uint64]]] | None

    def at(self) -> LookedAt:
        """The digests. Blocks until devices have made theirs, and gathered their samples."""
        rows, samples = self.sampled
        return LookedAt((rows, samples.digests()), None if self.whole is None else self.whole())


def look(step: int, described: Described, assignment: Assignment | None, *, digests: bool) -> Looked:
    """Sample replicas; without a plan, all pieces. Call it before the state can change.

    digests  have devices digest those that they hold, too, where they can
    """
    places, whole = described.places, None
    if assignment is None:
        lengths = described.pieces.lengths()
        rows = np.arange(len(lengths))
        at = rows
    else:
        rows, lengths, at = assignment.compared.rows, assignment.compared.length, assignment.compared.looked_at(step)
    if digests and places.devices:
        from flowstone.stage.piece_digests import digest_pieces  # imported here: most processes digest nothing there

        whole = digest_pieces(places, rows, lengths).digests
    samples = take_samples(places, rows[at], lengths[at], seed=step)
    return Looked((None if assignment is None else rows[at], samples), whole)


def first_samples(pieces: Pieces, places: Places) -> NDArray[np.uint16]:
    """Digests of the same few lines of each piece, at every call."""
    lengths = pieces.lengths()
    return take_samples(places, np.arange(len(lengths)), lengths, seed=0).digests()
