"""Real runs of real processes: the right bytes at the right places, and back."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone import _native
from flowstone.config import KIB, MIB
from flowstone_study.memory import Run
from flowstone_study.placing import parts, requests, run_bytes
from flowstone_study.processes import Outcome, Processes
from flowstone_study.records import ENGINES, LAYOUTS, MEMORIES, Cell, EngineName, Layout
from flowstone_study.worker import Failed

BASE = Cell(direction="write", mix="7B", bytes=6 * MIB, processes=3, request_bytes=256 * KIB, queue_depth=4)


def cell(layout: Layout = "rank", **changed: object) -> Cell:
    one = replace(BASE, layout=layout, chunk_bytes=512 * KIB if layout == "chunk" else 0)
    return replace(one, **changed)  # type: ignore[arg-type]


def run(crew: Processes, one: Cell, directory: Path) -> Outcome:
    assert crew.prepare(one, directory) is None
    outcome = crew.run()
    assert isinstance(outcome, Outcome), outcome
    return outcome


def expected(one: Cell, rank: int) -> bytes:
    memory = Run(run_bytes(one), huge_pages=False)
    memory.fill(one, rank)
    return bytes(memory.bytes)


def stored(one: Cell, rank: int, directory: Path) -> bytes:
    whole = bytearray(run_bytes(one))
    for part in parts(one, rank):
        content = (directory / part.file).read_bytes()
        assert len(content) == part.size_bytes
        piece = content[part.offset_bytes : part.offset_bytes + part.length_bytes]
        whole[part.start_bytes : part.start_bytes + part.length_bytes] = piece
    return bytes(whole)


@pytest.fixture(scope="module")
def crew() -> object:
    with Processes() as started:
        yield started


def test_the_pattern_tells_ranks_tensors_and_places() -> None:
    whole = b"".join(expected(BASE, rank) for rank in range(3))
    assert len({whole[at : at + 4096] for at in range(0, len(whole), 4096)}) == 3 * run_bytes(BASE) // 4096


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_write_each_byte_at_its_place_and_restore_it(
    crew: Processes, tmp_path: Path, layout: Layout, coalesced: bool, direct: bool
) -> None:
    one = cell(layout, coalesced=coalesced, direct=direct, reserved=coalesced)
    if direct and not _native.probe_direct(str(tmp_path)):
        pytest.skip("O_DIRECT is refused here")
    written = run(crew, one, tmp_path)
    for rank in range(one.processes):
        assert stored(one, rank, tmp_path) == expected(one, rank)
    assert written.requests == sum(len(requests(one, parts(one, rank)).file) for rank in range(one.processes))
    restored = run(crew, replace(one, direction="restore", reserved=True), tmp_path)  # the worker compares
    assert restored.requests == written.requests
    assert restored.seconds > 0


@pytest.mark.parametrize(
    ("engine", "memory"), [(e, m) for e in ENGINES for m in MEMORIES if e == "io_uring" or m != "registered"]
)
def test_engines_and_memories_move_the_same_bytes(
    crew: Processes, tmp_path: Path, engine: EngineName, memory: str
) -> None:
    if engine == "io_uring" and not _native.has_io_uring():
        pytest.skip("io_uring is refused here")
    one = cell(engine=engine, memory=memory, queue_depth=1 if engine == "sync" else 4, direct=False)
    run(crew, one, tmp_path)
    assert stored(one, 1, tmp_path) == expected(one, 1)
    run(crew, replace(one, direction="restore"), tmp_path)


def test_a_restore_that_brings_other_bytes_is_no_sample(crew: Processes, tmp_path: Path) -> None:
    one = cell("shared", direct=False)
    run(crew, one, tmp_path)
    with open(tmp_path / "shared0", "r+b") as file:
        file.seek(run_bytes(one) + 4096 * 5)
        file.write(b"\xff")
    crew.prepare(replace(one, direction="restore"), tmp_path)
    assert crew.run() == Failed("what was restored is not what was written")


def test_a_file_that_ends_too_early_is_a_failure_with_its_reason(crew: Processes, tmp_path: Path) -> None:
    one = cell("shared", direct=False)
    run(crew, one, tmp_path)
    os.truncate(tmp_path / "shared0", run_bytes(one) + 4096)
    crew.prepare(replace(one, direction="restore"), tmp_path)
    outcome = crew.run()
    assert isinstance(outcome, Failed)
    assert "end of file" in outcome.reason


def test_missing_files_fail_and_the_crew_goes_on(crew: Processes, tmp_path: Path) -> None:
    assert crew.prepare(cell(direction="restore"), tmp_path) is None
    assert crew.run() == Failed("ENOENT: No such file or directory")
    run(crew, cell(direct=False), tmp_path)


def test_a_killed_process_is_a_failure_and_is_replaced(tmp_path: Path) -> None:
    with Processes() as crew:
        run(crew, cell(direct=False), tmp_path)
        victim = crew._workers[1]
        victim.send_signal(signal.SIGKILL)
        failed = crew.prepare(cell(direct=False), tmp_path)
        assert failed == Failed(f"the process ended with status {-signal.SIGKILL}")
        run(crew, cell(direct=False), tmp_path)
        workers = list(crew._workers)
        assert victim not in workers
    assert all(worker.poll() is not None for worker in workers)
