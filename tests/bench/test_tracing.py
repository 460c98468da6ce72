"""bench/tracing.py: the cost of an open trace, from end to end, and as a goal."""

from __future__ import annotations

from pathlib import Path

from bench.tracing import goal_lines, measure, ratios


def test_who_goes_first_changes_and_ratios_are_of_neighbours() -> None:
    order: list[str] = []

    def timed(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    actual = ratios(4, lambda: timed("traced", 3.0), lambda: timed("plain", 2.0))
    assert actual == [1.5] * 4
    assert order == ["traced", "plain", "plain", "traced"] * 2


def test_a_goal_is_missed_above_one_percent() -> None:
    (passed, missed) = goal_lines({"a": [0.9, 1.01, 1.2], "b": [0.9, 1.02, 1.2]})
    assert passed == "- pass  a: 1.010 (0.900-1.200), goal at most 1.01"
    assert missed.startswith("- miss  b: 1.020")


def test_a_quick_run_from_end_to_end(tmp_path: Path) -> None:
    actual = measure(tmp_path / "store", size=3_000_000, tensors=30, rounds=2)
    assert [len(of) for of in actual.values()] == [2, 2]
    assert all(item > 0 for of in actual.values() for item in of)
