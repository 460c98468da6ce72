"""bench/huge_pages.py: memory of each kind is allocated and timed."""

from __future__ import annotations

from bench.huge_pages import ways
from flowstone.config import MIB


def test_every_way_takes_its_turn_in_each_round() -> None:
    actual = ways(4 * MIB, rounds=2)
    assert len(actual) == 4
    assert all(len(rounds) == 2 for rounds in actual.values())
    assert all(part >= 0 for rounds in actual.values() for item in rounds for part in item)
