"""`prepare`: staging memory that is touched and pinned before the first save."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.events.phases import Event
from flowstone.events.rare_events import Prepared
from flowstone.save.preparing import staging_bytes
from flowstone.save.saves import Saves
from flowstone.stage import numa
from flowstone.state import describe
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        yield device


def arena_of(checkpointer: fs.Checkpointer) -> _native.Arena:
    saves = checkpointer._saves
    assert isinstance(saves, Saves)
    return saves.captures.arena


def training() -> dict[str, object]:
    """40 MB: parameters, and slots of an optimizer that has stepped."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1250) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 0}


def opened(path: Path, **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB)
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 64 * MIB, **options})  # type: ignore[arg-type]


def test_the_first_save_after_prepare_touches_no_memory(store: Path) -> None:
    state = training()
    with opened(store) as checkpointer:
        arena = arena_of(checkpointer)
        assert arena.touched_bytes == 0
        restoration = checkpointer.prepare(state)
        ready = arena.touched_bytes
        assert ready == restoration.bytes
        assert 40 * MIB >= ready > 38 * MIB
        save = checkpointer.save(1, state)
        checkpointer.fence()
        files = save.committed.result()
        assert ready >= sum(row.bytes for row in files.manifest.segments)
        checkpointer.wait()
        assert arena.touched_bytes == ready
    assert list(store.iterdir())


def test_prepare_stays_within_the_budget_and_writes_no_file(store: Path) -> None:
    with opened(store, budget_bytes=32 * MIB) as checkpointer:
        assert checkpointer.prepare(training()).bytes == 32 * MIB
        assert not list(store.glob("*step*"))
        assert checkpointer.latest() is None


def test_prepare_again_grows_by_what_has_come(store: Path) -> None:
    with opened(store) as checkpointer:
        first = checkpointer.prepare({"x": torch.zeros(5 * MIB)})
        assert checkpointer.prepare({"x": torch.zeros(MIB)}).bytes == first.bytes
        assert checkpointer.prepare({"x": torch.zeros(10 * MIB)}).bytes > first.bytes


def test_what_all_ranks_hold_is_counted_once() -> None:
    layout = describe({"x": torch.zeros(64 * MIB // 4), "y": fs.Shard(torch.zeros(MIB), (2 * MIB,), (0,))}).layout
    alone, eighth = staging_bytes(layout, 1), staging_bytes(layout, 8)
    assert 70 * MIB > alone > 68 * MIB
    assert alone - eighth == (64 * MIB + 4096) * 7 // 8


def test_for_a_device_the_arena_is_pinned_by_slabs_and_never_beside_copies(store: Path, far: SimulatedDevice) -> None:
    state = {"x": far.tensor(torch.arange(10 * MIB, dtype=torch.float32))}
    events: list[Event] = []
    with opened(store, on_event=events.append) as checkpointer:
        ready = checkpointer.prepare(state)
        assert ready.pinned_bytes == ready.bytes == far.native.pinned_bytes
        assert far.native.pins == 1
        checkpointer.save(1, state).committed.result().verify()
        checkpointer.wait()
    assert (far.native.pins_beside_copies, far.native.pinned_bytes) == (0, 0)
    assert [event for event in events if isinstance(event, Prepared)] == [ready]


def test_a_save_that_nothing_was_prepared_for_tells_what_it_did(store: Path, far: SimulatedDevice) -> None:
    state = {"x": far.tensor(torch.ones(10 * MIB))}
    events: list[Event] = []
    with opened(store, on_event=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result()
            checkpointer.wait()
        (ready,) = (event for event in events if isinstance(event, Prepared))
    assert ready.pinned_bytes == ready.bytes > 0
    assert ready.seconds == 0.0
    assert far.native.pins < 10 * MIB * 4 // (2 * MIB), "not block by block"


def test_what_cannot_be_pinned_is_logged_once_and_told(
    store: Path, far: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    far.native.limit_pinned(8 * MIB)
    state = {"x": far.tensor(torch.arange(10 * MIB, dtype=torch.float32))}
    with caplog.at_level(logging.WARNING), opened(store) as checkpointer:
        for _ in range(2):
            ready = checkpointer.prepare(state)
        tensor = checkpointer.save(1, state).committed.result().read("x")
        checkpointer.wait()
    assert ready.pinned_bytes == 8 * MIB
    assert ready.unpinned_reason == "delayed:0 refuses to pin host memory: CUDA_ERROR_OUT_OF_MEMORY"
    assert [record.getMessage().count("not pinned") for record in caplog.records] == [1]
    assert torch.equal(tensor, state["x"])


def test_memory_is_asked_for_on_the_devices_node(store: Path, far: SimulatedDevice, tmp_path: Path) -> None:
    _, why = numa.node_of("0000:3b:00.0", tmp_path)
    assert why.startswith("the system does not report the NUMA node of 0000:3b:00.0: ")
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("-1\n")
    assert numa.node_of("0000:3b:00.0", tmp_path) == (-1, "the system knows no NUMA node of 0000:3b:00.0")
    assert numa.node_of("", tmp_path)[0] == -1
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("0\n")
    assert numa.node_of("0000:3b:00.0", tmp_path) == (0, "")
    asked: list[str] = []

    def node_of(address: str) -> tuple[int, str]:
        asked.append(address)
        return numa.node_of(address, tmp_path)

    with mock.patch("flowstone.save.preparing.node_of", node_of), opened(store) as checkpointer:
        refused = arena_of(checkpointer).place(0)
        ready = checkpointer.prepare({"x": far.tensor(torch.ones(MIB))})
        if not refused:
            policies = Path("/proc/self/numa_maps").read_text()
            assert "prefer:0" in policies or "prefer=" in policies
    assert asked == ["0000:3b:00.0"]
    assert (ready.numa_node, bool(ready.numa_node_reason)) == ((-1, True) if refused else (0, False))


def test_a_step_is_no_state(store: Path) -> None:
    with opened(store) as checkpointer, pytest.raises(fs.ArgumentError, match="without a step"):
        checkpointer.prepare(5)  # type: ignore[arg-type]
