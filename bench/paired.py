"""Alternating blocks of steps with and without a feature: its cost as ratios of neighbours, with a 95 % interval.

A machine with other users is at times half as fast. A block with the feature is compared with the blocks without it
just before and after, which ran in nearly the same conditions. The result is the median of many such ratios, with the
interval that contains the true median in 95 of 100 runs, whatever the distribution of the ratios.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of each step `within`, and of each step of the blocks `without` on both sides."""

    within: Sequence[float]
    without: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.within) / statistics.median(self.without)


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval.

    By order statistics: the number of values below the true median has a binomial distribution. With fewer than six
    values, the ends are the smallest and the largest, which is a weaker statement.
    """
    ordered, count = sorted(values), len(values)
    outside, rank, at_most = (1 - CONFIDENCE) / 2, 0, 0.5**count
    while at_most <= outside and rank < (count - 1) // 2:
        rank += 1
        at_most += math.comb(count, rank) * 0.5**count
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(blocks: Sequence[Block]) -> dict[str, object]:
    """p50 and p95 of steps with a feature, relative to steps without.

    For p95 each step counts as a multiple of the neighbours' median, so that it shows the variation of the loop, and
    not that of the machine over minutes.
    """
    middle, low, high = interval_of([block.ratio for block in blocks])
    bases = [statistics.median(block.without) for block in blocks]
    within = [step / base for block, base in zip(blocks, bases, strict=True) for step in block.within]
    without = [step / base for block, base in zip(blocks, bases, strict=True) for step in block.without]
    longer = [1e3 * (statistics.median(block.within) - base) for block, base in zip(blocks, bases, strict=True)]
    return {
        "p50": round(middle, 4), "interval": [round(low, 4), round(high, 4)],
        "p95": round(percentile(within, 0.95) / percentile(without, 0.95), 4),
        "longer_ms": [round(bound, 2) for bound in interval_of(longer)],
        "without_ms": round(1e3 * statistics.median(bases), 1), "pairs": len(blocks),
    }


def tell(row: Mapping[str, object]) -> None:
    """Print a line at once, so that it survives if the run is killed."""
    print(json.dumps(row), flush=True)
