"""A conversion that is killed at any point resumes when it is started again, with the same result."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from models import STEP, interrupted_export
from safetensors.torch import save_file

import flowstone as fs
from flowstone.convert import copy, draft
from flowstone.convert.journal import ConversionJournal
from flowstone.store.system import System

BUDGET = 32 << 20
_CHILD = """
import os, signal, sys
from flowstone.convert import copy
from flowstone.store.system import System
left = int(sys.argv[1])
def dying(call):
    def counted(*given, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)
    return counted
for name in ("create", "write", "sync", "sync_directory", "rename", "make_directory", "unlink"):
    setattr(System, name, dying(getattr(System, name)))
copy.FileWriter.write = dying(copy.FileWriter.write)
copy._WINDOWS_BETWEEN_SYNCS = 1
from flowstone.cli import main
sys.argv[1:2] = []
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store, and the same as a safetensors file: forty megabytes, in some windows of four."""
    root = tmp_path_factory.mktemp("model")
    tensors = {f"layer.{number}": torch.randn(1000, 1000 + number) for number in range(10)}
    with fs.Checkpointer(root / "run") as checkpointer:
        checkpointer.save(STEP, {"model": tensors})
    save_file(tensors, root / "model.safetensors")
    yield root
    shutil.rmtree(root)


def content(directory: Path, names: str = "*.safetensors") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob(names))}


def run_child(dies_after: int, *command: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(dies_after), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def killed_until_done(*command: str) -> int:
    """Run a command that dies after a random number of calls, again and again; how often it died."""
    noise = random.Random(1)
    for deaths in range(60):
        if run_child(noise.randrange(8, 34), *command) == 0:
            return deaths
    raise AssertionError("it never came to its end")


def test_an_export_that_is_killed_again_and_again_comes_to_the_same_end(model: Path, tmp_path: Path) -> None:
    fs.export(model / "run", tmp_path / "whole", shard_bytes=15e6)
    command = ("export", str(model / "run"), str(tmp_path / "hf"), "--shard-size", "15MB", "--budget", "32MiB")
    assert killed_until_done(*command) >= 2
    assert content(tmp_path / "hf", "*") == content(tmp_path / "whole", "*")
    assert not list(tmp_path.glob(".*"))


def test_an_import_that_is_killed_again_and_again_comes_to_the_same_end(model: Path, tmp_path: Path) -> None:
    fs.import_checkpoint(model / "model.safetensors", tmp_path / "whole")
    command = ("import", str(model / "model.safetensors"), str(tmp_path / "run"), "--budget", "32MiB")
    assert killed_until_done(*command) >= 2
    step = "step-00000000"
    assert content(tmp_path / "run" / step) == content(tmp_path / "whole" / step)
    assert fs.open(tmp_path / "run").verify().extra == ()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["flowstone.json", "flowstone.lock", step]


@pytest.mark.parametrize("call", range(1, 40, 2))
def test_killed_once_at_any_call_the_same_command_goes_on(model: Path, tmp_path: Path, call: int) -> None:
    calls = iter(range(1000))

    def stop(*_: object, **__: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    def counted(name: str, owner: type) -> mock._patch:
        real = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *given, **named: (stop(), real(*given, **named))[1])

    patches = [counted(name, System) for name in ("create", "sync", "rename", "sync_directory")]
    patches += [counted("write", copy.FileWriter), mock.patch.object(copy, "_WINDOWS_BETWEEN_SYNCS", 2)]
    for patch in patches:
        patch.start()
    try:
        fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET)
    except KeyboardInterrupt:
        assert not (tmp_path / "hf").exists() or not list(tmp_path.glob(".*draft"))
    finally:
        for patch in patches:
            patch.stop()
    if not _is_whole(tmp_path):
        fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET)
    assert content(tmp_path / "hf") == {"model.safetensors": _expected(model, tmp_path)}
    assert not list(tmp_path.glob(".*"))


def _is_whole(tmp_path: Path) -> bool:
    return (tmp_path / "hf").exists() and not list(tmp_path.glob(".*"))


def _expected(model: Path, tmp_path: Path) -> bytes:
    fs.export(model / "run", tmp_path / "expected")
    return (tmp_path / "expected" / "model.safetensors").read_bytes()


def interrupted(model: Path, target: Path, windows: int, **options: object) -> None:
    interrupted_export(model / "run", target, windows, budget_bytes=BUDGET, **options)


def test_what_was_durable_is_not_written_again(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "hf", 3)
    report = fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET)
    assert report.resumed_bytes == 3 * copy.window_bytes(BUDGET)
    assert content(tmp_path / "hf") == {"model.safetensors": _expected(model, tmp_path)}


def test_other_options_begin_anew(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "hf", 3)
    report = fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET, dtype="bf16")
    assert report.resumed_bytes == 0
    assert len(report.cast) == 10


def test_a_source_that_has_changed_begins_anew(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model / "run", tmp_path / "run")
    interrupted(tmp_path, tmp_path / "hf", 3)
    segment = next((tmp_path / "run").glob("step-*/rank-*"))
    os.utime(segment, ns=(1, 1))
    assert fs.export(tmp_path / "run", tmp_path / "hf", budget_bytes=BUDGET).resumed_bytes == 0


@pytest.mark.parametrize("harm", ["shorter", "gone", "torn journal", "no journal"])
def test_a_draft_that_is_not_as_the_journal_says_is_begun_anew(model: Path, tmp_path: Path, harm: str) -> None:
    interrupted(model, tmp_path / "hf", 3)
    (begun,), (journal,) = tmp_path.glob(".*draft"), tmp_path.glob(".*journal")
    if harm == "shorter":
        os.truncate(begun / "model.safetensors", 4096)
    elif harm == "gone":
        shutil.rmtree(begun)
    elif harm == "torn journal":
        journal.write_bytes(b"\0" + journal.read_bytes()[1:])
    else:
        journal.unlink()
    assert fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET).resumed_bytes == 0
    assert content(tmp_path / "hf") == {"model.safetensors": _expected(model, tmp_path)}


def test_a_torn_last_line_of_the_journal_costs_its_windows_alone(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "hf", 3)
    (journal,) = tmp_path.glob(".*journal")
    os.truncate(journal, journal.stat().st_size - 5)
    interrupted(model, tmp_path / "hf", 1)
    report = fs.export(model / "run", tmp_path / "hf", budget_bytes=BUDGET)
    assert report.resumed_bytes == 3 * copy.window_bytes(BUDGET)
    assert content(tmp_path / "hf") == {"model.safetensors": _expected(model, tmp_path)}


def test_two_conversions_to_one_place_are_refused(model: Path, tmp_path: Path) -> None:
    other = ConversionJournal(tmp_path / f".hf.{draft._JOURNAL}")
    other.open()
    with pytest.raises(fs.LockedError, match="another conversion to the same target is running"):
        fs.export(model / "run", tmp_path / "hf")
    other.close()
    fs.export(model / "run", tmp_path / "hf")


def test_a_save_sweeps_what_a_dead_import_has_left(model: Path, tmp_path: Path) -> None:
    for dies_after in range(6, 40, 2):  # how many calls come before the draft depends on what the disk is asked first
        store = tmp_path / f"run-{dies_after}"
        run_child(dies_after, "import", str(model / "model.safetensors"), str(store), "--budget", "32MiB")
        if list(store.glob(".*")):
            break
    else:
        raise AssertionError("it never left anything")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"step": 1})
    assert not list(store.glob(".*"))


def test_no_thread_outlives_a_conversion(model: Path, tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    fs.export(model / "run", tmp_path / "hf")
    assert {thread.name for thread in threading.enumerate()} <= before
