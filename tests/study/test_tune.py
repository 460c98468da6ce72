"""The tuner: its conclusions from times; and it measures, stores and cleans up for real."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner, Result

import flowstone as fs
from flowstone import _native
from flowstone.cli import app
from flowstone.config import BLOCK_BYTES, MIB, Direction, EngineOptions, Tuning
from flowstone.store.local import LocalStore
from flowstone.store.settings import find_settings
from flowstone.store.tuning import TuningFile, decode_tuning
from flowstone_study import tune as study
from flowstone_study.trials import Tensors, Trials, concrete
from flowstone_study.tune import FULL, QUICK, Effort, Found, find_best, tune
from tunings import READ_DEFAULTS, WRITE_DEFAULTS, put_beside_marker

FEW = 3 * MIB
SMALL = Effort(
    budget_s=10, bytes_max=8 * MIB, request_bytes=(2 * MIB,), queue_depths=(4,), workers=(1,), sizes=(MIB,), repeats=1,
    pairs=5,
)
SIZES = (MIB, 16 * MIB, 512 * MIB)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "QUICK", SMALL)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "tune", *map(str, arguments)])


def files_of(config: Path) -> list[Path]:
    return sorted(config.rglob("*.json"))


def left_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if "tuning-" in entry.name)


# What is concluded, from made-up times


def conclude(
    direction: Direction, time_at: Callable[[int, Tuning], float], *, effort: Effort = QUICK, direct: bool = True,
    ends_s: float = 60.0,
) -> Found:
    return find_best(
        direction, time_at, SIZES, effort, direct=direct, ends=time.monotonic() + ends_s, begin=lambda kind: None
    )


def rest(tuning: Tuning) -> float:
    """A cost that is least for 2 MiB, 64 in flight, one worker, POSIX threads, all through the arena."""
    return (
        1 + abs(tuning.request_bytes - 2 * MIB) / (8 * MIB) + (64 - tuning.queue_depth) / 100
        + tuning.workers / 10 + (tuning.backend != "posix") / 4 + tuning.in_place / 9
    )


def test_what_is_fastest_is_found_and_kept() -> None:
    actual = conclude("write", lambda size, tuning: rest(tuning))
    expected = Tuning("posix", queue_depth=64, request_bytes=2 * MIB, workers=1, in_place=False)
    assert (actual.best, actual.complete) == (expected, True)
    assert actual.kept == (expected if _native.has_io_uring() else replace(expected, backend="auto"))
    assert actual.gain is not None
    assert actual.gain.ratio == pytest.approx(rest(concrete(WRITE_DEFAULTS)) / rest(expected))
    assert actual.verdict == "the fastest"


def test_in_place_is_tried_for_reads_alone() -> None:
    actual = conclude("read", lambda size, tuning: 1 - tuning.in_place / 2)
    assert actual.kept == replace(READ_DEFAULTS, in_place=True)
    actual = conclude("write", lambda size, tuning: 1 - tuning.in_place / 2)
    assert actual.kept is None


def test_engine_that_would_be_taken_anyway_is_left_open() -> None:
    actual = conclude("write", lambda size, tuning: 1 + tuning.queue_depth / 10 + (tuning.request_bytes != 8 * MIB))
    assert actual.kept == replace(WRITE_DEFAULTS, queue_depth=4)
    assert actual.kept.backend == "auto"


def test_defaults_stay_where_nothing_is_faster() -> None:
    actual = conclude("write", lambda size, tuning: 1.0)
    assert (actual.kept, actual.complete) == (None, True)
    assert actual.verdict.startswith("the defaults")


def test_defaults_stay_where_the_gain_is_within_the_noise() -> None:
    noise = random.Random(5)
    kept = [conclude("write", lambda size, tuning: noise.uniform(1, 1.5)).kept for _ in range(60)]
    assert kept.count(None) > 45
    actual = conclude("write", lambda size, tuning: noise.uniform(1, 1.001) - (tuning.queue_depth == 4) / 100)
    assert (actual.kept, actual.verdict) == (None, "the defaults: the gain is within the noise"), "1 % is not worth it"


def test_small_totals_are_buffered_where_that_is_faster() -> None:
    """All other settings alike: only from where on to go direct is kept."""

    def time_at(size: int, tuning: Tuning) -> float:
        buffered = tuning.direct_from_bytes is None or size < tuning.direct_from_bytes
        return 0.5 if buffered and size < 16 * MIB else 2.0 if buffered else 1.0

    actual = conclude("write", time_at)
    assert actual.kept == replace(WRITE_DEFAULTS, direct_from_bytes=16 * MIB)
    assert actual.verdict == "the defaults, buffered where that is faster"
    assert [size.bytes for size in actual.sizes if size.gain.certain] == [MIB]


def test_all_is_buffered_where_direct_always_loses() -> None:
    actual = conclude("read", lambda size, tuning: 1.0 if tuning.direct_from_bytes is None else 1.4)
    assert actual.kept == replace(READ_DEFAULTS, direct_from_bytes=None)


def test_direct_is_not_tried_where_it_is_refused() -> None:
    seen = set()

    def time_at(size: int, tuning: Tuning) -> float:
        seen.add(tuning.direct_from_bytes)
        return 1.0

    actual = conclude("write", time_at, direct=False)
    assert seen == {0}
    assert (actual.sizes, actual.complete) == ((), True)


def test_out_of_time_keeps_the_defaults_and_says_so() -> None:
    def time_at(size: int, tuning: Tuning) -> float:
        raise AssertionError("there is no time to measure")

    actual = conclude("write", time_at, ends_s=-1)
    assert (actual.kept, actual.complete) == (None, False)
    assert "time ran out" in actual.verdict


@pytest.mark.parametrize("effort", [QUICK, FULL], ids=["quick", "full"])
def test_every_candidate_is_one_that_a_store_takes(effort: Effort) -> None:
    met: set[Tuning] = set()

    def time_at(size: int, tuning: Tuning) -> float:
        met.add(tuning)
        return random.Random(str(tuning)).random()

    for direction in ("write", "read"):
        conclude(direction, time_at, effort=effort)  # type: ignore[arg-type]
    assert len(met) > 20
    assert all(tuning.request_bytes % BLOCK_BYTES == 0 for tuning in met)


# Trials


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    trials = Trials(tmp_path)
    yield trials
    trials.close()


@pytest.mark.parametrize("total", [1, 4096, 100_001, 3 * MIB, 300 * MIB])
def test_tensors_hold_as_much_as_was_asked_for(total: int) -> None:
    tensors = Tensors(total)
    assert tensors.bytes == total
    assert tensors.file_bytes >= total
    ends = tensors.offset + tensors.plan.length
    order = tensors.offset.argsort()
    assert (tensors.offset[order][1:] >= ends[order][:-1]).all(), "their places overlap"


def test_trials_move_real_bytes_and_leave_nothing(trials: Trials, tmp_path: Path) -> None:
    tensors = Tensors(FEW)
    assert trials.save(tensors, WRITE_DEFAULTS) > 0
    assert list(tmp_path.iterdir()) == []
    stored = trials.store(tensors, WRITE_DEFAULTS)
    data = (tmp_path / stored.file).read_bytes()
    assert len(data) == tensors.file_bytes
    first = int(tensors.offset[0])
    assert _native.xxh3_64(data[first : first + MIB]) == stored.digests[0]
    assert trials.restore(stored, READ_DEFAULTS) > 0
    assert trials.restore(stored, replace(READ_DEFAULTS, direct_from_bytes=None, backend="posix", in_place=True)) > 0
    trials.remove(stored)
    assert list(tmp_path.iterdir()) == []


def test_restores_are_proved_cold(trials: Trials, tmp_path: Path) -> None:
    stored = trials.store(Tensors(FEW), replace(WRITE_DEFAULTS, direct_from_bytes=None))  # leaves it in the page cache
    trials.restore(stored, READ_DEFAULTS)
    assert trials.cold


def test_bytes_that_come_back_changed_are_an_error(trials: Trials, tmp_path: Path) -> None:
    stored = trials.store(Tensors(FEW), WRITE_DEFAULTS)
    path = tmp_path / stored.file
    data = bytearray(path.read_bytes())
    data[int(stored.tensors.offset[0]) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(fs.DamagedError, match="returns bytes that differ"):
        trials.restore(stored, READ_DEFAULTS)


# The verb, for real


@pytest.mark.usefixtures("few_trials")
def test_a_store_keeps_its_tuning_beside_the_marker(store: Path, config: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(9)})
    done = run(store, "--bytes", FEW, "--quick")
    assert done.exit_code == 0, done.output
    assert f"kept in {store}/tuning.json" in done.stdout.replace("\n", "")
    assert "write" in done.stdout
    assert "defaults" in done.stdout
    assert (left_in(store), files_of(config)) == ([], [])
    file = decode_tuning((store / "tuning.json").read_bytes(), path="tuning.json")
    assert isinstance(file, TuningFile)
    assert file.trial_bytes == FEW
    settings = find_settings(store, EngineOptions())
    assert (settings["write"].origin == "tuned") == (file.write is not None)
    with fs.Checkpointer(store) as checkpointer:
        assert checkpointer.save(2, {"x": torch.ones(9)}).committed.result().step == 2, "the lock is free again"


@pytest.mark.usefixtures("few_trials")
def test_what_is_slow_with_the_defaults_is_tuned_and_then_used(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is slow with more than four requests in flight, as far as the clock can tell."""
    real = Trials.save

    def save(self: Trials, tensors: Tensors, tuning: Tuning) -> float:
        real(self, tensors, tuning)
        return 1.0 + tuning.queue_depth / 10 + tuning.workers / 100

    monkeypatch.setattr(Trials, "save", save)
    store.mkdir()
    report = tune(store, where="store", total_bytes=FEW, quick=True)
    assert report.write.kept is not None
    assert report.stored == f"{store}/tuning.json"
    with fs.Checkpointer(store) as checkpointer:
        io = checkpointer.save(1, {"x": torch.ones(9)}).committed.result().manifest.io
    assert (io.queue_depth, io.workers, io.origin) == (4, 1, "tuned")
    shown = CliRunner().invoke(app, ["show", str(store)]).stdout
    assert "4 requests" in shown
    assert "tuned settings" in shown


@pytest.mark.usefixtures("few_trials")
def test_any_directory_is_tuned_for_its_mount(tmp_path: Path, config: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mum.txt").write_text("dear")
    record = json.loads(run(tmp_path / "letters", "--bytes", FEW, "--quick", "--json").stdout)
    (kept,) = files_of(config)
    assert record["stored"] == str(kept)
    assert (record["bytes"], record["write"]["direction"], record["read"]["direction"]) == (FEW, "write", "read")
    assert record["read"]["gain"] is None or record["read"]["gain"]["pairs"] >= 5
    assert os.listdir(tmp_path / "letters") == ["mum.txt"]
    again = json.loads(run(tmp_path, "--bytes", FEW, "--quick", "--json", "--user").stdout)
    assert again["stored"] == str(kept), "the same mount, the same file"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.usefixtures("few_trials")
def test_a_dry_run_keeps_nothing(store: Path, config: Path) -> None:
    store.mkdir()
    done = run(store, "--store", "--dry-run", "--bytes", FEW, "--quick")
    assert done.exit_code == 0, done.output
    assert "a dry run" in done.stdout
    assert (list(store.iterdir()), files_of(config)) == ([], [])


@pytest.mark.usefixtures("few_trials")
def test_an_empty_directory_becomes_a_store_when_asked(store: Path, config: Path) -> None:
    store.mkdir()
    assert run(store, "--store", "--bytes", FEW, "--quick").exit_code == 0
    assert {path.name for path in store.iterdir()} == {"flowstone.json", "flowstone.lock", "tuning.json"}
    listed = json.loads(CliRunner().invoke(app, ["ls", str(store), "--json"]).stdout)
    assert (listed["checkpoints"], listed["leftovers"]) == ([], [])
    with fs.Checkpointer(store) as checkpointer:
        assert checkpointer.latest() is None


@pytest.mark.usefixtures("few_trials")
def test_tmpfs_is_tuned_too(small_disk: Callable[[int], Path], config: Path) -> None:
    disk = small_disk(64 * MIB)
    record = json.loads(run(disk, "--bytes", FEW, "--quick", "--json").stdout)
    assert record["place"].startswith("tmpfs on tmpfs")
    assert record["cold"] is False, "what is memory cannot be cold"
    assert "their reads may have been cached" in run(disk, "--bytes", FEW, "--quick").stdout
    assert list(disk.iterdir()) == []


@pytest.mark.usefixtures("few_trials")
def test_bytes_are_chosen_where_none_are_given(tmp_path: Path) -> None:
    report = tune(tmp_path, quick=True, dry_run=True)
    assert report.bytes >= SMALL.bytes_max
    assert report.bytes % MIB == 0


# What cannot be


@pytest.mark.parametrize("as_json", [True, False])
def test_wrong_places_are_told(tmp_path: Path, checkpoint: Path, as_json: bool) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mum.txt").write_text("dear")
    wrong = {tmp_path / "nowhere": "no directory", checkpoint: "one checkpoint, not a store",
             tmp_path / "letters": "neither a store nor"}
    for path, words in wrong.items():
        done = run(path, "--store", "--bytes", FEW, *["--json"] * as_json)
        assert done.exit_code == 2
        assert words in (done.stdout if as_json else done.stderr)
        assert "Traceback" not in done.output
    assert run(tmp_path, "--store", "--user").exit_code == 2


def test_sizes_that_do_not_fit_are_told(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    assert "FullError" in run(small_disk(8 * MIB), "--bytes", 4 * MIB).stderr
    assert "FullError" in run(tmp_path, "--bytes", 1 << 60).stderr
    with pytest.raises(ValueError, match="5 bytes are too few"):
        tune(tmp_path, total_bytes=5)


def test_nothing_is_measured_beside_a_job_that_saves(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(9)})
        done = run(store, "--bytes", FEW)
        assert done.exit_code == 2
        assert done.stderr.startswith("LockedError: cannot measure in")
        assert f"process {os.getpid()}" in done.stderr
    assert left_in(store) == []


@pytest.mark.usefixtures("few_trials")
def test_two_do_not_measure_in_one_place_and_the_dead_are_swept(tmp_path: Path) -> None:
    dead, living = tmp_path / ".flowstone-tuning-dead", tmp_path / ".flowstone-tuning-living"
    for scratch in (dead, living):
        scratch.mkdir()
        (scratch / "trial-3").write_bytes(b"left")
    other = LocalStore(living)
    other.lock("somebody")
    assert "LockedError" in run(tmp_path, "--bytes", FEW, "--quick").stderr
    other.close()
    assert run(tmp_path, "--bytes", FEW, "--quick").exit_code == 0
    assert left_in(tmp_path) == []


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, script: Callable[..., subprocess.Popen[str]]) -> None:
    text = "import sys\nfrom flowstone.cli import main\nsys.argv[1:] = ['bench', 'tune', sys.argv[1]]\nmain()\n"
    (tmp_path / "here").mkdir()
    process = script(text, tmp_path / "here")
    while not left_in(tmp_path / "here") and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert list((tmp_path / "here").iterdir()) == []


def test_tuning_needs_no_torch_and_is_silent_when_piped(
    tmp_path: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    text = (
        "import sys\nfrom flowstone_study import tune\n"
        "from dataclasses import replace\ntune.QUICK = replace(tune.QUICK, queue_depths=(4,), workers=(1,), pairs=5)\n"
        "tune.tune(sys.argv[1], quick=True, dry_run=True, total_bytes=2 << 20)\nprint('torch' in sys.modules)\n"
    )
    out, err = script(text, tmp_path).communicate(timeout=120)
    assert (out, err) == ("False\n", "")


def test_a_stale_tuning_is_replaced(store: Path, few_trials: None) -> None:
    path = put_beside_marker(store, write=replace(WRITE_DEFAULTS, queue_depth=3))
    (store / "flowstone.json").unlink(missing_ok=True)
    before = path.read_bytes()
    report = tune(store, where="store", total_bytes=FEW, quick=True)
    assert report.stored == str(path)
    assert path.read_bytes() != before
    assert [entry.name for entry in store.iterdir() if entry.name.startswith(".tuning")] == []
