"""How far two loss curves of one training may differ, if only the order of summation differs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np

Curve: TypeAlias = Mapping[int, float]
"""Losses by step, each a float32."""


def spread(curves: Sequence[Curve]) -> dict[int, float]:
    """For each step that all curves have: the highest minus the lowest loss."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: max(curve[step] for curve in curves) - min(curve[step] for curve in curves) for step in steps}


def explained(calm: Sequence[Curve], changes: int, terms: int) -> dict[int, float]:
    """Upper bound, at each step, of the distance from the first of `calm` after `changes` changes of the rank count.

    Runs on different numbers of ranks add the same numbers in different orders, and differ in nothing else. So the
    spread of the `calm` runs at a step is the effect of the order up to that step; since grown rounding errors may
    cross each other at some step, the largest spread up to it is used. A change of the number of ranks on the way has
    no larger effect than another number from the start, which had longer to grow; each further change adds as much
    again. That covers the weights. The loss itself is one more sum, of `terms`, which may differ between two orders
    (`sums_explain`). Without changes the bound is zero.
    """
    found, widest = {}, 0.0
    for step, width in spread(calm).items():
        widest = max(widest, width)
        found[step] = changes * widest + sums_explain(calm[0][step], terms) if changes else 0.0
    return found


def sums_explain(loss: float, terms: int) -> float:
    """How far two sums of the same `terms` losses may differ, as means, through their order alone.

    The error of each is at most (terms - 1) x u, relative to the sum of absolute values; u is half a unit in the last
    place (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Cross-entropies are positive, so that sum is
    the loss itself.
    """
    return 2 * (terms - 1) * float(np.finfo(np.float32).eps) / 2 * loss


def usual_change(curve: Curve) -> float:
    """The median change of the loss from one step to the next."""
    steps = sorted(curve)
    return median(abs(curve[after] - curve[before]) for before, after in pairwise(steps))
