"""Files that change while they are read: reported as damage with their range, never a signal, never wrong bytes."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from large import blank, loaded, state

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalReadHandle
from forge import content
from own_process import run_in_own_process
from small_state import STEP
from small_state import state as specimen_state

FILES = ["manifest.json", "index.safetensors", "objects.json", "rank-00000.safetensors"]


def options(backend: str, direct: str) -> EngineOptions:
    if backend == "io_uring" and not _native.has_io_uring():
        pytest.skip("this kernel or container refuses io_uring")
    return EngineOptions(backend=backend, direct=direct, request_bytes=2 * MIB)


class _Eventful(LocalStore):
    """Something happens between the look at a checkpoint and the reading of its segments."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def read_extents(self, *arguments: object, **more: object) -> LocalReadHandle:
        self.happens()
        return super().read_extents(*arguments, **more)


@pytest.mark.parametrize(("backend", "direct"), [("posix", "off"), ("posix", "auto"), ("io_uring", "auto")])
@pytest.mark.parametrize("kept", [8192, 5 * MIB, 5 * MIB + 100])
def test_a_segment_truncated_before_it_is_read_is_damage_with_its_range(
    tmp_path: Path, backend: str, direct: str, kept: int
) -> None:
    store = _Eventful(tmp_path / "run", options(backend, direct))
    segment = tmp_path / "run" / "step-00000002" / "rank-00000.safetensors"
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).committed.result()
        size = segment.stat().st_size
        store.happens = lambda: os.truncate(segment, kept)
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(blank())
        error = caught.value
        assert str(segment) in str(error)
        begin, end = map(int, str(error.facts["range"]).removeprefix("bytes ").split(".."))
        assert kept // 4096 * 4096 <= begin <= kept + 4 * MIB
        assert begin < end <= size
        assert "load" in str(error.facts["next"])
        # What has changed is named, and saving is refused only then.
        store.happens = lambda: None
        if error.written:
            with pytest.raises(fs.DamagedError, match="cannot save the state"):
                checkpointer.save(3, state(3))
        into = blank()
        assert checkpointer.load(into, fallback=True).step == 1
        assert content(into) == content(state(1))
        checkpointer.save(3, state(3)).committed.result()


@pytest.mark.parametrize("spared", [1, 3, 6])
@pytest.mark.parametrize("backend", ["posix", "io_uring"])
def test_a_segment_that_shrinks_while_it_is_read_is_damage_that_names_what_was_written(
    disk: FaultyDisk, backend: str, spared: int
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options(backend, "auto")) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(Trouble("read", size=12288, name="rank-", direct=True, spared=spared, times=1))
        into = blank()
        before = content(into)
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(into)
        after = content(into)
        changed = {name for name in before if after[name] != before[name]}
        assert changed <= {_path(name) for name in caught.value.written}, "changed, and not said so"
        assert "rank-00000.safetensors" in str(caught.value)
        # Met as the end of the file, or as a block that the shrinking took on the way: either way with its place.
        assert "bytes " in str(caught.value)
        if caught.value.written:
            with pytest.raises(fs.DamagedError, match="cannot save the state"):
                checkpointer.save(2, into)
        else:
            checkpointer.save(2, state(2)).committed.result()
    findings = fs.open(run, step=1).inspect().findings
    assert [finding.file for finding in findings] == ["rank-00000.safetensors"]


def _path(name: str) -> str:
    """A tensor's name as `content` writes it."""
    section, _, rest = name.partition(".")
    return f"state[{section!r}]" + "".join(f"[{part}]" for part in rest.split(".") if part)


@pytest.mark.parametrize("size", [0, 1, 40, 100])
@pytest.mark.parametrize("name", FILES[:3])
def test_a_small_file_that_shrinks_after_it_was_looked_at_is_damage(disk: FaultyDisk, name: str, size: int) -> None:
    with fs.Checkpointer(disk.path / "run") as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        assert (disk.path / "run" / "step-00000001" / name).stat().st_size > size
        into = blank(1)
        before = content(into)
        disk.befall(Trouble("read", size=size, name=name, times=1))
        with pytest.raises(fs.DamagedError, match=name) as caught:
            checkpointer.load(into)
        assert "next" in caught.value.facts
        assert content(into) == before
        checkpointer.save(2, state(2, 1)).committed.result()


def test_objects_that_shrink_by_whole_chunks_are_damage_too(disk: FaultyDisk) -> None:
    with fs.Checkpointer(disk.path / "run") as checkpointer:
        checkpointer.save(1, {"text": [chr(65 + n % 50) * 60_000 for n in range(60)]}).committed.result()
        disk.befall(Trouble("read", size=MIB, name="objects", times=1))
        with pytest.raises(fs.DamagedError, match=r"objects\.json is too short") as caught:
            checkpointer.load({"text": []})
        assert caught.value.facts["found"] == f"{MIB} bytes"


def test_a_header_that_shrinks_while_a_checkpoint_is_verified_is_a_finding(disk: FaultyDisk) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
    for spared in range(3):
        copy = shutil.copytree(run, disk.path / f"copy{spared}")
        disk.befall(Trouble("read", size=100, name="rank-", spared=spared, times=1))
        verified = fs.open(copy).inspect()
        assert not verified.sound
        assert all("rank-00000.safetensors" in finding.file + finding.what for finding in verified.findings)


# A file that is gone, or another one


def test_a_segment_removed_before_it_is_read_leaves_the_state_fit_to_be_saved(tmp_path: Path) -> None:
    store = _Eventful(tmp_path / "run")
    segment = tmp_path / "run" / "step-00000001" / "rank-00000.safetensors"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        store.happens = segment.unlink
        into = state(5, 1)
        with pytest.raises(fs.StorageError, match=r"cannot open .*rank-00000\.safetensors"):
            checkpointer.load(into)
        assert content(into) == content(state(5, 1))
        checkpointer.save(2, into).committed.result()
        store.happens = lambda: None
        assert loaded(checkpointer, 5.0, 1)


def test_a_segment_replaced_while_it_is_read_is_the_old_one_or_damage(tmp_path: Path) -> None:
    store = _Eventful(tmp_path / "run")
    segment = tmp_path / "run" / "step-00000001" / "rank-00000.safetensors"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        other = tmp_path / "other"
        other.write_bytes(bytes(segment.stat().st_size))
        store.happens = lambda: os.replace(other, segment)
        with pytest.raises(fs.DamagedError, match="stored bytes do not match their digests"):
            checkpointer.load(blank(1))


def _read_all(path: Path) -> list[str]:
    messages = []
    for act in (
        lambda: fs.Checkpointer(path).load(specimen_state(0.0)),
        lambda: fs.open(path).verify(),
        lambda: fs.open(path / f"step-{STEP:08d}").read("big"),
    ):
        try:
            act()
            messages.append("")
        except fs.FlowstoneError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_what_is_no_plain_file_is_refused_and_waited_for_by_nobody(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    path = checkpoint / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            monkeypatch.chdir(checkpoint)  # a socket's path is short
            listening.bind(name)
            monkeypatch.undo()
    else:
        try:
            os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero, which never ends
        except PermissionError:
            pytest.skip("device files need root")
    loading, verifying, reading = run_in_own_process(_read_all, checkpoint.parent)
    assert str(path) in loading or name in loading
    assert name in verifying
    assert name == "objects.json" or name in reading


# No signal: nothing is mapped that can shrink


def _shrinks_under(path: Path, backend: str) -> str:
    store = _Eventful(path, options(backend, "auto"))
    checkpoint = fs.open(path)
    assert checkpoint.tensors, "the index is in memory from here on"
    for file in (path / "step-00000001").iterdir():
        store.happens = lambda: None
        os.truncate(file, 0)
    assert len(checkpoint.tensors["ramp"].shape) == 1
    assert checkpoint.manifest.step == 1
    try:
        checkpoint.read("ramp")
    except fs.DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["posix", "io_uring"])
def test_a_checkpoint_truncated_under_an_open_one_is_an_error_and_no_signal(tmp_path: Path, backend: str) -> None:
    options(backend, "auto")
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state(1, 1))
    assert "rank-00000.safetensors" in run_in_own_process(_shrinks_under, tmp_path / "run", backend)


def test_torch_values_are_never_views_of_a_file(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"x": torch.arange(100_000)})
    tensor = fs.open(tmp_path / "run").read("x")
    for file in (tmp_path / "run" / "step-00000001").iterdir():
        os.truncate(file, 0)
    assert torch.equal(tensor, torch.arange(100_000))
