"""Choose between candidates by measuring their times: successive halving, and a duel that tells a gain from noise.

Works for any operation. Times are in seconds, and less is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

GAIN_MIN = 1.03  # a smaller gain may be gone on another day
# fewer pairs cannot give 95 % certainty: that all of five are on one side by chance has a probability of 1/32
PAIRS_MIN = 5
_DOUBT_MAX = 0.05

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster `after` is than `before`, from pairs of consecutive measurements.

    ratio      median of the pairs' ratios, before / after
    low, high  confidence interval of the true median. It is above `low` with a certainty of 95 %, whatever the
               distribution (an inverted sign test). With too few pairs, 0 and infinity
    before_s   median time of `before` in seconds
    after_s    median time of `after` in seconds
    """

    ratio: float
    low: float
    high: float
    before_s: float
    after_s: float
    pairs: int

    @property
    def certain(self) -> bool:
        """Whether the gain is certainly not noise, and large enough to use."""
        return self.low > 1 and self.ratio >= GAIN_MIN


def gain(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """The gain, computed from two sequences of times; equal positions form a pair. There must be at least one pair."""
    ratios = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    count = len(ratios)
    rank = _sure_rank(count)
    low, high = (0.0, math.inf) if rank is None else (ratios[rank], ratios[count - 1 - rank])
    return Gain(median(ratios), low, high, median(before_s), median(after_s), count)


def _sure_rank(count: int) -> int | None:
    """The largest number of `count` pairs that can be on the wrong side by chance with a probability of at most 5 %.
    None if there is none.
    """
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
    """Measure both candidates `pairs` times, in alternating order. None if the time was over before PAIRS_MIN pairs
    were measured.
    """
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
    """Find the fastest candidate of a field: measure all, drop the half with the slower medians, and repeat this until
    one is left.

    Each round measures all candidates `repeats` times, each time in another order, so that a drift of the device favors
    none. If the time is over, the medians so far decide. If there are none yet, the first candidate is returned.

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
    """How many measurements `halve` makes for a field of `count` candidates."""
    trials = 0
    while count > 1:
        trials += count * repeats
        count = (count + 1) // 2
    return trials


def direct_from(sizes: Sequence[int], buffered_wins: Sequence[bool]) -> int | None:
    """The smallest size from which on direct I/O (O_DIRECT) is never slower than buffered I/O (through the page cache).

    sizes          sizes in bytes, ascending
    buffered_wins  for each size, whether buffered I/O was faster
    returns        0 if buffered I/O is never faster; None if it is faster at the largest size
    """
    start: int | None = None
    for size, buffered in zip(reversed(sizes), reversed(buffered_wins), strict=True):
        if buffered:
            return start
        start = size
    return 0
