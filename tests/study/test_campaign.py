"""A campaign continues after impossible settings, ends in time, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from confined import LIMIT_BYTES

from flowstone import _native
from flowstone.config import KIB, MIB
from flowstone.errors import BudgetError, FullError
from flowstone_study import campaign
from flowstone_study.cache import _cachestat, _mincore, drop_cached
from flowstone_study.planning import base_cell, plan, quick_scope
from flowstone_study.probe import REGISTERED_BYTES, probe
from flowstone_study.records import MIXES, Cell

BASE = Cell(direction="write", bytes=4 * MIB, request_bytes=MIB, queue_depth=2, direct=False)
SMALL = ("--quick", "--bytes", "8MiB", "--processes", 1, "--mix", "3B", "--rounds", 1)
CONFINED = Path(__file__).with_name("confined.py")


def confined(how: str, *arguments: object) -> dict[str, object]:
    """JSON of a `flowstone` command that runs with less than this process has."""
    command = [sys.executable, str(CONFINED), how, sys.executable, "-m", "flowstone", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    record: dict[str, object] = json.loads(done.stdout)
    return record


def split(study: dict[str, object], code: str, message: str) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The cells that were measured, and those that were refused, all of them for this reason."""
    measured, refused = [], []
    for sample in study["samples"]:  # type: ignore[attr-defined]
        if sample["error"] is None:
            measured.append(sample["cell"])
        else:
            assert sample["error"].startswith(f"{code}: ")
            assert sample["error"].endswith(message)
            refused.append(sample["cell"])
    return measured, refused


def test_each_cell_is_measured_once_a_round_and_nothing_is_left(tmp_path: Path) -> None:
    cells = [BASE, replace(BASE, direction="restore"), replace(BASE, direction="restore", queue_depth=1)]
    samples = list(campaign.measure(tmp_path, cells, BASE, rounds=3))
    assert sorted((s.round, cells.index(s.cell)) for s in samples) == [(r, c) for r in (1, 2, 3) for c in (0, 1, 2)]
    assert all(s.error is None and s.gb_per_s and s.seconds and s.requests == 4 and s.files == 1 for s in samples)
    assert [s.cold for s in samples if s.cell.direction == "write"] == [None] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_a_round_is_not_the_plans(tmp_path: Path) -> None:
    cells = [replace(BASE, bytes=MIB, request_bytes=size * KIB) for size in (4, 8, 16, 32, 64, 128, 256, 512)]
    samples = list(campaign.measure(tmp_path, cells, BASE, rounds=2))
    first, second = ([cells.index(s.cell) for s in samples if s.round == number] for number in (1, 2))
    assert sorted(first) == sorted(second) == list(range(8))
    assert len({tuple(first), tuple(second), tuple(range(8))}) == 3


def test_what_time_does_not_reach_is_reported(tmp_path: Path) -> None:
    cells = [BASE, replace(BASE, direction="restore")]
    samples = list(campaign.measure(tmp_path, cells, BASE, rounds=3, limit_s=0))
    assert {(s.cell, s.round, s.error) for s in samples} == {(cell, 1, "not reached within 0 s") for cell in cells}
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_campaign_leaves_no_files(tmp_path: Path) -> None:
    samples = campaign.measure(tmp_path, [BASE], BASE, rounds=2)
    next(samples)
    assert list(tmp_path.iterdir()) != []
    with pytest.raises(KeyboardInterrupt):
        samples.throw(KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_more_than_disk_or_memory_hold_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = replace(BASE, bytes=1 << 60)
    with pytest.raises(FullError, match="twice that on disk"):
        next(campaign.measure(tmp_path, [BASE, huge], BASE, rounds=1))
    monkeypatch.setattr(campaign, "available_bytes", lambda: 7 * MIB)
    with pytest.raises(BudgetError, match="memory"):
        next(campaign.measure(tmp_path, [BASE], BASE, rounds=1))


def test_a_full_disk_fails_its_cells_only(small_disk: object, monkeypatch: pytest.MonkeyPatch) -> None:
    position = small_disk(6 * MIB)  # type: ignore[operator]
    monkeypatch.setattr(campaign, "_check_room", lambda *_: None)  # as if another process filled the disk meanwhile
    large = replace(BASE, bytes=12 * MIB)
    cells = [large, replace(large, direction="restore"), BASE]
    actual = {s.cell: s.error for s in campaign.measure(position, cells, BASE, rounds=1)}
    assert "ENOSPC" in str(actual[large])
    assert str(actual[cells[1]]).startswith("no files to restore: ENOSPC")
    assert actual[BASE] is None


def test_direct_refused_is_an_error_of_the_direct_cells(without_direct: Path) -> None:
    works = probe(without_direct)
    assert works.direct_alignment == 0
    base = base_cell(works, 4 * MIB)
    assert not base.direct
    cells = [replace(base, request_bytes=MIB, queue_depth=2, direct=direct) for direct in (True, False)]
    actual = {s.cell.direct: s.error for s in campaign.measure(without_direct, cells, base, rounds=1)}
    assert actual == {True: "EINVAL: Invalid argument", False: None}


def test_io_uring_refused_leaves_the_other_engines(tmp_path: Path) -> None:
    works = confined("uring", "bench", "--probe", tmp_path, "--json")
    assert str(works["io_uring_error"]).endswith("Operation not permitted")
    study = confined("uring", "bench", "io", tmp_path, "--json", *SMALL)
    good, refused = split(study, "EPERM", "Operation not permitted")
    assert {cell["engine"] for cell in refused} == {"io_uring"}
    assert {cell["engine"] for cell in good} == {"posix", "sync"}


def test_memory_that_cannot_be_locked_leaves_the_other_cells(tmp_path: Path) -> None:
    if not _native.has_io_uring():
        pytest.skip("io_uring is refused here")
    works = confined("memlock", "bench", "--probe", tmp_path, "--json")
    assert works["memlock_bytes"] == LIMIT_BYTES < REGISTERED_BYTES
    assert works["io_uring_error"] is None
    assert str(works["registered_error"]).endswith("Cannot allocate memory")
    study = confined("memlock", "bench", "io", tmp_path, "--json", *SMALL)
    good, refused = split(study, "ENOMEM", "Cannot allocate memory")
    assert {cell["memory"] for cell in refused} == {"registered"}
    assert {cell["memory"] for cell in good} == {"fresh", "reused"}


def test_cooled_files_are_cold_by_both_counts(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    path.write_bytes(b"x" * 1_000_000)
    with open(path, "rb") as file:
        counts = [count(file.fileno()) for count in (_cachestat, _mincore)]
        assert counts[1] == -(-1_000_000 // 4096)
        assert counts[0] in (None, counts[1])
        if not drop_cached([path]):
            pytest.skip("this file system does not let go of its pages")
        assert [count(file.fileno()) for count in (_cachestat, _mincore)] == [counts[0] and 0, 0]


def test_memory_file_systems_are_never_called_cold() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("there is no /dev/shm")
    cells = [replace(BASE, direction="restore")]
    (sample,) = campaign.measure(shm, cells, BASE, rounds=1)
    assert sample.cold is False


def test_plans_hold_each_axis_and_no_cell_twice() -> None:
    base = replace(BASE, bytes=128 * MIB)
    cells = plan(base, quick_scope(base.bytes, 4, MIXES)).cells
    assert len(set(cells)) == len(cells)
    for direction in ("write", "restore"):
        own = [cell for cell in cells if cell.direction == direction]
        for axis, count in (("layout", 5), ("engine", 3), ("memory", 3), ("mix", 4), ("processes", 2), ("direct", 2)):
            assert len({getattr(cell, axis) for cell in own}) == count, axis
        assert {cell.request_bytes for cell in own} >= {4 * KIB, 16 * MIB}
        assert max(cell.queue_depth for cell in own) == 64
    grid = plan(base, quick_scope(base.bytes, 1, MIXES)).grid
    assert all(cell.bytes >= cell.request_bytes * cell.queue_depth for cell in grid)
