"""Pieces of one name and box on several ranks have to be the same."""

from __future__ import annotations

import numpy as np
import pytest

from flowstone.errors import CollisionError
from flowstone.pieces import DTYPES
from flowstone.plan.share import Held, Names, share

NONE = np.zeros(0, np.int64)


def whole(*names: str) -> Held:
    """A rank that holds all of some tensors."""
    return Held(Names(names, (DTYPES["float32"],) * len(names), ((4,),) * len(names)), NONE, NONE)


def samples(*of: int) -> np.ndarray:
    return np.array(of, np.uint16)


def test_replicas_with_equal_samples_are_shared_out() -> None:
    found = share([whole("a", "b"), whole("b", "c")], samples=[samples(1, 2), samples(2, 3)])
    assert sum(map(len, found.writes)) == 3


def test_replicas_whose_samples_differ_are_refused_by_name() -> None:
    with pytest.raises(CollisionError, match=r"'[bc]' is not the same on rank 2 as on rank 0"):
        share(
            [whole("a", "b", "c"), whole("a"), whole("b", "c")],
            samples=[samples(1, 2, 4), samples(1), samples(3, 5)],
        )


def test_a_rank_without_samples_is_not_compared() -> None:
    kept = {0: np.array([0], np.int64)}
    share([whole("a"), whole("a"), whole("a")], kept=kept, samples=[None, samples(7), samples(7)])
    with pytest.raises(CollisionError, match="'a' is not the same on rank 2 as on rank 1"):
        share([whole("a"), whole("a"), whole("a")], kept=kept, samples=[None, samples(7), samples(8)])
