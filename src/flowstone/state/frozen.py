"""Frozen parameters: parameters without an optimizer, in a model with trained parameters.

They may be frozen weights, but also averages, momentum encoders or target networks, which may change at any time, not
only in an optimizer's step. So they are captured before `save` returns. Once several saves have found them unchanged,
they are captured lazily, like parameters that an optimizer owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flowstone.state.framework import FRAMEWORK
from flowstone.table.pieces import Pieces, Places

Sample = Callable[[Pieces, Places], NDArray[np.uint16]]
"""Digests of a few lines of each piece, the same lines at every call."""


class FrozenParameters:
    """Records which parameters without an optimizer have stayed unchanged between saves.

    A parameter that has changed or moved between two saves does not count as frozen afterwards, even if later saves
    find it unchanged. It may be, for example, an averaged copy of the weights (EMA), which is not updated between some
    saves, and is updated again later.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._names: tuple[str, ...] = ()
        self._seen: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._samples: NDArray[np.uint16] | None = None  # samples at the first save; None: no longer compared
        self._still = np.zeros(0, np.bool_)
        self._samples_always = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters in the last save, changed or not."""
        return self._names

    def always_sample(self) -> None:
        """Compare samples at every call of `find_unchanged`. With `every_step`, an undetected change would be missing
        from all journaled steps.

        Memory on devices is not sampled, as every save would wait for it.
        """
        self._samples_always = True

    def mark_changed(self, name: str) -> None:
        """Count a parameter as changed, although neither its counter nor its samples showed the change."""
        self._still &= np.array([own != name for own in self._names], np.bool_)

    def reset(self) -> None:
        """Drop all addresses, counters and samples: a load has written to the parameters."""
        self._names, self._seen = (), None

    def find_unchanged(self, pieces: Pieces, places: Places, tensors: Sequence[object]) -> NDArray[np.bool_]:
        """For each of these tensors, whether it has not changed since at least one earlier save.

        An unchanged version counter proves nothing, so samples of each tensor are compared, too. They show a change
        that updates every element.
        """
        address, counted = places.address, FRAMEWORK.versions_of(tensors)
        if self._seen is None or self._names != pieces.names:
            self._samples, self._still = self._sample(pieces, places), np.ones(len(pieces), np.bool_)
            self._seen = address, counted
            self._names = pieces.names  # set last: after an interrupt before this line, the next save begins anew
            return np.zeros(len(pieces), np.bool_)
        self._still &= (address == self._seen[0]) & (counted == self._seen[1])
        if self._samples is not None:
            self._still &= self._samples == self._sample(pieces, places)
            if not self._samples_always or places.devices:
                self._samples = None
        return self._still.copy()
