"""How to choose between things that can only be timed: halving a field, and a duel that tells a gain from noise.

Nothing here knows what is timed. Times are seconds, and less is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

GAIN_MIN = 1.03  # below 3 %, another day's run of the same settings differs by more
PAIRS_MIN = 5  # fewer can not be 95 % sure of anything: five of five is one chance in 32
_DOUBT_MAX = 0.05

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as `before` is `after`, from pairs of times taken one right after the other.

    ratio      median of the pairs' ratios
    low, high  the true median lies between them, and is above `low` with 95 % certainty, whatever the
               distribution (order statistics: the sign test turned round); 0 and infinity with too few pairs
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
        """Whether it is worth having: beyond the noise, and not too little."""
        return self.low > 1 and self.ratio >= GAIN_MIN


def gain(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """What pairs of times say; parallel sequences, at least one pair."""
    ratios = sorted(before / after for before, after in zip(before_s, after_s, strict=True))
    count = len(ratios)
    rank = _sure_rank(count)
    low, high = (0.0, math.inf) if rank is None else (ratios[rank], ratios[count - 1 - rank])
    return Gain(median(ratios), low, high, median(before_s), median(after_s), count)


def _sure_rank(count: int) -> int | None:
    """The most of `count` pairs that chance leaves on the wrong side with a probability of 5 % or less."""
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
    """The fastest of a field: time all of them, drop the slower half by their medians, and so on until one is left.

    A round takes `repeats` turns, each in another order, so that a drift of the device favours
    nobody. What is left has been timed in every round. When time runs out, medians so far decide,
    and the first of the field where there are none.

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
    """How many times `halve` takes the time with a field of `count`."""
    trials = 0
    while count > 1:
        trials += count * repeats
        count = (count + 1) // 2
    return trials


def direct_from(sizes: Sequence[int], buffered_wins: Sequence[bool]) -> int | None:
    """From which total on bytes go past the page cache: the least one from which on it never loses.

    sizes  ascending; parallel to whether going through the page cache was faster there
    returns  0 when it loses nowhere, None when it loses at the largest
    """
    start: int | None = None
    for size, buffered in zip(reversed(sizes), reversed(buffered_wins), strict=True):
        if buffered:
            return start
        start = size
    return 0
