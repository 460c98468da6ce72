"""bench/huge_pages.py: each way gets memory, and is timed."""

from __future__ import annotations

from bench.huge_pages import ways
from flowstone.config import MIB


def test_every_way_takes_its_turn_in_each_round() -> None:
    found = ways(4 * MIB, rounds=2)
    assert len(found) == 4
    assert all(len(rounds) == 2 for rounds in found.values())
    assert all(part >= 0 for rounds in found.values() for one in rounds for part in one)
