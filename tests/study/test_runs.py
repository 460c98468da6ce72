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
    entry = replace(BASE, layout=layout, chunk_bytes=512 * KIB if layout == "chunk" else 0)
    return replace(entry, **changed)  # type: ignore[arg-type]


def run(crew: Processes, cell: Cell, directory: Path) -> Outcome:
    assert crew.prepare(cell, directory) is None
    outcome = crew.run()
    assert isinstance(outcome, Outcome), outcome
    return outcome


def expected(cell: Cell, rank: int) -> bytes:
    memory = Run(run_bytes(cell), huge_pages=False)
    memory.fill(cell, rank)
    return bytes(memory.bytes)


def stored(cell: Cell, rank: int, directory: Path) -> bytes:
    whole = bytearray(run_bytes(cell))
    for part in parts(cell, rank):
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
    assert len({whole[offset : offset + 4096] for offset in range(0, len(whole), 4096)}) == 3 * run_bytes(BASE) // 4096


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_write_each_byte_at_its_place_and_restore_it(
    crew: Processes, tmp_path: Path, layout: Layout, coalesced: bool, direct: bool
) -> None:
    entry = cell(layout, coalesced=coalesced, direct=direct, reserved=coalesced)
    if direct and not _native.probe_direct(str(tmp_path)):
        pytest.skip("O_DIRECT is refused here")
    written = run(crew, entry, tmp_path)
    for rank in range(entry.processes):
        assert stored(entry, rank, tmp_path) == expected(entry, rank)
    assert written.requests == sum(len(requests(entry, parts(entry, rank)).file) for rank in range(entry.processes))
    restored = run(crew, replace(entry, direction="restore", reserved=True), tmp_path)  # the worker compares
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
    entry = cell(engine=engine, memory=memory, queue_depth=1 if engine == "sync" else 4, direct=False)
    run(crew, entry, tmp_path)
    assert stored(entry, 1, tmp_path) == expected(entry, 1)
    run(crew, replace(entry, direction="restore"), tmp_path)


def test_a_restore_that_brings_other_bytes_is_no_sample(crew: Processes, tmp_path: Path) -> None:
    entry = cell("shared", direct=False)
    run(crew, entry, tmp_path)
    with open(tmp_path / "shared0", "r+b") as file:
        file.seek(run_bytes(entry) + 4096 * 5)
        file.write(b"\xff")
    crew.prepare(replace(entry, direction="restore"), tmp_path)
    assert crew.run() == Failed("the bytes read differ from the bytes written")


def test_a_file_that_ends_too_early_is_a_failure_with_its_reason(crew: Processes, tmp_path: Path) -> None:
    entry = cell("shared", direct=False)
    run(crew, entry, tmp_path)
    os.truncate(tmp_path / "shared0", run_bytes(entry) + 4096)
    crew.prepare(replace(entry, direction="restore"), tmp_path)
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
