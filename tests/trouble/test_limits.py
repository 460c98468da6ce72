"""Limits of a process: locked memory, threads, open files, address space. It works within them, or a typed error."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from large import ENGINE, entries, loaded, state

import flowstone as fs
import sandbox
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from own_process import run_in_own_process, warnings_heard


def _with_little_locked_memory(path: Path, limit: int) -> tuple[list[bool], list[str]]:
    sandbox.limit_locked_memory(limit)
    same = []
    with warnings_heard() as heard:
        for depth in (16, 1024):
            engine = EngineOptions(queue_depth=depth, request_bytes=2 * MIB)
            # An arena so small that its blocks come again, which is when they would be pinned.
            with fs.Checkpointer(path / str(depth), engine=engine, budget_bytes=4 * MIB) as checkpointer:
                checkpointer.save(1, state(1)).committed.result()
                same.append(loaded(checkpointer, 1.0))
            same.append(fs.open(path / str(depth)).verify().sound)
    return same, heard


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up a capability needs to have it")
@pytest.mark.parametrize("limit", [65_536, 0])
def test_a_memlock_limit_of_64_kib_or_nothing_is_enough(tmp_path: Path, limit: int) -> None:
    same, heard = run_in_own_process(_with_little_locked_memory, tmp_path, limit)
    assert same == [True] * 4
    # Which rings are too large is the kernel's business: 5.12 to 6.13 count none of their memory, others all of it.
    for warning in heard:
        assert warning.startswith(("cannot start the io_uring engine", "the system refuses io_uring (Cannot allocate"))


def _converted_with_little_locked_memory(path: Path, limit: int) -> tuple[bool, list[tuple[str, bool]]]:
    sandbox.limit_locked_memory(limit)
    ways = []
    run_requests = _native.run_requests

    def noted(**arguments: object) -> object:
        fault = run_requests(**arguments)  # type: ignore[arg-type]
        ways.append((str(arguments["backend"]), bool(arguments["register"])))
        return fault

    _native.run_requests = noted  # type: ignore[assignment]
    fs.export(path / "run", path / "out")
    return fs.diff(path / "run", path / "out", names="model.*").equal, sorted(set(ways))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up a capability needs to have it")
@pytest.mark.parametrize("limit", [65_536, 0])
def test_a_conversion_goes_on_without_registered_memory_where_none_may_be_locked(tmp_path: Path, limit: int) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"weight": torch.rand(2 * MIB)}}).committed.result()
    same, ways = run_in_own_process(_converted_with_little_locked_memory, tmp_path, limit)
    assert same
    assert ways, "what went through the page cache alone shows nothing"
    assert not any(registers for _, registers in ways)


_NONE = -1  # of a limit: what the process began with


def _attempts(path: Path, limits: Iterator[int], limit: Callable[[int], None]) -> list[str]:
    """Save and load under ever wider limits until that works; how it failed until then."""
    attempts = []
    for number in limits:
        step = number + 1
        try:
            with fs.Checkpointer(path, engine=ENGINE) as checkpointer:
                limit(number)
                checkpointer.save(step, state(step, 3)).committed.result()
                assert loaded(checkpointer, step, 3)
                limit(_NONE)
            return attempts
        except fs.FlowstoneError as error:
            attempts.append(str(error))
        finally:
            limit(_NONE)
        left = entries(path) if path.exists() else []
        assert not [name for name in left if name.startswith(".saving-")], left
        if left:  # the save had come through, and the load not
            with fs.Checkpointer(path, engine=ENGINE) as checkpointer:
                assert loaded(checkpointer, max(int(name.removeprefix("step-")) for name in left), 3)
    raise AssertionError("no limit was wide enough")


def _with_few_threads(path: Path) -> list[str]:
    torch.set_num_threads(1)  # its own threads end the process where they cannot start
    sandbox.count_threads()

    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]

    def limit(threads: int) -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard if threads < 0 else threads, hard))

    return _attempts(path, iter(range(1, 64)), limit)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_too_few_threads_are_an_error_with_the_remedy_and_no_wait(tmp_path: Path) -> None:
    message = run_in_own_process(_with_few_threads, tmp_path / "run")
    assert len(message) > 2
    for text in message:
        assert "ulimit -u" in text or "-u, pids.max" in text or "uses POSIX threads instead" in text, text


def _with_few_files(path: Path) -> list[str]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def limit(files: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if files < 0 else files, hard))

    return _attempts(path, iter(range(1, 64)), limit)


def test_too_few_open_files_are_an_error_with_the_remedy(tmp_path: Path) -> None:
    message = run_in_own_process(_with_few_files, tmp_path / "run")
    assert message
    for text in message:
        assert "ulimit -n" in text, text


def _with_little_address_space(path: Path) -> tuple[str, list[str], bool]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 1000 * MIB, resource.RLIM_INFINITY))
    greedy = fs.Checkpointer(path, engine=ENGINE, budget_bytes=2048 * MIB)
    with greedy, pytest.raises(fs.BudgetError) as caught:
        greedy.save(1, state(1))
    left = entries(path)
    with fs.Checkpointer(path, engine=ENGINE, budget_bytes=32 * MIB) as checkpointer:
        checkpointer.save(1, state(1)).committed.result()
        return str(caught.value), left, loaded(checkpointer, 1.0)


def test_a_budget_beyond_the_address_space_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    text, left, same = run_in_own_process(_with_little_address_space, tmp_path / "run")
    assert text.startswith(f"the operating system refused {2048 * MIB} bytes of staging memory")
    assert "ulimit -v" in text
    assert left == []
    assert same
