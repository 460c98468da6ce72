"""Short writes and reads, forced: the same bytes, or the final error of the system."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
from large import entries, loaded, state

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.events.phases import Event, Written
from flowstone.store.local import LocalStore
from flowstone.store.system import System
from own_process import run_in_own_process

BACKENDS = ["posix", "io_uring"]


def options(backend: str, direct: str) -> EngineOptions:
    if backend == "io_uring" and not _native.has_io_uring():
        pytest.skip("this kernel or container refuses io_uring")
    return EngineOptions(backend=backend, direct=direct, request_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("direct", "bytes_max"),
    [("on", 4096), ("on", 10 * 4096), ("on", 9 * 4096 + 512), ("on", 4097), ("off", 1000), ("off", 70_001)],
)
def test_short_counts_change_no_byte(disk: FaultyDisk, direct: str, bytes_max: int) -> None:
    """Counts that are no multiple of the block make O_DIRECT do the last part again.

    By POSIX threads: after a short count io_uring goes on by itself, in the kernel, and on FUSE (Linux 6.18)
    from the beginning of the range, as one writev of a C program shows. Its short counts come from
    RLIMIT_FSIZE below, and from native/tests.
    """
    run, mib = disk.path / "run", 1 if bytes_max < 8192 else 5
    with fs.Checkpointer(run, engine=options("posix", direct)) as checkpointer:
        disk.befall(Trouble("write", bytes_max=bytes_max, name="rank-"))
        checkpointer.save(1, state(1, mib)).committed.result()
        assert disk.befall()["write"] > 10
        assert loaded(checkpointer, 1.0, mib)
        disk.befall(Trouble("read", bytes_max=bytes_max, name="rank-"))
        assert loaded(checkpointer, 1.0, mib)
        assert disk.befall()["read"] > 10
    assert fs.open(run).verify().sound


def test_short_writes_of_small_files_change_no_byte(disk: FaultyDisk) -> None:
    run = disk.path / "run"
    small = ("index", "objects", "manifest", "flowstone")
    disk.befall(*(Trouble("write", bytes_max=7, name=name) for name in small))
    with fs.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        assert disk.befall()["write"] > 100
        assert loaded(checkpointer, 1.0, 1)
    assert fs.open(run).verify().sound


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_that_move_nothing_at_all_are_an_error(disk: FaultyDisk, backend: str) -> None:
    """Not an endless loop: by the engine, nor by what writes the small files."""
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options(backend, "auto")) as checkpointer:
        checkpointer.save(1, state(1, 1)).committed.result()
        for name in ("rank-", "index", "manifest"):
            disk.befall(Trouble("write", bytes_max=0, name=name))
            error = checkpointer.save(2, state(2, 1)).committed.exception(timeout=120)
            assert isinstance(error, fs.StorageError), name
            assert error.errno in (errno.EIO, errno.EAGAIN)  # the second is io_uring's own word for it
            disk.befall()
            assert entries(run) == ["step-00000001"]
        assert loaded(checkpointer, 1.0, 1)


# RLIMIT_FSIZE: the system cuts the write that crosses the limit, and refuses the next one


class _Limited(System):
    """Lets files be reserved, and then no byte be written at or beyond `limit`."""

    limit = resource.RLIM_INFINITY

    def reserve(self, fd: int, size_bytes: int) -> None:
        super().reserve(fd, size_bytes)
        _limit(self.limit)


def _limit(bytes_max: int) -> None:
    # Python ignores SIGXFSZ, so that the write fails instead.
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, resource.RLIM_INFINITY))


def _limited_segment(path: Path, backend: str, direct: str, limit: int) -> tuple[fs.StorageError, list[str], bool]:
    system = _Limited()
    with fs.Checkpointer(LocalStore(path, options(backend, direct), system)) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        system.limit = limit
        error = checkpointer.save(2, state(2)).committed.exception()
        _limit(resource.RLIM_INFINITY)
        system.limit = resource.RLIM_INFINITY
        assert isinstance(error, fs.StorageError)
        left = entries(path)
        same = loaded(checkpointer, 1.0)
        checkpointer.save(2, state(2)).committed.result()
        return (error.errno, str(error)), left, same and loaded(checkpointer, 2.0)


@pytest.mark.parametrize(("direct", "limit"), [("off", 9 * MIB + 1000), ("auto", 9 * MIB + 4096)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_cut_by_the_limit_on_file_sizes_goes_on_to_the_error(
    tmp_path: Path, backend: str, direct: str, limit: int
) -> None:
    options(backend, direct)
    (code, message), left, same = run_in_own_process(_limited_segment, tmp_path / "run", backend, direct, limit)
    assert code == errno.EFBIG
    assert f"bytes {limit}.." in message, "all up to the limit was written first"
    assert "ulimit -f" in message
    assert left == ["step-00000001"]
    assert same


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_limit_within_a_block_is_not_taken_for_a_refusal_of_direct_writes(
    tmp_path: Path, backend: str
) -> None:
    """The kernel calls the write unaligned that it has cut itself (EINVAL)."""
    options(backend, "auto")
    (code, output), left, same = run_in_own_process(_limited_segment, tmp_path / "run", backend, "auto", 9 * MIB + 1000)
    assert code == errno.EFBIG
    assert "ulimit -f" in output
    assert "page cache" not in output
    assert left == ["step-00000001"]
    assert same


def _limited_index(path: Path) -> tuple[list[str], list[str], bool]:
    """The segment is whole, and then the index is cut short, and then the manifest."""
    limits = [resource.RLIM_INFINITY]

    def watch(event: Event) -> None:
        if isinstance(event, Written):
            _limit(limits.pop())

    message, left = [], []
    with fs.Checkpointer(path, on_event=watch) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        files = {file.name: file.stat().st_size for file in (path / "step-00000001").iterdir()}
        assert files["objects.json"] < files["manifest.json"] < files["index.safetensors"]
        for limit in (0, 100, files["manifest.json"] - 1):
            limits.append(limit)
            error = checkpointer.save(2, state(2)).committed.exception()
            _limit(resource.RLIM_INFINITY)
            assert isinstance(error, fs.StorageError)
            message.append(f"{error.errno} {error.message.rpartition('/')[2]}")
            left += entries(path)[1:]
        limits.append(resource.RLIM_INFINITY)
        same = loaded(checkpointer, 1.0)
        checkpointer.save(2, state(2)).committed.result()
        return message, left, same and loaded(checkpointer, 2.0)


def test_small_files_cut_by_the_limit_fail_the_save_and_leave_nothing(tmp_path: Path) -> None:
    message, left, same = run_in_own_process(_limited_index, tmp_path / "run")
    assert message == [f"{errno.EFBIG} index.safetensors"] * 3
    assert left == []
    assert same


def _limited_from_the_start(path: Path) -> tuple[str, list[str], bool]:
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        _limit(4 * MIB)
        with pytest.raises(fs.StorageError) as caught:
            checkpointer.save(2, state(2))
        _limit(resource.RLIM_INFINITY)
        left, same = entries(path), loaded(checkpointer, 1.0)
        checkpointer.save(2, state(2)).committed.result()
        return str(caught.value), left, same and loaded(checkpointer, 2.0)


def test_a_segment_above_the_limit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    text, left, same = run_in_own_process(_limited_from_the_start, tmp_path / "run")
    assert text.startswith("cannot allocate ")
    assert "ulimit -f" in text
    assert left == ["step-00000001"]
    assert same
