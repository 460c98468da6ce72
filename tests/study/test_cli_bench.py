"""`flowstone bench io` and `flowstone bench --probe`, as a user runs them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowstone_study.export import from_json, to_csv

SMALL = ("--quick", "--bytes", "8MiB", "--rounds", "1")


def flowstone(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowstone", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quick study with all its files, and what it printed."""
    raw = tmp_path_factory.mktemp("told")
    measured = tmp_path_factory.mktemp("measured")
    files = ("--json", raw / "study.json", "--csv", raw / "study.csv", "--html", raw / "study.html")
    done = flowstone("io", measured, *SMALL, *files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress display without a terminal
    assert list(measured.iterdir()) == []
    return raw, done.stdout


def test_quick_study_measures_every_axis_for_real(outcome: tuple[Path, str]) -> None:
    study = from_json((outcome[0] / "study.json").read_text())
    good = [sample for sample in study.samples if sample.error is None]
    assert {s.cell.layout for s in good} == {"tensor", "chunk", "rank", "pair", "shared"}
    assert {s.cell.mix for s in good} == {"synthetic", "3B", "7B", "13B"}
    assert {s.cell.engine for s in good} >= {"posix", "sync"}
    assert {s.cell.processes for s in good} == {1, 4}
    assert {s.cell.direction for s in good} == {"write", "restore"}
    assert all(s.gb_per_s and s.requests and s.engine == s.cell.engine for s in good)
    assert {s.files for s in good if s.cell.layout == "pair"} == {2}


def test_files_of_a_study_agree(outcome: tuple[Path, str]) -> None:
    reported, _ = outcome
    study = from_json((reported / "study.json").read_text())
    assert (reported / "study.csv").read_text() == to_csv(study)
    rows = list(csv.reader((reported / "study.csv").read_text().splitlines()))
    page = (reported / "study.html").read_text()
    assert page.count("<tr>") == len(rows) == len(study.samples) + 1
    assert all(f'<data value="{s.gb_per_s!r}">' in page for s in study.samples if s.error is None)


def test_table_ends_with_the_best_settings(outcome: tuple[Path, str]) -> None:
    tail = outcome[1][outcome[1].rindex("Best settings found") :]
    assert "Save" in tail
    assert "Restore" in tail
    assert tail.count("GB/s") >= 4
    for title in ("Request size and queue depth", "Layout, coalescing, buffering: 3B", "Interface, memory, processes"):
        assert title in outcome[1]


def test_json_alone_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    done = flowstone("io", "--json", tmp_path, *SMALL, "--processes", "1", "--mix", "synthetic")
    study = from_json(done.stdout)
    assert study.path == str(tmp_path)
    assert {sample.cell.mix for sample in study.samples} == {"synthetic"}
    assert {sample.cell.processes for sample in study.samples} == {1}


def test_probe_says_what_works(tmp_path: Path) -> None:
    record = json.loads(flowstone("--probe", tmp_path, "--json").stdout)
    assert record["file_system"]
    assert record["direct_alignment"] in (0, 512, 1024, 2048, 4096)
    alone = flowstone("--probe", cwd=tmp_path)
    assert alone.stdout.splitlines()[0].startswith(f".: {record['file_system']}, Linux ")
    assert [line.partition(":")[0] for line in alone.stdout.splitlines()[1:]] == [
        "io_uring", "O_DIRECT", "registered buffers",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("io", "nowhere", "--quick"), "StorageError: cannot write at nowhere"),
        (("--probe", "nowhere"), "StorageError: cannot write at nowhere"),
        (("io", ".", "--bytes", "many"), "'many' is not a size"),
        (("io", ".", "--bytes", "4KiB"), "less than 8 MiB"),
        (("io", ".", "--bytes", "900000GiB"), "FullError"),
        (("io", ".", "--mix", "70B"), "'70B' is not one of"),
        (("io", ".", "--processes", "5"), "Invalid value for '--processes'"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = flowstone(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_study_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowstone", "bench", "io", str(tmp_path), "--bytes", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob(".flowstone-study-*/*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []
