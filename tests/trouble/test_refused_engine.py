"""Engines that are refused: from the start, between probe and use, in the middle. The same bytes, or a typed error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from large import ENGINE, entries, loaded, state

import flowstone as fs
import sandbox
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.store.local import LocalStore
from flowstone.store.local_io import LocalWriteHandle
from own_process import run_in_own_process, warnings_heard

PROBED_RING = 2  # entries of the ring that the probe makes; every engine's is larger

needs_io_uring = pytest.mark.skipif(not _native.has_io_uring(), reason="this kernel or container refuses io_uring")
needs_seccomp = pytest.mark.skipif(not sandbox.HAS_SECCOMP, reason="no seccomp filters here")


def _saved_and_loaded(path: Path, engine: EngineOptions) -> tuple[list[str], list[str], list[bool]]:
    """Two saves and a load: what moved the bytes, what was warned of, whether all is as it was."""
    with warnings_heard() as heard, fs.Checkpointer(path, engine=engine) as checkpointer:
        reported = []
        for step in (1, 2):
            io = checkpointer.save(step, state(step)).committed.result().manifest.io
            reported.append(f"{io.backend} {io.queue_depth}")
        same = loaded(checkpointer, 2.0)
    return reported, heard, [same, fs.open(path, step=1).verify().sound]


# From the start


def _without_io_uring(path: Path, code: int) -> tuple[object, str]:
    sandbox.refuse("io_uring_setup", code)
    result = _saved_and_loaded(path, ENGINE)
    command = [sys.executable, "-m", "flowstone", "verify", str(path)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)  # the filter goes along
    return result, f"{verified.returncode} {verified.stderr}"


@needs_seccomp
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_io_uring_refused_from_the_start_is_posix_without_a_word(tmp_path: Path, code: int) -> None:
    result, verified = run_in_own_process(_without_io_uring, tmp_path / "run", code)
    assert result == (["posix 16", "posix 16"], [], [True, True])
    assert verified == "0 "


# Between probe and use


def _between(path: Path, code: int, above: int) -> object:
    sandbox.refuse("io_uring_setup", code, above=above)
    assert _native.has_io_uring(), "the probe must pass, or this tests nothing"
    return _saved_and_loaded(path, ENGINE)


@needs_io_uring
@needs_seccomp
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_io_uring_refused_after_the_probe_is_posix_with_one_warning(tmp_path: Path, code: int) -> None:
    reported, heard, same = run_in_own_process(_between, tmp_path / "run", code, PROBED_RING)
    assert (reported, same) == (["posix 16", "posix 16"], [True, True])
    reason = f"{os.strerror(code)} ({errno.errorcode[code]})"
    assert heard == [f"the system refuses io_uring ({reason}); using POSIX threads instead"]


@needs_io_uring
@needs_seccomp
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL])
def test_a_queue_deeper_than_the_kernel_takes_is_made_shallower_with_one_warning(tmp_path: Path, code: int) -> None:
    """ENOMEM is what kernels before 5.12 said at a memlock limit of 64 KiB, EINVAL what all say above their limit."""
    reported, heard, same = run_in_own_process(_between, tmp_path / "run", code, 8)
    assert (reported, same) == (["io_uring 4", "io_uring 4"], [True, True])
    assert heard == ["cannot start the io_uring engine with queue depth 16; using 4 instead"]


def _insisted(path: Path) -> tuple[str, list[str], str]:
    sandbox.refuse("io_uring_setup", errno.EPERM)
    insisting = EngineOptions(backend="io_uring")
    with fs.Checkpointer(path, engine=insisting) as checkpointer, pytest.raises(fs.StorageError) as caught:
        checkpointer.save(1, state(1))
    with fs.Checkpointer(path) as checkpointer:
        left = entries(path)
        backend = checkpointer.save(1, state(1)).committed.result().manifest.io.backend
    return str(caught.value), left, backend


@needs_seccomp
def test_io_uring_insisted_on_and_refused_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    text, left, backend = run_in_own_process(_insisted, tmp_path / "run")
    assert text.startswith("cannot start the io_uring engine for ")
    assert "EPERM" in text
    assert 'backend="auto"' in text
    assert left == []
    assert backend == "posix"


# In the middle


def _in_the_middle_of_a_save(path: Path) -> tuple[str, list[str], list[str], list[bool]]:
    captured = LocalWriteHandle.wait_captured

    def refuse_first(writing: LocalWriteHandle) -> None:
        sandbox.refuse("io_uring_enter", errno.EPERM)
        captured(writing)

    with warnings_heard() as heard, fs.Checkpointer(path, engine=ENGINE, budget_bytes=4 * MIB) as checkpointer:
        checkpointer.save(1, state(1, 96)).committed.result()
        LocalWriteHandle.wait_captured = refuse_first  # type: ignore[method-assign]
        error = checkpointer.save(2, state(2, 96)).committed.exception()
        LocalWriteHandle.wait_captured = captured  # type: ignore[method-assign]
        assert isinstance(error, fs.StorageError)
        left = entries(path)
        same = [loaded(checkpointer, 1.0, 96)]
        io = checkpointer.save(3, state(3)).committed.result().manifest.io
        same += [io.backend == "posix", loaded(checkpointer, 3.0)]
    return str(error), left, heard, same


@needs_io_uring
@needs_seccomp
def test_io_uring_refused_during_a_save_fails_that_save_and_the_next_is_posix(tmp_path: Path) -> None:
    error, left, heard, same = run_in_own_process(_in_the_middle_of_a_save, tmp_path / "run")
    assert error.startswith("cannot write ")
    assert "EPERM" in error
    assert "save again: the next attempt uses POSIX threads instead of io_uring" in error
    assert left == ["step-00000001"]
    assert heard == ["the system refuses io_uring (Operation not permitted); using POSIX threads from now on"]
    assert same == [True, True, True]


def _before_a_load(path: Path) -> tuple[bool, list[str]]:
    with warnings_heard() as heard, fs.Checkpointer(path, engine=ENGINE) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        sandbox.refuse("io_uring_enter", errno.ENOSYS)
        return loaded(checkpointer, 1.0), heard


@needs_io_uring
@needs_seccomp
def test_io_uring_refused_to_a_load_is_read_again_by_posix(tmp_path: Path) -> None:
    same, heard = run_in_own_process(_before_a_load, tmp_path / "run")
    assert same
    assert heard == ["the system refuses io_uring (Function not implemented); using POSIX threads from now on"]


def _without_registration(path: Path, first: bool) -> tuple[list[str], bool, list[str]]:
    """A ring that registers neither files nor memory, from the start or from the second save on."""
    reported, same = [], True
    with warnings_heard() as heard, fs.Checkpointer(path, engine=ENGINE, budget_bytes=4 * MIB) as checkpointer:
        for step in (1, 2, 3):
            if step == 2 - first:
                sandbox.refuse("io_uring_register", errno.EPERM)
            reported.append(checkpointer.save(step, state(step)).committed.result().manifest.io.backend)
            same = same and loaded(checkpointer, step)
    return reported, same, heard


@needs_io_uring
@needs_seccomp
@pytest.mark.parametrize("first", [True, False])
def test_registration_refused_is_done_without(tmp_path: Path, first: bool) -> None:
    assert run_in_own_process(_without_registration, tmp_path / "run", first) == (["io_uring"] * 3, True, [])


def _probe_of_half_an_engine() -> bool:
    sandbox.refuse("io_uring_enter", errno.EPERM)
    return _native.has_io_uring()


@needs_io_uring
@needs_seccomp
def test_a_ring_that_can_be_made_and_not_entered_is_no_io_uring() -> None:
    assert run_in_own_process(_probe_of_half_an_engine) is False


# Depth


def test_a_queue_depth_beyond_the_limit_is_refused_with_it() -> None:
    with pytest.raises(ValueError, match=r"queue_depth 1025 is not between 1 and 1024"):
        EngineOptions(queue_depth=1025)


@pytest.mark.parametrize("backend", ["io_uring", "posix"])
@pytest.mark.parametrize("depth", [1, 1024])
def test_the_least_and_the_greatest_depth_move_the_same_bytes(tmp_path: Path, backend: str, depth: int) -> None:
    if backend == "io_uring" and not _native.has_io_uring():
        pytest.skip("this kernel or container refuses io_uring")
    engine = EngineOptions(backend=backend, queue_depth=depth, request_bytes=2 * MIB)
    reported, heard, same = _saved_and_loaded(tmp_path / "run", engine)
    assert (reported, heard, same) == ([f"{backend} {depth}"] * 2, [], [True, True])


def test_a_closed_store_stops_every_engine_it_started(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, ENGINE)
    before = _tasks()
    store.backend()
    started = _tasks() - before
    assert started
    store.close()
    for _ in range(12_000):  # a thread that has been joined is listed for a moment yet
        if not started & _tasks():
            break
        time.sleep(0.01)
    assert not started & _tasks()


def _tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))
