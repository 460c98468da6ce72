"""Whatever a training loop does: no wrong byte is committed, no process dies, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hostile.campaign import Report, campaign
from hostile.draw import draw
from hostile.moves import BROKEN, MOVES, Detection
from hostile.shrink import kind, shrink

PLAYED = range(len(MOVES))  # each move is selected once, and made twice in its loop
SOAKED = range(1000, 21_000)


def names_of(seed: int) -> Counter[str]:
    return Counter(name for name, _ in draw(seed).moves)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return campaign(PLAYED.start, PLAYED.stop, tmp_path_factory.mktemp("hostile"))


def test_a_hundred_hostile_loops_commit_what_they_saved_or_are_told_by_name(report: Report) -> None:
    assert not report.wrong, report.says()


def test_their_moves_fell_into_captures_and_were_found(report: Report) -> None:
    counts = report.counts
    assert counts["committed"] > 220
    assert report.found(Detection.SAMPLES) > 44
    assert report.found(Detection.EXACT) > 3
    assert not report.missed(times=2)
    assert sum(count for name, count in counts.items() if name.startswith("met ")) > 385


def test_every_move_that_is_known_to_break_something_is_a_move() -> None:
    assert BROKEN.keys() <= MOVES.keys()


def test_a_seed_stands_for_the_same_loop_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).moves for seed in range(50)}) == 50


def test_every_move_has_its_turn_in_as_many_seeds_as_there_are_moves() -> None:
    drawn = {name for seed in range(300, 300 + len(MOVES)) for name, times in names_of(seed).items() if times > 1}
    assert drawn >= MOVES.keys() - BROKEN.keys()


def test_a_loop_is_shrunk_to_the_moves_that_matter() -> None:
    drawn = next(loop for loop in map(draw, range(100)) if len(loop.moves) > 10)
    guilty = {drawn.moves[2], drawn.moves[7]}
    shortest, positions = shrink(drawn, lambda loop: guilty <= set(loop.moves))
    assert positions == (2, 7)
    assert set(shortest.moves) == guilty


def test_a_problem_of_any_text_is_of_some_kind() -> None:
    assert kind([]) == ""
    assert kind([""]) == kind(["\n"]) != ""
    assert kind(["it hung after 20 s", "more"]) == "it hung after 20 s"
    traces = ["Traceback of it:\n  File x\nKeyError: 'exp_avg'\n"], ["Traceback\nKeyError: 3"]
    assert [kind(trace) for trace in traces] == ["KeyError: "] * 2


def test_a_library_that_hears_of_no_change_is_found_to_commit_wrong_bytes(tmp_path: Path) -> None:
    report = campaign(0, 6, tmp_path, moves=("add-through-data", "fill-by-address"), mutation="blind")
    assert any("COMMITTED WRONG" in line["problems"][0] for line in report.wrong)


def test_a_library_whose_steps_do_not_wait_is_found_to_fail_for_nothing(tmp_path: Path) -> None:
    report = campaign(0, 4, tmp_path, moves=("train",), mutation="unfenced")
    assert any("failed, and nothing had escaped" in line["problems"][0] for line in report.wrong)


@pytest.mark.soak
def test_twenty_thousand_hostile_loops(tmp_path: Path) -> None:
    report = campaign(SOAKED.start, SOAKED.stop, tmp_path, workers=2)
    print(dict(report.counts))
    assert not report.wrong, report.says()


@pytest.mark.parametrize("module", ["hostile", "golden.make"])
def test_programs_of_the_tests_start_from_their_folder(module: str) -> None:
    """As docs/TESTING.md says, without a PYTHONPATH: `golden.make` ends because its argument is missing."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", module, *["--help"] * (module == "hostile")], cwd=Path(__file__).parents[1],
        env=environment, capture_output=True, text=True, check=False,
    )
    assert "ModuleNotFoundError" not in done.stderr
    assert (done.returncode == 0) == (module == "hostile"), done.stderr
