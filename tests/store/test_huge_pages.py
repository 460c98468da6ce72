"""Huge pages, if the kernel allows them, in the arena and in the agent's files; without them, nothing fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flowstone as fs
from flowstone import _native
from flowstone.config import MIB
from memory_agent import own_agent

HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def _chosen(name: str) -> str:
    """What an administrator has chosen of the words there; "" where the kernel has none."""
    path = HUGE / name
    words = path.read_text().split() if path.exists() else []
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _of_files() -> str:
    own = _chosen("hugepages-2048kB/shmem_enabled")
    return _chosen("shmem_enabled") if own in ("", "inherit") else own


def _of_own_memory() -> str:
    own = _chosen("hugepages-2048kB/enabled")
    return _chosen("enabled") if own in ("", "inherit") else own


FILES = pytest.mark.skipif(
    _of_files() not in ("advise", "within_size", "always", "force"),
    reason=f"the kernel gives no huge pages to files in memory: shmem_enabled is {_of_files() or 'not there'}",
)
OWN = pytest.mark.skipif(
    _of_own_memory() not in ("madvise", "always"), reason=f"the kernel gives no huge pages: {_of_own_memory()!r}"
)


@pytest.fixture
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


def huge_bytes(name: str, of: str) -> int:
    """By /proc/self/smaps: of how many bytes of mappings with that name the page tables have huge pages."""
    bytes, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(" ")
        if not key.endswith(":"):
            counts = name in line
        elif counts and key == f"{of}:":
            bytes += int(value.split()[0]) << 10
    return bytes


@OWN
def test_the_arena_is_in_huge_pages() -> None:
    before = huge_bytes("", "AnonHugePages")
    arena = _native.Arena(budget_bytes=64 * MIB, block_bytes=4 * MIB)
    arena.grow(64 * MIB)
    assert arena.wait_grown(60.0)
    assert huge_bytes("", "AnonHugePages") - before >= 48 * MIB, "some may be short of them"
    arena.close()


@FILES
def test_the_agents_files_are_in_huge_pages_where_they_are_written_and_where_they_are_read(agent: Path) -> None:
    state = {"w": np.arange(8 * MIB, dtype=np.int64)}
    with fs.Checkpointer("memory://huge") as checkpointer:
        for step in (1, 2, 3):
            state["w"] += 1  # what stays equal is linked
            checkpointer.save(step, state).committed.result()
        assert huge_bytes("memfd:flowstone", "ShmemPmdMapped") >= 2 * 48 * MIB, "two generations of 64 MiB"
        into = {"w": np.zeros_like(state["w"])}
        assert checkpointer.load(into).step == 3
    assert np.array_equal(into["w"], state["w"])


@FILES
@pytest.mark.parametrize("parts", [1, 3])
def test_memory_that_is_reserved_is_in_huge_pages_whichever_way_the_kernel_gives_them(parts: int) -> None:
    fd = os.memfd_create("flowstone-huge")
    for part in range(parts):
        _native.reserve_memory(fd, part * 8 * MIB, (part + 1) * 8 * MIB)
    mapping = _native.Mapping(fd=fd, bytes=parts * 8 * MIB, writable=True)
    ctypes.memset(mapping.address, 7, mapping.bytes)
    assert huge_bytes("memfd:flowstone-huge", "ShmemPmdMapped") >= (parts * 8 - 2) * MIB
    os.close(fd)


@pytest.mark.parametrize("size", [1, 4096, MIB, 4 * MIB, 4 * MIB + 5])
def test_memory_that_is_reserved_has_its_pages_its_size_and_what_it_had(size: int) -> None:
    fd = os.memfd_create("flowstone")
    os.pwrite(fd, b"before", 0)
    _native.reserve_memory(fd, 0, size)
    actual = os.fstat(fd)
    assert actual.st_size == max(6, size)
    assert actual.st_blocks * 512 >= size
    assert os.pread(fd, 10, 0).rstrip(b"\0") == b"before"
    _native.reserve_memory(fd, 0, 4096)
    _native.reserve_memory(fd, 8 * MIB, 8 * MIB)
    assert os.fstat(fd).st_size == max(4096, size), "it gets no shorter"
    _native.reserve_memory(fd, 8 * MIB, 9 * MIB)
    assert os.fstat(fd).st_size == 9 * MIB
    with pytest.raises(ValueError, match="at pages"):
        _native.reserve_memory(fd, 5, 4096)
    os.close(fd)
    with pytest.raises(OSError, match="fallocate"):
        _native.reserve_memory(-1, 0, 4096)


_WITHOUT = """
import ctypes, sys
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0, "PR_SET_THP_DISABLE"
import numpy as np
import flowstone as fs
sys.path.insert(0, sys.argv[1])
from test_huge_pages import huge_bytes
state = {"w": np.arange(4 << 20)}
for store in ("memory://without", sys.argv[2]):
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result()
        into = {"w": np.zeros_like(state["w"])}
        assert checkpointer.load(into).step == 2
    assert np.array_equal(into["w"], state["w"])
assert huge_bytes("", "AnonHugePages") == huge_bytes("", "ShmemPmdMapped") == 0
"""


def test_nothing_fails_in_a_process_that_gets_no_huge_pages(agent: Path, tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent / "support"), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", _WITHOUT, str(tests), str(tmp_path)], check=True, env=environment)
