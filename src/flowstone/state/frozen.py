"""Frozen parameters: those that no optimizer of the state owns, in a model where others are trained.

They may be frozen weights, but also averages, momentum encoders or target networks, which change at any time without
waiting for a fence. So they are captured before `save` returns, until several saves have found them unchanged: from
then on they are treated like parameters that an optimizer owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.state.tensors import versions_of
from flowstone.table.pieces import Pieces, Places

Sample = Callable[[Pieces, Places], NDArray[np.uint16]]
"""Digests of a few lines of each piece, the same lines at every call."""


class Frozen:
    """What saves have found about parameters that no optimizer owns.

    One that has changed or moved between any two saves never counts as frozen: an average that does not change in one
    interval changes in the next.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._names: tuple[str, ...] = ()
        self._seen: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._samples: NDArray[np.uint16] | None = None  # of the first save; None if they are not compared again
        self._still = np.zeros(0, np.bool_)
        self._samples_always = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that the last save has found, whether they have changed or not."""
        return self._names

    def compare_always(self) -> None:
        """Compare samples at every call: where steps are logged, what changes unseen would be left out of them all.

        Not those of a device, for which every save would wait.
        """
        self._samples_always = True

    def doubt(self, name: str) -> None:
        """That one has changed, though no counter and no sample has told."""
        self._still &= np.array([own != name for own in self._names], np.bool_)

    def forget(self) -> None:
        """Drop all addresses, counters and samples: a load has written to the parameters."""
        self._names, self._seen = (), None

    def among(self, pieces: Pieces, places: Places, tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
        """Which of these tensors have not changed since an earlier save, at least one.

        A counter that did not move proves nothing, but samples of each tensor show an update of every element.
        """
        address, counted = places.address, versions_of(tensors)
        if self._seen is None or self._names != pieces.names:
            self._samples, self._still = self._sample(pieces, places), np.ones(len(pieces), np.bool_)
            self._seen = address, counted
            self._names = pieces.names  # last: if interrupted before this line, the next save begins anew
            return np.zeros(len(pieces), np.bool_)
        self._still &= (address == self._seen[0]) & (counted == self._seen[1])
        if self._samples is not None:
            self._still &= self._samples == self._sample(pieces, places)
            if not self._samples_always or places.devices:
                self._samples = None
        return self._still.copy()
