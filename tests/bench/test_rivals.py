"""Every row of the programme saves and loads a tiny state exactly, where its package is installed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import made_up
import msgspec
import pytest

import flowstone as fs
import tunings
from bench import environments
from bench.codec_rivals import KINDS
from bench.launch import work
from bench.records import Measured, Outcome
from bench.rivals import ALONE, CACHED, ENTRIES, FLOWSTONE, REPLICAS, RIVALS, SHARED, SHORT, Entry, replica_load
from bench.rivals import entry as entry_of
from bench.state import build, choose_layout, flatten, is_exact
from bench.worker import perform
from flowstone import _native
from flowstone.config import SHARED_READ_BYTES_MIN
from warm_start import warm_start

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "runs" / "bench" / "environments"
HERE = [entry for entry in ENTRIES if entry.environment is None and entry.io_uring and entry.ranks == 1]
ELSEWHERE = [entry for entry in ENTRIES if entry.environment is not None]
REFUSED = next(entry for entry in FLOWSTONE if not entry.io_uring)
JOB = dataclasses.replace(next(entry for entry in FLOWSTONE if entry.ranks > 1), ranks=2)  # test_bench.py has four


def check(saved: Outcome | None, loaded: list[Outcome | None]) -> None:
    assert saved is not None
    assert [sample.number for sample in saved.saves] == [1, 2]
    for sample in saved.saves:
        assert 0 < sample.blocked_s <= sample.durable_s
        assert sample.files > 0
        assert sample.file_bytes > 0.8 * saved.payload_bytes  # one rival compresses
    for outcome in loaded:
        assert outcome is not None
        assert [(sample.number, sample.exact) for sample in outcome.loads] == [(1, True), (2, True)]
        assert all(sample.cold is not False for sample in outcome.loads)


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_saves_and_loads_exactly(entry: Entry, tmp_path: Path) -> None:
    saved = perform(made_up.task(entry, "save", "", tmp_path))
    check(saved, [perform(made_up.task(entry, "load", how, tmp_path)) for how in entry.loads])


@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: entry.name)
def test_saves_and_loads_exactly_in_its_own_environment(entry: Entry, tmp_path: Path) -> None:
    assert entry.environment is not None
    if not environments.is_made(ENVIRONMENTS / entry.environment, entry.environment):
        pytest.skip(f"environment {entry.environment} is not made; `make bench-full` makes it")
    python = environments.Environment(ENVIRONMENTS).python(entry.environment)
    done = [
        work([made_up.task(entry, verb, how, tmp_path)], 1, python=python, io_uring=True)
        for verb, how in (("save", ""), *(("load", how) for how in entry.loads))
    ]
    assert [measured.error for measured in done] == [None] * len(done)
    saved, *loaded = (measured.outcome for measured in done)
    check(saved, loaded)


def job(verb: str, how: str, directory: Path, entry: Entry = JOB, state_bytes: int = 1_500_000) -> Measured:
    tasks = [made_up.task(entry, verb, how, directory, state_bytes, rank) for rank in range(entry.ranks)]
    with warm_start("bench.worker"):
        return work(tasks, 1, python=Path(sys.executable), io_uring=True)


def test_a_job_of_ranks_saves_one_checkpoint_and_loads_it_exactly(tmp_path: Path) -> None:
    saved = job("save", "", tmp_path)
    assert saved.error is None
    loaded = [job("load", how, tmp_path) for how in JOB.loads]
    check(saved.outcome, [measured.outcome for measured in loaded])
    (store,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.name for path in sorted(store.glob("step-*"))] == ["step-00000001", "step-00000002"]
    manifest = fs.open(store).manifest
    assert (manifest.ranks, len(manifest.segments)) == (JOB.ranks, JOB.ranks)
    assert saved.outcome is not None
    assert manifest.data_bytes == saved.outcome.payload_bytes == choose_layout(JOB.shape, 1_500_000).state_bytes
    assert len({part.payload_bytes for part in saved.outcome.parts}) == 1
    assert saved.outcome.saves[0].files == len(list((store / "step-00000001").iterdir()))


def test_replicas_that_share_their_reads_read_every_byte_once(tmp_path: Path) -> None:
    entry, state_bytes = entry_of(REPLICAS), SHARED_READ_BYTES_MIN * 5 // 4
    saved = job("save", "", tmp_path, entry, state_bytes).outcome
    assert saved is not None
    assert saved.payload_bytes == choose_layout(entry.shape, state_bytes).state_bytes > SHARED_READ_BYTES_MIN
    assert saved.saves[0].file_bytes < 1.1 * saved.payload_bytes
    times = {replica_load("cold", SHARED): 1, replica_load("cold", ALONE): 4, replica_load(CACHED, SHARED): 1}
    for how, read in times.items():
        loaded = job("load", how, tmp_path, entry, state_bytes)
        assert loaded.outcome is not None, loaded.error
        assert [sample.exact for sample in loaded.outcome.loads] == [True, True]
        assert all(sample.cold is not how.startswith(CACHED) for sample in loaded.outcome.loads)
        if takes_direct(tmp_path):
            shares = [(sample.device_bytes or 0) / saved.payload_bytes for sample in loaded.outcome.loads]
            assert shares == pytest.approx([read] * 2, rel=0.1)


def takes_direct(directory: Path) -> bool:
    """Whether files can be read past the page cache, and so from a device."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_rank_that_gets_the_rows_of_another_is_not_exact() -> None:
    layout = choose_layout("llama", 3_000_000)
    parts = [build(layout, None, rank, JOB.ranks) for rank in range(JOB.ranks)]
    for rank, part in enumerate(parts):
        assert [is_exact(part, other) for other in range(JOB.ranks)] == [other == rank for other in range(JOB.ranks)]
    held = sum(tensor.nbytes for part in parts for tensor in flatten(part).values())
    assert held == layout.state_bytes


def test_refused_io_uring_is_refused_and_flowstone_falls_back(tmp_path: Path) -> None:
    python = Path(sys.executable)
    done = work([made_up.task(REFUSED, "save", "", tmp_path)], 1, python=python, io_uring=False)
    assert done.error is None
    assert done.outcome is not None
    assert done.outcome.note.startswith("posix")


def test_the_filter_refuses_io_uring_and_nothing_else() -> None:
    try_it = (
        "import ctypes, errno; libc = ctypes.CDLL(None, use_errno=True); "
        "room = ctypes.create_string_buffer(256); result = libc.syscall(425, 4, room); "
        "print(result, errno.errorcode.get(ctypes.get_errno())); print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-m", "bench.seccomp", sys.executable, "-c", try_it]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *status = done.stdout.splitlines()
    assert first == "-1 EPERM"
    assert "Seccomp:\t2" in status


def test_what_was_tuned_on_this_machine_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tunings.put_for_mount(tmp_path, write=msgspec.structs.replace(tunings.WRITE_DEFAULTS, backend="posix"))
    here, there = (made_up.task(FLOWSTONE[0], "save", "", tmp_path / name) for name in ("here", "there"))
    for task in (here, there):
        Path(task.directory).mkdir()
    if not _native.has_io_uring():
        pytest.skip("io_uring is refused here: tuned and default are the same")
    assert perform(here).note.startswith("posix"), "the tuning was not found"
    with warm_start("bench.worker"):
        done = work([there], 1, python=Path(sys.executable), io_uring=True)
    assert done.outcome is not None, done.error
    assert done.outcome.note.startswith("io_uring")


def test_a_worker_that_fails_is_a_row_with_its_last_words(tmp_path: Path) -> None:
    task = made_up.task(RIVALS[0], "load", "torch.load", tmp_path)  # of nothing
    with warm_start("bench.worker"):
        done = work([task], 3, python=Path(sys.executable), io_uring=True)
    assert (done.rival, done.round, done.outcome) == ("torch", 3, None)
    assert done.error is not None
    assert done.error.startswith("load: FileNotFoundError")


def test_pins_are_exact_and_complete() -> None:
    names = {entry.environment for entry in ENTRIES if entry.environment is not None} | {*KINDS.values()}
    assert {path.stem for path in environments.PINS.glob("*.txt")} == names
    for name in names:
        lines = (environments.PINS / f"{name}.txt").read_text().splitlines()
        pinned = [line for line in lines if not line.startswith("#")]
        assert all(line.count("==") == 1 for line in pinned)
        assert environments.pinned(name) == pinned[0].replace("==", " ")


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.txt").write_text("no such requirement\n")
    monkeypatch.setattr(environments, "PINS", tmp_path)
    with pytest.raises(environments.CannotInstallError, match="Invalid requirement"):
        environments.Environment(tmp_path / "made").python("wrong")
    assert not environments.is_made(tmp_path / "made" / "wrong", "wrong")


def test_an_environment_sees_the_packages_below_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none.txt").write_text("")
    monkeypatch.setattr(environments, "PINS", tmp_path)
    made = environments.Environment(tmp_path / "made")
    python = made.python("none")
    command = [str(python), "-c", "import msgspec, sys; print(sys.prefix)"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == str(tmp_path / "made" / "none")
    stamp = python.parent.stat().st_ctime_ns
    assert made.python("none").parent.stat().st_ctime_ns == stamp
    (tmp_path / "none.txt").write_text("# other pins\n")
    assert made.python("none").parent.stat().st_ctime_ns != stamp


def test_the_programme_is_consistent() -> None:
    assert len({entry.name for entry in ENTRIES}) == len({entry.title for entry in ENTRIES}) == len(ENTRIES)
    assert set(SHORT) <= {entry.name for entry in ENTRIES if entry.environment is None}


def test_nothing_outlives_a_conductor_that_is_told_to_stop(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "bench" / "run.py"), "--bytes", "2e6", "--only", "torch", "--settle-s", "60",
        "--directory", str(tmp_path),
    ]
    environment = os.environ | {"PATH": "", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as conductor:
        while not (workers := _workers_in(tmp_path)):
            assert conductor.poll() is None
            time.sleep(0.05)
        conductor.terminate()
    assert conductor.returncode == 128 + 15
    deadline = time.monotonic() + 120  # they have been killed; the process that adopts them reaps them some time later
    while left := [pid for pid in workers if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def _workers_in(directory: Path) -> list[int]:
    """Processes that rest before a timer: they have opened what their task names."""
    workers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
            task = next((Path(word) for word in words if word.endswith("task.json")), None)
            if task is not None and str(directory) in task.read_text():
                workers.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return workers
