"""No space, at every point of a save: FullError, the previous checkpoint intact, no files left; later saves succeed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from large import ENGINE, entries, loaded, state

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone.config import MIB, EngineOptions

Mount = Callable[..., Path]
KIB = 1024


def _free_bytes(disk: Path) -> int:
    bytes = os.statvfs(disk)
    return bytes.f_bavail * bytes.f_frsize


def _fill(disk: Path, left_bytes: int) -> Path:
    """A file that takes all of the disk but `left_bytes`, or a little more or less (its own bookkeeping)."""
    subprocess.run(["sync", "-f", disk], check=True)  # ext4 counts removed files' blocks as free once that is durable
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        while (buffer := _free_bytes(disk) - left_bytes) > 0:
            try:
                file.write(bytes(buffer))
                file.flush()
            except OSError:
                break  # full by less than was left to count
            os.fsync(file.fileno())
    return ballast


def _failures(disk: Path, rooms: Iterator[int], mib: int) -> list[str]:
    """What fails when a second save finds so much room, until one succeeds; all else is checked here."""
    run, failures = disk / "run", []
    for step, buffer in enumerate(rooms, start=2):
        ballast = _fill(disk, buffer)
        error: BaseException | None
        with fs.Checkpointer(run, engine=ENGINE) as checkpointer:
            newest = max(s for s in range(1, step) if (run / f"step-{s:08d}").exists())
            try:
                error = checkpointer.save(step, state(step, mib)).committed.exception()
            except fs.FlowstoneError as refusal:
                error = refusal
            if error is None:
                ballast.unlink()
                assert loaded(checkpointer, step, mib)
                return failures
            assert isinstance(error, fs.FullError), f"{buffer} bytes of room: {error!r}"
            assert re.fullmatch(r"\d+ bytes|unknown", str(error.facts["needed"]))
            assert re.fullmatch(r"\d+ bytes", str(error.facts["free"]))
            assert "prune" in str(error.facts["next"])
            assert entries(run) == [f"step-{newest:08d}"], "a failed save gives its space back"
            failures.append(re.sub(r".*no space to (\w+) .*?([a-z]*)[^/]*$", r"\1 \2", error.message))
            ballast.unlink()
            assert loaded(checkpointer, newest, mib)
    pytest.fail("no save succeeded")


def test_a_disk_without_reservations_fills_up_at_every_point_of_a_save(loop: Mount) -> None:
    """ext2 cannot reserve: the segment itself meets the end of the disk, half written."""
    disk = loop(5, "mkfs.ext2", "-q", "-m", "0", "-b", "1024")
    with fs.Checkpointer(disk / "run", engine=ENGINE) as checkpointer:
        first = checkpointer.save(1, state(1, 1)).committed.result()
    segment = first.manifest.segments[0].bytes
    rooms = [8 * KIB, MIB, *range(segment, segment + 64 * KIB, KIB)]
    failures = _failures(disk, iter(rooms), 1)
    assert {"write rank", "write index"} <= set(failures), failures


def test_a_disk_with_reservations_refuses_the_segment_before_it_is_written(loop: Mount) -> None:
    disk = loop(8, "mkfs.ext4", "-q", "-m", "0", "-b", "1024")
    with fs.Checkpointer(disk / "run", engine=ENGINE) as checkpointer:
        first = checkpointer.save(1, state(1, 1)).committed.result()
    segment = first.manifest.segments[0].bytes
    rooms = [8 * KIB, MIB, *range(segment, segment + 64 * KIB, KIB)]
    failures = _failures(disk, iter(rooms), 1)
    assert {"allocate rank", "write index"} <= set(failures), failures


@pytest.mark.parametrize("backend", ["posix", "io_uring"])
@pytest.mark.parametrize("spared", [0, 1, 2, 5])
def test_space_that_runs_out_at_some_write_is_told_with_its_range(
    disk: FaultyDisk, backend: str, spared: int
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=EngineOptions(request_bytes=2 * MIB)) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(Trouble("write", error=errno.ENOSPC, name="rank-", spared=spared))
        error = checkpointer.save(2, state(2)).committed.exception()
        assert isinstance(error, fs.FullError)
        assert 9 * MIB < int(str(error.facts["needed"]).split()[0]) < 10 * MIB
        assert str(error.facts["free"]) == f"{1 << 31} bytes"
        assert str(error.facts["range"]).startswith("bytes ")
        assert entries(run) == ["step-00000001"]
        disk.befall()
        checkpointer.save(2, state(2)).committed.result()
        assert loaded(checkpointer, 2.0)


@pytest.mark.parametrize("name", ["index", "objects", "manifest"])
def test_space_that_runs_out_at_a_small_file_fails_the_commit_only(disk: FaultyDisk, name: str) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        disk.befall(Trouble("write", error=errno.ENOSPC, name=name))
        error = checkpointer.save(2, state(2, 1)).committed.exception()
        assert isinstance(error, fs.FullError)
        assert f"no space to write {run}/.saving-" in error.message
        assert name in error.message
        assert int(str(error.facts["needed"]).split()[0]) > 0
        assert entries(run) == ["step-00000001"]
        disk.befall()
        checkpointer.save(2, state(2, 1)).committed.result()
        assert loaded(checkpointer, 2.0, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_space_that_runs_out_only_at_the_sync_is_told_with_what_is_needed(disk: FaultyDisk, code: int) -> None:
    """As file systems do that find room late: those of a network, those with quotas."""
    run = disk.path / "run"
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        for name in ("rank-", "index", "objects", "manifest"):
            disk.befall(Trouble("fsync", error=code, name=name))
            error = checkpointer.save(2, state(2, 1)).committed.exception()
            assert isinstance(error, fs.FullError)
            assert name in error.message
            assert error.errno == code
            assert re.fullmatch(r"\d+ bytes", str(error.facts["needed"]))
            disk.befall()
            assert entries(run) == ["step-00000001"]
        disk.befall(Trouble("fsyncdir", error=code))
        assert isinstance(checkpointer.save(2, state(2, 1)).committed.exception(), fs.FullError)
        disk.befall()
        assert entries(run) == ["step-00000001"]
        checkpointer.save(2, state(2, 1)).committed.result()
        assert loaded(checkpointer, 2.0, 1)


def test_a_disk_that_takes_no_more_files_says_so(mount: Mount) -> None:
    disk = mount("-t", "tmpfs", "-o", "size=64m,nr_inodes=20", "tmpfs")
    run = disk / "run"
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        messages = []
        for number in range(20):
            try:
                (disk / f"file{number}").touch()
            except OSError:
                break
        for spare in range(8):
            (disk / f"file{spare}").unlink(missing_ok=True)
            try:
                error = checkpointer.save(2, state(2, 1)).committed.exception()
            except fs.FlowstoneError as refusal:
                error = refusal
            if error is None:
                break
            assert isinstance(error, fs.FullError)
            messages.append(str(error.facts.get("inodes")))
            assert entries(run) == ["step-00000001"]
        assert loaded(checkpointer, 2.0, 1)
    assert len(messages) > 2
    assert "none free: the file system takes no more files" in messages
