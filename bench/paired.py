"""Blocks of steps with and without something, by turns: what it costs, as ratios of neighbours, with an interval.

A machine that others use is at times half as fast. A block with is compared with the blocks without before and behind
it, which met nearly the same machine, and the median of many such ratios is told with the interval that holds the true
one in 95 of 100 runs, whatever the ratios' distribution.
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
    """The median, and the ends of its interval: order statistics, by the binomial distribution of how many values lie
    below the true median. Of fewer than six values, the ends are the smallest and the largest, which say less.
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
    """p50 and p95 of steps with, of that without. For p95 each step counts as a multiple of the neighbours' median, so
    that it shows the loop's own spread, and not that of the machine over minutes.
    """
    middle, low, high = interval_of([one.ratio for one in blocks])
    bases = [statistics.median(one.without) for one in blocks]
    within = [step / base for one, base in zip(blocks, bases, strict=True) for step in one.within]
    without = [step / base for one, base in zip(blocks, bases, strict=True) for step in one.without]
    longer = [1e3 * (statistics.median(one.within) - base) for one, base in zip(blocks, bases, strict=True)]
    return {
        "p50": round(middle, 4), "interval": [round(low, 4), round(high, 4)],
        "p95": round(percentile(within, 0.95) / percentile(without, 0.95), 4),
        "longer_ms": [round(one, 2) for one in interval_of(longer)],
        "without_ms": round(1e3 * statistics.median(bases), 1), "pairs": len(blocks),
    }


def tell(row: Mapping[str, object]) -> None:
    """Print a line now: whoever kills the run has it."""
    print(json.dumps(row), flush=True)
