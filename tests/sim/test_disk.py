"""The simulated disk itself: the states that it may and may not leave after a power loss."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from sim_disk import Disk, PowerLoss

SEEDS = range(40)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


def put(disk: Disk, name: str, content: bytes, *, sync: bool = True) -> None:
    fd = disk.create(disk.sandbox / name, os.O_WRONLY)
    disk.write(fd, content)
    if sync:
        disk.sync(fd)
    os.close(fd)


def outcomes(disk: Disk, tmp_path: Path) -> set[tuple[tuple[str, bytes | None], ...]]:
    """Every state that some seed leaves: sorted (path, content); None for a directory."""
    outcomes = set()
    for seed in SEEDS:
        target = tmp_path / "after"
        disk.after_power_loss(target, seed)
        entries = sorted(path for path in target.rglob("*"))
        outcomes.add(tuple((str(p.relative_to(target)), None if p.is_dir() else p.read_bytes()) for p in entries))
        shutil.rmtree(target)
    return outcomes


def test_synced_file_may_still_lack_its_name(disk, tmp_path):
    put(disk, "file", b"content")
    assert outcomes(disk, tmp_path) == {(), (("file", b"content"),)}


def test_synced_file_with_a_synced_name_survives(disk, tmp_path):
    put(disk, "file", b"content")
    disk.sync_directory(disk.sandbox)
    assert outcomes(disk, tmp_path) == {(("file", b"content"),)}


def test_name_alone_promises_no_content(disk, tmp_path):
    put(disk, "file", b"1" * 4096 + b"2" * 4096, sync=False)
    disk.sync_directory(disk.sandbox)
    contents = {state[0][1] for state in outcomes(disk, tmp_path)}
    assert {b"", b"1" * 4096 + b"2" * 4096, b"\0" * 4096 + b"2" * 4096, b"1" * 4096 + b"\0" * 4096} <= contents
    assert any(0 < len(content) < 8192 for content in contents)


def test_what_is_appended_to_a_synced_file_leaves_it_no_shorter_than_it_was(disk, tmp_path):
    put(disk, "file", b"1" * 8192)
    disk.sync_directory(disk.sandbox)
    fd = os.open(disk.sandbox / "file", os.O_WRONLY)
    disk._open[fd] = disk._find(disk.sandbox / "file")
    disk.extend(fd, 20480)
    disk.write_at(fd, [memoryview(b"2" * 4096), memoryview(b"3" * 4096)], 8192)
    os.close(fd)
    contents = {state[0][1] for state in outcomes(disk, tmp_path)}
    assert {content[:8192] for content in contents} == {b"1" * 8192}
    assert {8192, 20480} < {len(content) for content in contents}


def test_link_that_is_not_synced_is_there_or_not_and_outlives_the_first_name(disk, tmp_path):
    put(disk, "old", b"content")
    disk.sync_directory(disk.sandbox)
    disk.link(disk.sandbox / "old", disk.sandbox / "new")
    old, new = ("old", b"content"), ("new", b"content")
    assert outcomes(disk, tmp_path) == {(old,), (new, old)}
    disk.sync_directory(disk.sandbox)
    disk.unlink(disk.sandbox / "old")
    disk.sync_directory(disk.sandbox)
    disk.after_power_loss(tmp_path / "last", 0)
    assert {path.name: path.read_bytes() for path in (tmp_path / "last").iterdir()} == {"new": b"content"}


def test_rename_that_is_not_synced_leaves_one_of_both_names(disk, tmp_path):
    put(disk, "old", b"content")
    disk.sync_directory(disk.sandbox)
    disk.rename(disk.sandbox / "old", disk.sandbox / "new")
    assert outcomes(disk, tmp_path) == {(("old", b"content"),), (("new", b"content"),)}


def test_name_that_was_freed_and_taken_leads_to_one_file(disk, tmp_path):
    put(disk, "name", b"first")
    disk.sync_directory(disk.sandbox)
    disk.rename(disk.sandbox / "name", disk.sandbox / "aside")
    put(disk, "draft", b"second")
    disk.rename(disk.sandbox / "draft", disk.sandbox / "name")
    first, second = ("name", b"first"), ("name", b"second")
    moved, draft = ("aside", b"first"), ("draft", b"second")
    allowed = {(first,), (draft, first), (moved,), (moved, draft), (moved, second)}
    assert outcomes(disk, tmp_path) == {tuple(sorted(state)) for state in allowed}


def test_removal_that_is_not_synced_may_be_undone(disk, tmp_path):
    put(disk, "file", b"content")
    disk.sync_directory(disk.sandbox)
    disk.unlink(disk.sandbox / "file")
    assert outcomes(disk, tmp_path) == {(), (("file", b"content"),)}
    disk.sync_directory(disk.sandbox)
    assert outcomes(disk, tmp_path) == {()}


def test_what_lies_in_a_lost_directory_is_lost(disk, tmp_path):
    disk.make_directory(disk.sandbox / "inner")
    put(disk, "inner/file", b"content")
    disk.sync_directory(disk.sandbox / "inner")
    assert outcomes(disk, tmp_path) == {(), (("inner", None), ("inner/file", b"content"))}


def test_nothing_happens_after_the_power_is_lost(disk):
    disk.stop_at = 1
    disk.make_directory(disk.sandbox / "before")
    for name in ("at", "after"):
        with pytest.raises(PowerLoss):
            disk.make_directory(disk.sandbox / name)
    assert os.listdir(disk.sandbox) == ["before"]
    assert [change.path for change in disk.changes] == ["before", "at"]


def test_write_that_is_stopped_is_half_done(disk):
    disk.stop_at = 1
    with pytest.raises(PowerLoss):
        put(disk, "file", b"12345678")
    assert (disk.sandbox / "file").read_bytes() == b"1234"


def test_error_comes_once_with_its_errno(disk):
    disk.fail_at, disk.errno = 0, errno.ENOSPC
    with pytest.raises(OSError, match="No space left") as caught:
        disk.make_directory(disk.sandbox / "inner")
    assert caught.value.errno == errno.ENOSPC
    disk.make_directory(disk.sandbox / "inner")
