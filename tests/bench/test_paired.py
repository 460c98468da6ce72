"""bench/paired.py: ratios of neighbouring blocks, and the interval of their median."""

from __future__ import annotations

import random

from bench.paired import CONFIDENCE, Block, interval_of, summary


def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    drawn = random.Random(5)
    for count in (6, 17, 30):
        held = 0
        for _ in range(2000):
            low, high = interval_of([drawn.expovariate(1.0) for _ in range(count)])[1:]
            held += low <= 0.6931 <= high  # the median of that distribution, which is far from symmetric
        assert CONFIDENCE - 0.015 < held / 2000 < 0.99, count


def test_the_interval_gets_smaller_with_more_values_and_holds_their_median() -> None:
    values = [float(index) for index in range(101)]
    assert interval_of(values) == (50.0, 40.0, 60.0)
    assert interval_of(values[:5]) == (2.0, 0.0, 4.0)
    assert interval_of([3.0]) == (3.0, 3.0, 3.0)


def test_a_machine_that_gets_slower_for_minutes_is_in_no_ratio() -> None:
    blocks = [Block([1.1 * speed] * 4, [speed] * 8) for speed in (0.2, 0.3, 0.6, 0.2, 0.4, 0.2)]
    result = summary(blocks)
    assert result["p50"] == result["p95"] == 1.1
    assert result["interval"] == [1.1, 1.1]
    assert result["without_ms"] == 250.0
