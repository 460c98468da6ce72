"""Other file systems, mounted for real: the same bytes, and the manifest says how they were written."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from large import ENGINE, blank, entries, loaded, state

import flowstone as fs
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.events.phases import RemovalFailed
from forge import content
from own_process import warnings_heard

Mount = Callable[..., Path]


def _check(disk: Path) -> None:
    """Save, retain, load, verify, by every engine, with what works there; and the command line agrees."""
    needed = _native.probe_direct(str(disk))
    for backend in ("posix", "io_uring") if _native.has_io_uring() else ("posix",):
        run = disk / backend
        engine = EngineOptions(backend=backend, request_bytes=2 * MIB)
        with fs.Checkpointer(run, engine=engine, keep=fs.Keep(last=1)) as checkpointer:
            for step in (1, 2):
                io = checkpointer.save(step, state(step)).committed.result().manifest.io
                assert io.backend == backend
                assert io.alignment == (4096 if 0 < needed <= 4096 else 1)
            assert loaded(checkpointer, 2.0)
        assert entries(run) == ["step-00000002"]
        into = blank()
        with fs.Checkpointer(run, engine=EngineOptions(backend=backend, direct="off")) as checkpointer:
            checkpointer.load(into, verify_first=True)
        assert content(into) == content(state(2))
    command = [sys.executable, "-m", "flowstone", "verify", str(disk / "posix")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_tmpfs(mount: Mount) -> None:
    _check(mount("-t", "tmpfs", "-o", "size=128m", "tmpfs"))


def test_overlay_on_a_disk(mount: Mount, tmp_path: Path) -> None:
    _check(mount("-t", "overlay", "-o", _layers(tmp_path), "overlay"))


def test_overlay_on_tmpfs(mount: Mount) -> None:
    below = mount("-t", "tmpfs", "-o", "size=128m", "tmpfs")
    _check(mount("-t", "overlay", "-o", _layers(below), "overlay"))


@pytest.mark.parametrize(
    "mkfs",
    [
        ("mkfs.ext4", "-q", "-m", "0"), ("mkfs.ext2", "-q", "-m", "0", "-b", "1024"),
        ("mkfs.ext4", "-q", "-m", "0", "-O", "inline_data"), ("mkfs.xfs", "-q"), ("mkfs.btrfs", "-q"),
        ("mkfs.vfat",),
    ],
    ids=["ext4", "ext2", "inline", "xfs", "btrfs", "vfat"],
)
def test_disk(loop: Mount, mkfs: tuple[str, ...]) -> None:
    _check(loop(320 if "xfs" in mkfs[0] else 128, *mkfs))


def _layers(under: Path) -> str:
    for name in ("lower", "upper", "work"):
        (under / name).mkdir(exist_ok=True)
    return f"lowerdir={under}/lower,upperdir={under}/upper,workdir={under}/work"


def test_a_store_on_the_lower_layer_is_read_and_saved_into_and_what_cannot_go_is_told(
    mount: Mount, tmp_path: Path
) -> None:
    """As in a container whose image came with a checkpoint: an overlay renames no directory from below."""
    layers = _layers(tmp_path)
    with fs.Checkpointer(tmp_path / "lower" / "run", engine=ENGINE) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).committed.result()
    run = mount("-t", "overlay", "-o", f"{layers},redirect_dir=off", "overlay") / "run"
    failed: list[RemovalFailed] = []
    keep = fs.Keep(last=1)
    watch = lambda event: failed.append(event) if isinstance(event, RemovalFailed) else None  # noqa: E731
    with warnings_heard() as heard, fs.Checkpointer(run, engine=ENGINE, keep=keep, on_event=watch) as checkpointer:
        assert loaded(checkpointer, 2.0)
        for step in (3, 4):
            checkpointer.save(step, state(step)).committed.result()
        assert loaded(checkpointer, 4.0)
    assert entries(run) == ["step-00000001", "step-00000002", "step-00000004"], "what the overlay was given can go"
    assert [event.name for event in failed] == ["step-00000001", "step-00000002"] * 2
    assert "an overlay cannot rename entries of its lower layer" in failed[0].reason
    assert len(heard) == 4
    with fs.Checkpointer(run, engine=ENGINE) as checkpointer:
        with pytest.raises(fs.StorageError, match="an overlay cannot rename") as caught:
            checkpointer.rewind(1)
        assert caught.value.errno == errno.EXDEV
        assert loaded(checkpointer, 2.0)


def test_a_store_mounted_read_only_loads_and_says_that_it_cannot_be_saved_into(mount: Mount, tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "below" / "run", engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
    run = mount("--bind", "-o", "ro", str(tmp_path / "below")) / "run"
    assert fs.open(run).verify().sound
    with fs.Checkpointer(run, engine=ENGINE) as checkpointer:
        assert loaded(checkpointer, 1.0)
        with pytest.raises(fs.StorageError) as caught:
            checkpointer.save(2, state(2))
        assert caught.value.errno == errno.EROFS
        assert "mount the file system for writing" in str(caught.value.facts["next"])
    assert entries(run) == ["step-00000001"]
