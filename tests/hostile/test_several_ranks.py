"""Whatever the ranks of a job do: no wrong byte is committed, no rank hangs, and the job continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.campaign import Report, campaign
from hostile.ranks.draw import SIZES, draw
from hostile.ranks.moves import BROKEN, MOVES, Ending
from hostile.ranks.play import misses

SEEDS = 14
SOAKED = range(1000, 2000)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return campaign(0, SEEDS, tmp_path_factory.mktemp("ranks"), workers=2, several_ranks=True)


def test_hostile_jobs_commit_what_all_their_ranks_saved_or_are_told_by_name(report: Report) -> None:
    assert not report.wrong, report.says()


def test_their_saves_were_committed_and_failed_and_loaded_by_other_numbers_of_ranks(report: Report) -> None:
    counts = report.counts
    assert counts["right"] > 2 * SEEDS
    assert counts["failed"] > SEEDS
    assert counts["loads"] > SEEDS
    assert sum(count for name, count in counts.items() if name.startswith("made ")) > 4 * SEEDS


def test_moves_of_ranks_that_are_known_to_break_something_are_moves() -> None:
    assert BROKEN.keys() <= MOVES.keys()


def test_a_seed_stands_for_the_same_jobs_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert {draw(seed).lives()[0].size for seed in range(50)} == {4}
    assert {life.size for seed in range(200) for life in draw(seed).lives()} == set(SIZES)


def test_moves_keep_their_seeds_and_places_where_others_are_left_out() -> None:
    drawn = next(item for item in map(draw, range(100)) if len(item.lives()) > 1)
    assert [life.ending is Ending.NONE for life in drawn.lives()] == [False] * (len(drawn.lives()) - 1) + [True]
    assert drawn.only([0, 2]).moves == (drawn.moves[0], drawn.moves[2])


@pytest.mark.parametrize(("mutation", "move", "seed"), [("blind", "change-on-all", 8), ("mixing", "drift", 0)])
def test_a_library_that_looks_away_is_found_to_commit_wrong_bytes(
    tmp_path: Path, mutation: str, move: str, seed: int
) -> None:
    report = campaign(seed, seed + 1, tmp_path, moves=(move,), mutation=mutation, several_ranks=True)
    assert any("COMMITTED WRONG" in problem for line in report.wrong for problem in line["problems"])


@pytest.mark.soak
def test_a_thousand_hostile_jobs(tmp_path: Path) -> None:
    report = campaign(SOAKED.start, SOAKED.stop, tmp_path, workers=4, several_ranks=True)
    print(dict(report.counts))
    assert not report.wrong, report.says()


def test_silence_is_excused_of_ranks_that_were_killed_alone() -> None:
    message = "nothing heard from ranks 0, 3 for 3 s\n  phase       the commit of step 1"
    assert misses(message, {0, 2, 3})
    assert not misses(message, {0})
    assert not misses("rank 0 has closed its Checkpointer", {0})
