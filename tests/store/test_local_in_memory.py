"""A directory of a file system in memory: segments are captured where they stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from contract import StoreContract, random_bytes, read_rows, write_rows

import flowstone as fs
from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.store.base import FilePlan, finish_reading
from flowstone.store.local import LocalStore

MEMORY = Path("/dev/shm")


def _is_memory() -> bool:
    if not MEMORY.is_dir():
        return False
    fd = os.open(MEMORY, os.O_RDONLY)
    try:
        return _native.is_byte_addressable(fd)
    finally:
        os.close(fd)


pytestmark = pytest.mark.skipif(not _is_memory(), reason="/dev/shm is in no memory here")


class TestDirectoryInMemory(StoreContract):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        above = Path(mkdtemp(prefix="flowstone-test-", dir=MEMORY))
        yield above / "runs" / "gpt"
        shutil.rmtree(above)

    def open_store(self, root: Path) -> LocalStore:
        return LocalStore(root)

    @pytest.mark.parametrize("reserved", [True, False])
    def test_no_request_is_made_and_no_block_taken(
        self, store: LocalStore, arena: _native.Arena, reserved: bool
    ) -> None:
        source = random_bytes(5 * MIB + 3)
        writing = store.write(
            [FilePlan("segment", 6 * MIB)], write_rows([0], [4097], [source]), arena, reserved=reserved
        )
        receipt = writing.receipt()
        assert receipt.error is None
        assert receipt.io.requests == 0 if reserved else receipt.io.requests <= 1
        assert store.read("segment", offset=4097, length=source.nbytes) == source.tobytes()
        assert store.read("segment", length=4097) == bytes(4097)

    @pytest.mark.parametrize(("engine", "is_direct"), [(None, True), (EngineOptions(read_in_place=False), False)])
    def test_a_load_is_one_copy_unless_told_otherwise(
        self, root: Path, arena: _native.Arena, engine: EngineOptions | None, is_direct: bool
    ) -> None:
        store = LocalStore(root, engine)
        store.make_directory()
        source = random_bytes(5 * MIB)
        target = np.zeros_like(source)
        phase = target.ctypes.data % 4096
        receipt = store.write([FilePlan("segment", 6 * MIB)], write_rows([0], [phase], [source]), arena).receipt()
        rows = read_rows([0], [phase], [target], receipt.digests)
        actual = finish_reading(store.read_extents(["segment"], rows, arena, wanted_bytes=source.nbytes))
        store.close()
        assert actual.error is None
        assert (actual.direct_bytes > 4 * MIB) == is_direct
        assert (actual.direct_bytes == 0) != is_direct
        np.testing.assert_array_equal(source, target)

    def test_saves_and_loads(self, root: Path) -> None:
        state = {"x": np.arange(300_000), "y": np.ones(7)}
        with fs.Checkpointer(root) as checkpointer:
            for step in (1, 2, 3):
                state["x"] += step
                checkpointer.save(step, state).committed.result()
            expected = state["x"].copy()
            state["x"][:] = 0
            assert checkpointer.load(state).step == 3
        assert (np.asarray(state["x"]) == expected).all()
        assert fs.open(root).verify().sound
