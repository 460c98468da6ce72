"""Halving finds the fastest setting, and a duel distinguishes a gain from noise, all on synthetic times."""

import math
import random
from collections.abc import Callable

import pytest

from flowstone_study.search import GAIN_MIN, PAIRS_MIN, direct_from, duel, gain, halve, halving_trials


def never() -> bool:
    return False


def after(calls: int) -> Callable[[], bool]:
    """True from the next question on after so many."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 31])
@pytest.mark.parametrize("repeats", [1, 2])
def test_halving_finds_the_fastest_and_counts_its_trials(count: int, repeats: int) -> None:
    field = list(range(count))
    random.Random(count).shuffle(field)
    timed: list[int] = []

    def time_s(candidate: int) -> float:
        timed.append(candidate)
        return 1.0 + candidate

    assert halve(field, time_s, repeats=repeats, expired=never) == 0
    assert len(timed) == halving_trials(count, repeats)
    if count > 1:
        assert timed.count(0) > timed.count(count - 1) or count == 2, "the slower half is timed no more"


def test_halving_survives_noise_by_medians_over_rounds() -> None:
    noise = random.Random(7)
    wins = sum(
        halve(range(8), lambda c: (1 + 0.1 * c) * noise.uniform(1, 1.3), repeats=2, expired=never) <= 1
        for _ in range(200)
    )
    assert wins > 160


def test_a_drift_of_the_device_favours_nobody() -> None:
    """Every trial is slower than the one before it, by more than what the candidates differ in."""
    clock = [0.0]

    def time_s(candidate: int) -> float:
        clock[0] += 0.002
        return 1 + 0.05 * candidate + clock[0]

    assert halve(range(8), time_s, repeats=2, expired=never) <= 1


def test_halving_out_of_time_decides_by_what_it_has() -> None:
    assert halve([5, 3, 4], lambda c: float(c), repeats=1, expired=lambda: True) == 5, "nothing timed: the first"
    assert halve([5, 3, 4], lambda c: float(c), repeats=3, expired=after(8)) == 3


@pytest.mark.parametrize(("pairs", "rank"), [(5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (12, 2), (13, 3)])
def test_bounds_are_those_of_the_sign_test(pairs: int, rank: int) -> None:
    actual = gain([float(n) for n in range(1, pairs + 1)], [1.0] * pairs)
    assert (actual.low, actual.high) == (rank + 1, pairs - rank)
    assert actual.ratio == (pairs + 1) / 2


def test_too_few_pairs_are_sure_of_nothing() -> None:
    actual = gain([9.0] * (PAIRS_MIN - 1), [1.0] * (PAIRS_MIN - 1))
    assert (actual.low, actual.high) == (0, math.inf)
    assert not actual.certain


@pytest.mark.parametrize(
    ("ratios", "certain"),
    [([1.1] * 8, True), ([1.0] * 8, False), ([GAIN_MIN - 0.01] * 8, False), ([1.5] * 6 + [0.9] * 2, False),
     ([1.5] * 7 + [0.1], True), ([0.5] * 8, False)],
)
def test_gain_is_certain_when_it_is_large_and_nearly_always_there(ratios: list[float], certain: bool) -> None:
    assert gain(ratios, [1.0] * len(ratios)).certain is certain


def test_noise_alone_is_seldom_taken_for_a_gain() -> None:
    noise = random.Random(3)
    taken = sum(
        gain([noise.gauss(1, 0.1) for _ in range(8)], [noise.gauss(1, 0.1) for _ in range(8)]).certain
        for _ in range(1000)
    )
    assert taken < 60, "more often than the 5 % that it promises"


def test_a_duel_takes_turns_at_going_first() -> None:
    timed: list[str] = []

    def time_s(candidate: str) -> float:
        timed.append(candidate)
        return {"before": 3.0, "after": 2.0}[candidate]

    actual = duel("before", "after", time_s, pairs=6, expired=never)
    assert timed == ["before", "after", "after", "before"] * 3
    assert actual is not None
    assert (actual.ratio, actual.before_s, actual.after_s, actual.pairs) == (1.5, 3.0, 2.0, 6)


def test_a_duel_that_is_cut_short_counts_only_with_enough_pairs() -> None:
    assert duel(2.0, 1.0, float, pairs=8, expired=after(PAIRS_MIN - 1)) is None
    actual = duel(2.0, 1.0, float, pairs=8, expired=after(PAIRS_MIN))
    assert actual is not None
    assert actual.pairs == PAIRS_MIN


@pytest.mark.parametrize(
    ("wins", "expected"),
    [([False] * 3, 0), ([True, False, False], 20), ([True, True, False], 30), ([False, True, False], 30),
     ([True] * 3, None), ([False, False, True], None)],
)
def test_direct_begins_above_the_last_size_at_which_it_loses(wins: list[bool], expected: int | None) -> None:
    assert direct_from([10, 20, 30], wins) == expected
