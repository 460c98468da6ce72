"""O_DIRECT that is accepted at open and refused at a write or a read: the same bytes go through the page cache."""

from __future__ import annotations

import errno

import pytest
import torch
from large import entries, loaded, state

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from flowstone import _native
from flowstone.config import MIB, EngineOptions

BACKENDS = ["posix", "io_uring"]


def options(backend: str, direct: str = "auto") -> EngineOptions:
    if backend == "io_uring" and not _native.has_io_uring():
        pytest.skip("this kernel or container refuses io_uring")
    return EngineOptions(backend=backend, direct=direct, request_bytes=2 * MIB)


def refused(operation: str, **more: object) -> Trouble:
    return Trouble(operation, error=errno.EINVAL, direct=True, name="rank-", **more)


@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_writes_refused_after_the_probe_go_through_the_page_cache(
    disk: FaultyDisk, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options(backend)) as checkpointer:
        assert checkpointer.save(1, state(1)).committed.result().manifest.io.alignment == 4096
        disk.befall(refused("write"))
        for step in (2, 3):
            assert checkpointer.save(step, state(step)).committed.result().manifest.io.alignment == 1
            assert loaded(checkpointer, step)
        assert disk.befall() == {"write": 1}, "the second save asked again"
    assert fs.open(run).verify().sound
    assert caplog.messages == [f"{run} refuses O_DIRECT writes; using the page cache from now on"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_writes_refused_half_way_fail_that_save_and_the_next_is_buffered(
    disk: FaultyDisk, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options(backend)) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(refused("write", spared=3))
        error = checkpointer.save(2, state(2)).committed.exception()
        assert isinstance(error, fs.StorageError)
        assert error.errno == errno.EINVAL
        assert error.facts["next"] == "save again: the next attempt goes through the page cache"
        assert str(error.facts["range"]).startswith("bytes ")
        assert entries(run) == ["step-00000001"]
        assert loaded(checkpointer, 1.0)
        assert checkpointer.save(2, state(2)).committed.result().manifest.io.alignment == 1
        assert loaded(checkpointer, 2.0)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("spared", [0, 1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_reads_refused_anywhere_are_read_again_through_the_page_cache(
    disk: FaultyDisk, backend: str, spared: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options(backend)) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(refused("read", spared=spared))
        assert loaded(checkpointer, 1.0)
        assert loaded(checkpointer, 1.0)
        assert disk.befall()["read"] >= 1
        checkpointer.save(2, state(2)).committed.result()
        assert loaded(checkpointer, 2.0)
    # A refusal of the first block is part of finding out how to read, and told to nobody.
    assert len(caplog.messages) == (spared > 0)


@pytest.mark.parametrize("spared", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_reads_refused_to_what_is_read_ahead_are_read_again(
    disk: FaultyDisk, backend: str, spared: int
) -> None:
    run = disk.path / "run"
    small = {str(index): torch.full((10_000,), float(index)) for index in range(600)}
    with fs.Checkpointer(run, engine=options(backend)) as checkpointer:
        checkpointer.save(1, {"model": small}).committed.result()
        disk.befall(refused("read", spared=spared))
        blank = {name: torch.zeros(10_000) for name in small}
        checkpointer.load({"model": blank})
        assert disk.befall()["read"] >= 1
    assert all(torch.equal(blank[name], tensor) for name, tensor in small.items())


def test_direct_insisted_on_and_refused_is_an_error_with_the_remedy(disk: FaultyDisk) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options("posix", "on")) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(refused("write"))
        with pytest.raises(fs.StorageError, match=r"refuses direct I/O \(O_DIRECT\)") as caught:
            checkpointer.save(2, state(2))
        assert 'direct="auto"' in str(caught.value.facts["next"])
        disk.befall(refused("write", spared=2))
        error = checkpointer.save(2, state(2)).committed.exception()
        assert isinstance(error, fs.StorageError)
        assert 'direct="auto"' in str(error.facts["next"])
        assert entries(run) == ["step-00000001"]
        assert loaded(checkpointer, 1.0)


def test_what_is_refused_for_another_reason_is_not_taken_for_alignment(disk: FaultyDisk) -> None:
    run = disk.path / "run"
    with fs.Checkpointer(run, engine=options("posix")) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        disk.befall(Trouble("write", error=errno.EIO, name="rank-"))
        error = checkpointer.save(2, state(2)).committed.exception()
        assert isinstance(error, fs.StorageError)
        assert error.errno == errno.EIO
        disk.befall(Trouble("read", error=errno.EIO, name="rank-", direct=True))
        with pytest.raises(fs.StorageError, match="cannot read") as caught:
            loaded(checkpointer, 1.0)
        assert caught.value.errno == errno.EIO
        disk.befall()
        assert checkpointer.save(2, state(2)).committed.result().manifest.io.alignment == 4096
        assert loaded(checkpointer, 2.0)
