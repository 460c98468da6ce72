"""bench/pairs.py: two trees in pairs; the arithmetic, the checkout of the other tree, and one run end to end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import made_up
import pytest

from bench import figures, launch, pairs, script
from bench.checkouts import CheckoutError, Tree, other_tree, resolve, set_up, this_tree
from bench.launch import ROOT
from bench.pair_worker import Equal, Saver, Turn
from bench.pairs import FIGURES, HOW, NAME, OTHER, THIS, Comparison, TurnError
from bench.records import Measured, Outcome
from bench.report import markers, section
from bench.state import build, flatten, is_exact, spoil
from warm_start import warm_start

GB = made_up.GB
TREES = (Tree(THIS, "1", "one", Path(sys.executable)), Tree(OTHER, "2", "two", Path(sys.executable)))
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not in a git repository")


# Arithmetic


def compared(*seconds: tuple[float, float]) -> Comparison:
    """Made up of how long both trees take in each pair; a first save takes twice as long.

    Who goes first in a round takes half as long again, as if what was removed before were still on its way.
    """
    measured = []
    for pair, both in enumerate(seconds, 1):
        for number, first in ((2 * pair - 1, THIS), (2 * pair, OTHER)):
            for tree, least_s in zip((THIS, OTHER), both, strict=True):
                took_s = least_s * (1.5 if tree == first else 1)
                saves = (made_up.save(1, 2 * took_s), made_up.save(2, took_s), made_up.save(3, took_s))
                measured.append(Measured(tree, number, Outcome(2 * GB, saves=saves, note="by hand")))
                load = replace(made_up.load(took_s / 2, how=HOW), cpu_s=took_s / 10)
                measured.append(Measured(tree, number, Outcome(2 * GB, loads=(load,))))
    return Comparison("abc", "def", made_up.run(measured, rounds=2 * len(seconds)))


def test_ratios_are_of_pairs_and_less_is_in_favour() -> None:
    # The third pair is three times as slow for both: it moves the absolute median, and no ratio.
    rows = {row[0]: row[1:] for row in pairs.table(compared((1.0, 2.0), (2.0, 1.0), (2.4, 3.0)).run).rows}
    assert rows["durable save, later, s"] == (
        "0.800 (0.500-2.000)", "2 of 3", "2.000 (1.000-2.400)", "2.000 (1.000-3.000)"
    )
    assert rows["durable save, first of a process, s"][0] == "0.800 (0.500-2.000)"
    assert rows["durable save, first of a process, s"][2] == "4.000 (2.000-4.800)"
    assert rows["cold load, s"][1:3] == ("2 of 3", "1.000 (0.500-1.200)")
    assert rows["CPU-s/GB, cold load"] == (
        "0.800 (0.500-2.000)", "2 of 3", "0.100 (0.050-0.120)", "0.100 (0.050-0.150)"
    )
    assert rows["CPU-s/GB, save, later"] == ("1.000", "0 of 3", "0.100", "0.100"), "equal is in favour of neither"
    assert list(rows) == [figure.title for figure in FIGURES]


def test_equal_trees_are_equal_whoever_goes_first() -> None:
    for row in pairs.table(compared((1.0, 1.0), (2.0, 2.0)).run).rows:
        assert row[1:3] == ("1.000", "0 of 2"), row[0]


def test_a_round_without_its_other_half_is_left_out() -> None:
    comparison = compared((1.0, 2.0), (3.0, 1.0))
    whole = tuple(item for item in comparison.run.measured if item.round < 4)
    rows = {row[0]: row[1:3] for row in pairs.table(replace(comparison.run, measured=whole)).rows}
    assert rows["cold load, s"] == ("0.500", "1 of 1")


def test_an_odd_number_of_rounds_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pairs.parse(["HEAD", "--rounds", "3"])
    assert "--rounds 3 is odd: each tree goes first in every second round" in capsys.readouterr().err


def test_who_goes_first_changes_with_each_round() -> None:
    order = [
        (task.what, tree.name)
        for number in (1, 2) for tree, task in pairs.turns(number, TREES, Path("stores"), GB, 0.0)
    ]
    first = [("save", THIS), ("save", OTHER), ("load", THIS), ("load", OTHER)]
    assert order == [*first, *(first[index] for index in (1, 0, 3, 2))]
    tasks = [task for _, task in pairs.turns(1, TREES, Path("stores"), GB, 0.0)]
    assert tasks[0].directory == tasks[2].directory != tasks[1].directory == tasks[3].directory
    assert tasks[2].number == tasks[0].times, "the newest is loaded"


def test_a_load_from_the_page_cache_is_told() -> None:
    comparison = compared((1.0, 2.0))
    assert "Files were dropped from the page cache" in pairs.conditions(comparison.run)
    last = comparison.run.measured[-1].outcome
    assert last is not None
    for cold, message in ((False, "NOT DROPPED FROM"), (None, "perhaps not dropped from")):
        warm = replace(last, loads=(replace(last.loads[0], cold=cold),))
        measured = (*comparison.run.measured[:-1], replace(comparison.run.measured[-1], outcome=warm))
        assert message in pairs.conditions(replace(comparison.run, measured=measured))


def test_the_section_of_a_page_names_both_commits_and_no_goals() -> None:
    text = section(pairs.report(compared((1.0, 2.0))))
    assert "Goals" not in text
    assert "- this tree: abc, with by hand.\n- the other: def, with by hand." in text
    assert "| cold load, s | 0.500 | 1 of 1 | 0.500 | 1.000 |" in text


# The state


def test_the_state_has_the_tensors_and_bytes_that_are_asked_for(tmp_path: Path) -> None:
    layout = Equal(30, 1_200_000)
    state = build(layout)
    tensors = flatten(state)
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors.values())) == (30, layout.state_bytes)
    assert layout.state_bytes == 1_200_000
    saver = Saver(tmp_path / "store")
    saver.prepare(state, "save")
    saver.save(state, 1)()
    spoil(state)
    assert not is_exact(state)
    saver.load(state, 1, HOW)
    saver.close()
    assert is_exact(state), "parameters and moments of the optimizer are the state's own tensors"


# Where the other tree comes from


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(repository), *identity, *arguments], check=True, capture_output=True)


MAKEFILE = """\
setup: .venv/bin/python
.venv/bin/python:
	echo once >> set-ups.txt
	mkdir -p .venv/bin
	cp python.sh $@
"""
OWN_PYTHON = f"""\
#!/bin/sh
PYTHONPATH="$(dirname "$0")/../../src" exec {sys.executable} -S "$@"
"""
OURS = f"""\
#!/bin/sh
exec {sys.executable} "$@"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of one commit, with a package of its own and a set-up that notes each time at which it did something."""
    path = tmp_path / "repository"
    (path / "src" / "flowstone").mkdir(parents=True)
    git(path, "init", "--quiet")
    (path / "src" / "flowstone" / "__init__.py").touch()
    (path / "python.sh").write_text(OWN_PYTHON)
    (path / "python.sh").chmod(0o755)
    (path / ".gitignore").write_text("runs/\n")
    commit(path, "Makefile", MAKEFILE)
    return path


def commit(repository: Path, name: str, text: str) -> str:
    """The abbreviated hash of a commit in which the file `name` holds `text`."""
    (repository / name).write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", f"Another {name}")
    return resolve(repository, "HEAD")


def test_a_commit_is_checked_out_and_set_up_once(repository: Path) -> None:
    old = resolve(repository, "HEAD")
    commit(repository, "Makefile", "setup:\n\texit 1\n")
    actual = [other_tree(repository, old, OTHER) for _ in range(2)]
    root = repository / "runs" / "bench" / "pairs" / old
    assert actual[0] == actual[1]
    assert (actual[0].python, actual[0].commit) == (root / ".venv" / "bin" / "python", old)
    assert actual[0].title.endswith('("Another Makefile")')
    assert (root / "Makefile").read_text() == MAKEFILE
    assert (root / "set-ups.txt").read_text() == "once\n"


def test_a_checkout_that_was_removed_is_made_again(repository: Path) -> None:
    old = resolve(repository, "HEAD")
    python = other_tree(repository, old, OTHER).python
    shutil.rmtree(python.parents[2])
    assert other_tree(repository, old, OTHER).python == python
    assert python.exists()


def test_a_checkout_that_was_changed_is_refused(repository: Path) -> None:
    old = resolve(repository, "HEAD")
    root = other_tree(repository, old, OTHER).python.parents[2]
    (root / "Makefile").write_text(MAKEFILE + "\n")
    with pytest.raises(CheckoutError, match=f"does not hold commit {old} as it was: remove it"):
        other_tree(repository, old, OTHER)


def test_a_set_up_that_fails_tells_what_make_said(repository: Path) -> None:
    broken = commit(repository, "Makefile", "setup:\n\t@echo no compiler here; exit 1\n")
    with pytest.raises(CheckoutError, match=r"(?s)make setup.*failed:.*no compiler here"):
        other_tree(repository, broken, OTHER)


def test_an_environment_with_the_flowstone_of_another_tree_is_refused(repository: Path) -> None:
    wrong = commit(repository, "python.sh", OURS)
    with pytest.raises(CheckoutError, match="imports Flowstone from"):
        other_tree(repository, wrong, OTHER)


def test_a_tree_that_is_not_set_up_is_an_error_that_says_so(repository: Path) -> None:
    with pytest.raises(CheckoutError, match="is not set up; `make setup` there does that"):
        this_tree(repository, THIS)


def test_changes_that_are_not_committed_are_told(repository: Path) -> None:
    set_up(repository)
    assert this_tree(repository, THIS).title.endswith('("Another Makefile")')
    (repository / "Makefile").write_text(MAKEFILE + "\n")
    assert this_tree(repository, THIS).title.endswith('("Another Makefile"), and changes since')


def test_an_unknown_commit_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench\.pairs: 'no-such-commit' is no commit of this repository"):
        pairs.main(["no-such-commit", str(tmp_path / "bench")])
    assert not (tmp_path / "bench").exists()


def test_no_commit_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pairs.main([])
    assert "COMMIT is missing" in capsys.readouterr().err


# Processes


def test_a_tree_is_measured_without_the_import_paths_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch.environment(tmp_path)["PYTHONPATH"] == os.pathsep.join((str(launch.ROOT), str(tmp_path)))
    assert launch.environment(tmp_path, alone=True)["PYTHONPATH"] == str(launch.ROOT)


def test_no_tree_compiles_its_modules_inside_every_timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in launch.environment(tmp_path)


def test_a_process_that_fails_names_its_tree(tmp_path: Path) -> None:
    message = r"^the other, two: load: flowstone\.errors\.NoCheckpointError: .*; next +check the path"
    (_, (tree, task)) = [turn for turn in pairs.turns(1, TREES, tmp_path, 1_000_000, 0.0) if turn[1].what == "load"]
    with warm_start("bench.pair_worker"), pytest.raises(TurnError, match=message):
        pairs.take(tree, Turn(30, task))


@pytest.mark.usefixtures("conductor")
@needs_git
def test_a_small_run_of_this_tree_against_its_own_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = resolve(ROOT, "HEAD")
    trees = tuple(Tree(name, commit, f"{commit} as {name}", Path(sys.executable)) for name in (THIS, OTHER))
    raw, page = tmp_path / "raw.json", tmp_path / "page.md"
    page.write_text("before\n{}\nold\n{}\nafter\n".format(*markers(NAME)))
    small = ["--bytes", "3e6", "--tensors", "30", "--rounds", "2", "--settle-s", "0"]
    options = pairs.parse([commit, str(tmp_path / "bench"), *small, "--json", str(raw)])
    with warm_start("bench.pair_worker"), script.workplace(options.directory) as (directory, bar):
        actual = pairs.measure(options, (trees[0], trees[1]), directory, bar)
    assert script.read(raw, Comparison) == actual
    assert [(item.round, item.rival) for item in actual.run.measured] == [
        (1, THIS), (1, OTHER), (1, THIS), (1, OTHER), (2, OTHER), (2, THIS), (2, OTHER), (2, THIS)
    ]
    for figure in FIGURES:
        ratios = figures.ratios(figure.of(actual.run, THIS), figure.of(actual.run, OTHER))
        assert len(ratios) == 1, figure.title
        assert min(ratios) > 0
    assert not list(options.directory.iterdir())
    assert pairs.main(["--from", str(raw), "--update", str(page)]) == 0
    assert f"the other: {commit} as the other, with Flowstone " in capsys.readouterr().out.replace("\n", " ")
    assert "\nold\n" not in page.read_text()
    assert f"python -m bench.pairs {commit} DIRECTORY --bytes 0.003e9 --tensors 30 --rounds 2`" in page.read_text()
