"""A forked child inherits nothing of a store that holds a lock or the space of removed files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from contract import random_bytes, read_rows, write_rows

from flowstone import _native
from flowstone.config import MIB, READ_REQUEST_BYTES, EngineOptions
from flowstone.store.base import FilePlan
from flowstone.store.forks import _owners
from flowstone.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "store", EngineOptions(request_bytes=2 * MIB))
    store.make_directory()
    yield store
    store.close()


@pytest.fixture
def arena() -> Iterator[_native.Arena]:
    arena = _native.Arena(budget_bytes=4 * READ_REQUEST_BYTES, block_bytes=READ_REQUEST_BYTES)
    yield arena
    arena.close()


def seen_in_a_child(look: Callable[[], bytes]) -> str:
    """What `look` returns in a child that is forked now, as os.fork does it: a loader's worker, for one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, look())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def kept_of(root: str) -> Callable[[], bytes]:
    def look() -> bytes:
        collected = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                collected.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # of the listing itself
        return "\n".join(sorted(path for path in collected if root in path)).encode()

    return look


def test_a_child_that_is_forked_during_a_save_keeps_no_segment_open(store: LocalStore, arena: _native.Arena) -> None:
    source = random_bytes(3 * MIB)
    store.lock("parent")
    writing = store.write([FilePlan("segment", 4 * MIB)], write_rows([0], [0], [source]), arena)
    look = kept_of(str(store.root))
    assert "segment" in look().decode(), "the test proves nothing: it is not open"
    assert seen_in_a_child(look) == ""
    assert writing.receipt().error is None


def test_a_child_that_is_forked_during_a_load_keeps_no_segment_open(store: LocalStore, arena: _native.Arena) -> None:
    source = random_bytes(3 * MIB)
    receipt = store.write([FilePlan("segment", 4 * MIB)], write_rows([0], [0], [source]), arena).receipt()
    target = np.zeros_like(source)
    reading = store.read_extents(
        ["segment"], read_rows([0], [0], [target], receipt.digests), arena, wanted_bytes=source.nbytes
    )
    assert seen_in_a_child(kept_of(str(store.root))) == ""
    assert reading.receipt().error is None
    np.testing.assert_array_equal(target, source)


def test_stores_that_are_gone_leave_nothing_behind_for_forks(store: LocalStore, tmp_path: Path) -> None:
    """Each used to leave a call-back that lasts as long as the process."""
    before = len(_owners())
    for _ in range(10):
        LocalStore(tmp_path / "other")
    assert len(_owners()) == before
