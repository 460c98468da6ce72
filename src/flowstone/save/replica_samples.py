"""Samples of replicas (tensors that several ranks hold), and digests of them that devices compute, taken before the
state can change. The ranks compare them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.coordination.messages import Assignment, ReplicaDigests
from flowstone.stage.samples import Samples, take_samples
from flowstone.state import StateDescription
from flowstone.table.pieces import Pieces, Places


class ReplicaSamples(msgspec.Struct, frozen=True, eq=False):
    """Samples of replicas, taken when `save` was called.

    sampled  a few bytes of each sampled piece, and the numbers of these pieces in the layout (None: all pieces)
    whole    a function that waits for the digests of full pieces that devices compute, and returns the pieces' numbers
             and digests; None: devices compute no digests
    """

    sampled: tuple[NDArray[np.int64] | None, Samples]
    whole: Callable[[], tuple[NDArray[np.int64], NDArray[np.uint64]]] | None

    def digests(self) -> ReplicaDigests:
        """The digests. Blocks until devices have computed them, and gathered their samples."""
        rows, samples = self.sampled
        return ReplicaDigests((rows, samples.wait_digests()), None if self.whole is None else self.whole())


def sample_replicas(
    step: int, described: StateDescription, assignment: Assignment | None, *, digests: bool
) -> ReplicaSamples:
    """Sample the replicas. Without an assignment it is not known which pieces are replicas, so all are sampled. Must be
    called before the state can change.

    digests  whether devices also digest all bytes of their pieces, if they can
    """
    places, whole = described.places, None
    if assignment is None:
        lengths = described.pieces.lengths()
        rows = np.arange(len(lengths))
        sampled = rows
    else:
        compared = assignment.compared
        rows, lengths, sampled = compared.rows, compared.length, compared.sampled_rows(step)
    if digests and places.devices:
        from flowstone.stage.piece_digests import digest_pieces  # imported here: most processes have no device digests

        whole = digest_pieces(places, rows, lengths).wait_digests
    samples = take_samples(places, rows[sampled], lengths[sampled], seed=step)
    return ReplicaSamples((None if assignment is None else rows[sampled], samples), whole)


def first_samples(pieces: Pieces, places: Places) -> NDArray[np.uint16]:
    """Digests of a few cache lines of each piece; the same lines at every call."""
    lengths = pieces.lengths()
    return take_samples(places, np.arange(len(lengths)), lengths, seed=0).wait_digests()
