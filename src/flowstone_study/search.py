"""Choosing between candidates by timing: halving a field, and a duel that tells a gain from noise.

Independent of what is timed. Times are seconds; less is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

GAIN_MIN = 1.03  # a smaller gain disappears on another day's run
PAIRS_MIN = 5  # fewer cannot give 95 % certainty: five of five is one chance in 32
_DOUBT_MAX = 0.05

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster `after` is than `before`, from pairs of times measured one right after the other.

    ratio      median of the pairs' ratios
    low, high  confidence interval of the true median: it is above `low` with 95 % certainty, for any
               distribution (order statistics: the sign test inverted); 0 and infinity with too few pairs
    before_s   median time before
    after_s    median time after
    """

    ratio: float
    low: float
    high: float
    before_s: float
    after_s: float
    pairs: int

    @property
    def certain(self) -> bool:
        """Whether to use it: beyond the noise, and not too small."""
        return self.low > 1 and self.ratio >= GAIN_MIN


def gain(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """The gain from parallel sequences of times; at least one pair."""
    ratios = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    count = len(ratios)
    rank = _sure_rank(count)
    low, high = (0.0, math.inf) if rank is None else (ratios[rank], ratios[count - 1 - rank])
    return Gain(median(ratios), low, high, median(before_s), median(after_s), count)


def _sure_rank(count: int) -> int | None:
    """The largest number of `count` pairs that are on the wrong side by chance with a probability of at most 5 %."""
    chance, rank = 0.0, None
    for wrong in range(count):
        chance += math.comb(count, wrong) / 2**count
        if chance > _DOUBT_MAX:
            break
        rank = wrong
    return rank


def duel(
    before: Candidate, after: Candidate, time_s: Callable[[Candidate], float], *, pairs: int,
    expired: Callable[[], bool],
) -> Gain | None:
    """Time both `pairs` times, in turns, each first in every other pair. None if time ran out before PAIRS_MIN."""
    before_s: list[float] = []
    after_s: list[float] = []
    for number in range(pairs):
        if expired():
            break
        for candidate, times in ((before, before_s), (after, after_s))[:: 1 if number % 2 == 0 else -1]:
            times.append(time_s(candidate))
    return gain(before_s, after_s) if len(before_s) >= PAIRS_MIN else None


def halve(
    field: Sequence[Candidate], time_s: Callable[[Candidate], float], *, repeats: int, expired: Callable[[], bool]
) -> Candidate:
    """The fastest of a field: time all of them, drop the slower half by their medians, repeat until one is left.

    A round takes `repeats` turns, each in another order, so that a drift of the device favours no candidate. The last
    one has been timed in every round. When time runs out, the medians so far decide; without any, the first of the
    field is returned.

    Source: successive halving, Jamieson and Talwalkar, AISTATS 2016.
    """
    order = random.Random(0)
    times: dict[int, list[float]] = {number: [] for number in range(len(field))}
    left = list(times)
    while len(left) > 1 and not expired():
        for _ in range(repeats):
            order.shuffle(left)
            for number in left:
                if expired():
                    break
                times[number].append(time_s(field[number]))
        left.sort(key=lambda number: (median(times[number]) if times[number] else math.inf, number))
        left = left[: (len(left) + 1) // 2]
    return field[left[0]]


def halving_trials(count: int, repeats: int) -> int:
    """The number of timings that `halve` makes for a field of `count`."""
    trials = 0
    while count > 1:
        trials += count * repeats
        count = (count + 1) // 2
    return trials


def direct_from(sizes: Sequence[int], buffered_wins: Sequence[bool]) -> int | None:
    """The smallest total from which on bytes should bypass the page cache: from there on it is never slower.

    sizes    ascending; parallel to whether going through the page cache was faster there
    returns  0 if buffered is faster nowhere, None if it is faster at the largest size
    """
    start: int | None = None
    for size, buffered in zip(reversed(sizes), reversed(buffered_wins), strict=True):
        if buffered:
            return start
        start = size
    return 0
