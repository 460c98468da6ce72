"""How far the losses of two runs of one training may differ by rounding, if only the order of sums differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import numpy as np

Curve: TypeAlias = Mapping[int, float]
"""Losses by step, each a float32."""


def spread(curves: Sequence[Curve]) -> dict[int, float]:
    """For each step that all curves have, the highest loss minus the lowest."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: max(curve[step] for curve in curves) - min(curve[step] for curve in curves) for step in steps}


def explained(calm: Sequence[Curve], changes: int, terms: int) -> dict[int, float]:
    """For each step, an upper bound of how far the loss may differ from that of the first undisturbed run (`calm[0]`),
    after `changes` changes of the number of ranks.

    Runs on different numbers of ranks add the same numbers in different orders, and differ in nothing else. So the
    spread of the undisturbed runs at a step is the effect of the order up to that step. Rounding errors of two runs may
    cancel at a step, so the largest spread up to that step is used. If the number of ranks changes during a run, the
    effect is not larger than with another number from the start. Each further change adds the same effect again. So far
    this bounds the effect on the weights. The loss itself is one more sum, of `terms` numbers, which also depends on
    the order (`sums_explain`). Without changes the bound is zero.
    """
    bounds, widest = {}, 0.0
    for step, width in spread(calm).items():
        widest = max(widest, width)
        bounds[step] = changes * widest + sums_explain(calm[0][step], terms) if changes else 0.0
    return bounds


def sums_explain(loss: float, terms: int) -> float:
    """How far two means of the same `terms` losses may differ if the losses are added in different orders.

    The error of each sum is at most (terms - 1) x u, relative to the sum of absolute values, where u is half a unit in
    the last place (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Cross-entropies are positive, so the
    sum of absolute values is the sum of the losses itself.
    """
    return 2 * (terms - 1) * float(np.finfo(np.float32).eps) / 2 * loss


def usual_change(curve: Curve) -> float:
    """The median of how much the loss changes from one step to the next."""
    steps = sorted(curve)
    return median(abs(curve[after] - curve[before]) for before, after in pairwise(steps))
