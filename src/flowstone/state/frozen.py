"""Frozen parameters: those that no optimizer of the state owns, in a model of which others are trained.

The next step does not wait for a change of them, which may come at any time: they are averages, momentum encoders and
target networks as well as frozen weights. So they are captured before `save` returns, until it is seen that nobody
changes them: then they are as good as owned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.state.tensors import versions_of
from flowstone.table.pieces import Pieces, Places

Sample = Callable[[Pieces, Places], NDArray[np.uint16]]
"""A digest of a few lines of each piece, the same lines each time."""


class Frozen:
    """What has been seen of parameters that nobody owns, from save to save.

    One that has moved, or was changed, between any two of them, is never taken for frozen: what an average does not
    change in one interval, it changes in the next.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._names: tuple[str, ...] = ()
        self._seen: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._samples: NDArray[np.uint16] | None = None  # of the first save; none once they have been compared
        self._still = np.zeros(0, np.bool_)

    def forget(self) -> None:
        """What is where, and how often it was changed, means nothing any more: a load has written to all of it."""
        self._names, self._seen = (), None

    def among(self, pieces: Pieces, places: Places, tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
        """Which of these have stayed as they were since they were first seen, at one save before at least.

        A counter that has not moved proves nothing, but a few lines of each tell of an update of every element.
        """
        address, counted = places.address, versions_of(tensors)
        if self._seen is None or self._names != pieces.names:
            self._samples, self._still = self._sample(pieces, places), np.ones(len(pieces), np.bool_)
            self._seen = address, counted
            self._names = pieces.names  # last: what is interrupted before this is begun anew
            return np.zeros(len(pieces), np.bool_)
        self._still &= (address == self._seen[0]) & (counted == self._seen[1])
        if self._samples is not None:
            self._still &= self._samples == self._sample(pieces, places)
            self._samples = None
        return self._still.copy()
