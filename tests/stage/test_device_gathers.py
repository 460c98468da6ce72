"""A device's gather at the start of a save has memory of its own, so no save waits for arena blocks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_device_columns import LONG, trained
from test_device_memory import byte_writer

import flowstone as fs
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        device.sync = False
        yield device


def small(far: SimulatedDevice, count: int) -> dict[str, torch.Tensor]:
    """Tensors below 64 KiB, of ones."""
    return {f"t{index}": far.tensor(torch.ones(15_000)) for index in range(count)}


def test_prepare_makes_memory_for_as_many_saves_as_may_be_in_flight(store: Path, far: SimulatedDevice) -> None:
    state = trained(far, 3, LONG)
    with fs.Checkpointer(store, budget_bytes=64 * MIB, saves_in_flight=3) as checkpointer:
        checkpointer.prepare(state)
        made = far.native.host_allocations
        far.native.hold(True)
        saves = [checkpointer.save(number, state) for number in (1, 2, 3)]
        assert not saves[0].captured.done()
        assert far.native.host_allocations == made
        far.native.hold(False)
        for save in saves:
            save.committed.result(60).verify()


def test_what_is_gathered_may_change_before_there_is_room_for_it(store: Path, far: SimulatedDevice) -> None:
    tensors = small(far, 150)
    engine = fs.EngineOptions(request_bytes=2 * MIB, write_bytes_per_s=6 * MIB)
    with fs.Checkpointer(store, engine=engine, budget_bytes=4 * MIB) as checkpointer:
        save = checkpointer.save(1, tensors)
        assert not save.captured.done(), "9 MB at 6 MiB/s, through 4 MiB"
        for tensor in tensors.values():
            byte_writer(far, tensor, 0)
        checkpoint = save.committed.result(60)
    assert {value for name in tensors for value in checkpoint.read(name).unique().tolist()} == {1.0}


def test_a_save_begins_while_the_one_before_it_has_all_blocks(store: Path, far: SimulatedDevice) -> None:
    state = trained(far, 40, LONG) | {"small": small(far, 50)}
    engine = fs.EngineOptions(request_bytes=2 * MIB)
    with fs.Checkpointer(store, engine=engine, budget_bytes=4 * MIB, saves_in_flight=3) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.hold(True)
        stands_still = threading.Timer(60, far.native.hold, [False])
        stands_still.start()
        first = checkpointer.save(2, state)
        while checkpointer._saves.captures.arena.free_bytes:  # type: ignore[attr-defined]
            pass
        second = checkpointer.save(3, state)
        assert not first.captured.done()
        assert stands_still.is_alive()
        stands_still.cancel()
        far.native.hold(False)
        for save in (first, second):
            save.committed.result(60).verify()
