"""The benchmark of loads in place: both ways load the saved bytes, and report how they read."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from bench import in_place
from bench.in_place import Sample, lines, load, save
from warm_start import warm_start

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = 64 << 20


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    namespace = Namespace(directory=tmp_path / "run", bytes=SIZE, tensors=4)
    save(namespace)
    return namespace


def test_each_way_loads_all_bytes_its_own_way(options: Namespace) -> None:
    assert load(options, in_place=False).in_place_bytes == 0
    # Where the new tensors happen to lie at the phase of the file.
    assert 0 <= load(options, in_place=True).in_place_bytes <= SIZE


def test_a_load_of_something_else_is_an_error(options: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place.fs.Checkpointer, "load", lambda self, state: None)
    with pytest.raises(ValueError, match="tensor 0 is not what was saved"):
        load(options, in_place=True)


def test_the_table_compares_within_pairs() -> None:
    slow, fast = Sample(2.0, 0.5, 100_000_000, 0), Sample(1.0, 0.25, 4_000_000, 10**9)
    text = "\n".join(lines([{False: slow, True: fast}, {False: fast, True: slow}, {False: slow, True: fast}], 10**9))
    assert "| in place | 1.00 (1.00-2.00) | 0.250 (0.250-0.500) | 4 (4-100) | 100% |" in text
    assert "A load in place took 0.50 (0.50-2.00) of the time of a load through the arena, and was faster in" in text


def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("kept")
    command = [sys.executable, "-m", "bench.in_place", str(tmp_path), "--bytes", "16e6", "--tensors", "4"]
    done = subprocess.run([*command, "--rounds", "1"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| through the arena |" in done.stdout
    assert "of 1 rounds" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["ours"], "nothing of it is left, and all that was there"


# Its processes look for its functions in the main module, which in a forked program is that of warm_start.
SPAWNING = {"bench.collapsed_training"}


@pytest.mark.parametrize("command", [
    ["bench.small_tensors", "--tensors", "8", "--rounds", "1", "--states", "plain"],
    ["bench.device_tensors", "--simulate", "--parameters", "3", "--rounds", "4"],
    ["bench.tracing", "--bytes", "16e6", "--tensors", "4", "--rounds", "1"],
    ["bench.watching", "--bytes", "16e6", "--tensors", "4", "--saves", "2", "--pages", "small"],
    ["bench.collapsed_training", "--rounds", "1", "--layers", "2", "--seconds", "0.1"],
])
def test_what_was_in_the_directory_stays(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("kept")
    module, *options = command
    with warm_start(*{module} - SPAWNING, name="bench"):
        done = subprocess.run([sys.executable, "-m", module, str(tmp_path), *options], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
