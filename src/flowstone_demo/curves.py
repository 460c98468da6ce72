"""How far two loss curves of one training may lie apart, if only the order of its sums differs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np

Curve: TypeAlias = Mapping[int, float]
"""Losses by step, each a float32."""


def spread(curves: Sequence[Curve]) -> dict[int, float]:
    """Between the highest and the lowest loss of each step that all have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: max(curve[step] for curve in curves) - min(curve[step] for curve in curves) for step in steps}


def explained(calm: Sequence[Curve], changes: int, terms: int) -> dict[int, float]:
    """How far a training may be, at each step, from the first of `calm` once it has changed its ranks `changes` times.

    Runs on different numbers of ranks add up the same numbers in different orders, and nothing else differs between
    them. So what lies between the `calm` ones at a step is what orders alone have made of it by then: their spread,
    and since rounding errors that have grown may cross each other at some step, the largest spread up to it. A change
    of the number of ranks on the way makes no more of it than another number from the start does, which had longer to
    grow; each further change adds as much again. So far the weights; the loss itself is one more sum, of `terms`, which
    two orders give two values of (`sums_explain`). No change leaves nothing to explain.
    """
    found, widest = {}, 0.0
    for step, width in spread(calm).items():
        widest = max(widest, width)
        found[step] = changes * widest + sums_explain(calm[0][step], terms) if changes else 0.0
    return found


def sums_explain(loss: float, terms: int) -> float:
    """How far two sums of the same `terms` losses may lie apart, as means, by their order alone.

    Each is at most (terms - 1) x u off, relative to the sum of the sizes; u is half of a last bit (Higham, Accuracy
    and Stability of Numerical Algorithms, 4.2). Cross-entropies are positive, so that sum is the loss itself.
    """
    return 2 * (terms - 1) * float(np.finfo(np.float32).eps) / 2 * loss


def usual_change(curve: Curve) -> float:
    """The median of what the loss changes from one step to the next."""
    steps = sorted(curve)
    return median(abs(curve[after] - curve[before]) for before, after in pairwise(steps))
