"""A device's digests when a save begins: any byte that changes before its capture fails that save."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.config import Watch
from flowstone.events.phases import Captured, Event
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20
LENGTH = 3 * MIB + 100  # its last chunk is one that the host digests


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        device.sync = False
        yield device


def opened(path: Path, watch: Watch, **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 64 * MIB, **options})  # type: ignore[arg-type]


def made(far: SimulatedDevice, size: int = LENGTH) -> torch.Tensor:
    return far.tensor(torch.arange(size, dtype=torch.int64).mul_(2654435761).to(torch.uint8))


def changed_at(
    far: SimulatedDevice, checkpointer: fs.Checkpointer, step: int, tensor: torch.Tensor, place: int | None
) -> fs.Save:
    """A save of the tensor of which, once it has begun and before any copy, one byte has changed."""
    far.native.hold(True)
    save = checkpointer.save(step, {"x": tensor}, fence="manual")
    far.native.settle()
    if place is not None:
        tensor.data[place] += 1  # moves no version counter
    far.native.hold(False)
    return save


PLACES = [0, 1, 15, 64, 1023, 1024, MIB - 1, MIB, 2 * MIB - 64, 3 * MIB - 1, 3 * MIB + 50]


@pytest.mark.parametrize("watch", ["digests", "exact"])
def test_a_write_of_one_byte_is_found_wherever_it_is(store: Path, far: SimulatedDevice, watch: Watch) -> None:
    tensor = made(far)
    with opened(store, watch, on_error="continue", max_unsaved_steps=None) as checkpointer:
        for step, place in enumerate(PLACES, 1):
            error = changed_at(far, checkpointer, step, tensor, place).committed.exception(60)
            assert isinstance(error, fs.StateChangedError), place
            assert error.names == ("x",)
        checkpoint = changed_at(far, checkpointer, 100, tensor, None).committed.result(60)
        assert torch.equal(checkpoint.read("x"), tensor)


def test_samples_miss_almost_every_such_write(store: Path, far: SimulatedDevice) -> None:
    tensor = made(far)
    with opened(store, "auto", on_error="continue", max_unsaved_steps=None) as checkpointer:
        missed = [
            changed_at(far, checkpointer, step, tensor, place).committed.exception(60) is None
            for step, place in enumerate(PLACES, 1)
        ]
    assert sum(missed) >= len(PLACES) - 2


@pytest.mark.parametrize("skew", [0, 1, 6, 8])
def test_rows_of_any_place_and_length_raise_no_alarm_and_are_found_by_their_name(
    store: Path, far: SimulatedDevice, skew: int
) -> None:
    chance = random.Random(skew)
    lengths = [64 * 1024, 64 * 1024 + 1, MIB - 1, MIB, MIB + 1, MIB + 240, MIB + 241, 2 * MIB + 999]
    state = {f"x{size}": made(far, size + skew)[skew:] for size in lengths} | {"empty": made(far, 16)[:0]}
    with opened(store, "digests", on_error="continue", max_unsaved_steps=None) as checkpointer:
        for step in range(1, 13):
            name = chance.choice([*state][:-1]) if step % 3 else None
            far.native.hold(True)
            save = checkpointer.save(step, state, fence="manual")
            far.native.settle()
            if name is not None:
                state[name].data[chance.randrange(len(state[name]))] ^= 1 << chance.randrange(8)
            far.native.hold(False)
            error = save.committed.exception(60)
            if name is None:
                assert error is None
                save.committed.result().verify()
            else:
                assert isinstance(error, fs.StateChangedError)
                assert error.names == (name,)


def test_what_was_digested_counts_as_watched_exactly(store: Path, far: SimulatedDevice) -> None:
    seen: list[Event] = []
    with opened(store, "digests", on_event=seen.append) as checkpointer:
        io = changed_at(far, checkpointer, 1, made(far), None).committed.result(60).manifest.io
    (captured,) = (event for event in seen if isinstance(event, Captured))
    assert (captured.exact_bytes, captured.sampled_bytes) == (io.exact_bytes, io.sampled_bytes) == (LENGTH, 0)


def test_the_same_change_on_the_stream_after_the_copies_is_none(store: Path, far: SimulatedDevice) -> None:
    tensor = made(far)
    with opened(store, "digests") as checkpointer:
        checkpointer.save(1, {"x": tensor}, fence="manual").committed.result(60)
        before = tensor.clone()
        far.native.hold(True)
        save = checkpointer.save(2, {"x": tensor}, fence="manual")
        checkpointer.fence()
        far.native.write(far.native.current, tensor.data_ptr(), len(tensor), 7)
        far.native.hold(False)
        assert torch.equal(save.committed.result(60).read("x"), before)


def test_a_device_without_pinned_memory_is_sampled_or_refused_by_name(tmp_path: Path, far: SimulatedDevice) -> None:
    tensor = made(far)
    far.native.limit_pinned(0)
    with opened(tmp_path / "digests", "digests") as checkpointer:
        io = checkpointer.save(1, {"x": tensor}, fence="manual").committed.result(60).manifest.io
        assert (io.exact_bytes, io.sampled_bytes, io.sampled_because) == (0, LENGTH, "on a device")
    if _native.written_pages_refusal():
        return  # "exact" works nowhere here
    with opened(tmp_path / "exact", "exact") as checkpointer:
        with pytest.raises(fs.UnsupportedStateError, match="x cannot be watched for every write") as caught:
            checkpointer.save(1, {"x": tensor}, fence="manual")
        assert "on a device" in str(caught.value)
        assert checkpointer.latest() is None


def test_a_device_that_has_no_memory_left_digests_too(store: Path, far: SimulatedDevice) -> None:
    state = {"x": made(far), "small": made(far, 100)}
    with opened(store, "digests", saves_in_flight=1) as checkpointer:
        checkpointer.prepare(state)
        allocations = far.native.host_allocations
        far.native.fill(True)
        for step in range(1, 4):
            checkpoint = checkpointer.save(step, state, fence="manual").committed.result(60)
            assert checkpoint.manifest.io.sampled_bytes == 0
        assert far.native.host_allocations == allocations, "prepare has made the memory for digests"
        far.native.fill(False)


def test_a_stream_that_records_a_graph_is_refused(store: Path, far: SimulatedDevice) -> None:
    tensor = made(far)
    with opened(store, "digests") as checkpointer:
        checkpointer.save(1, {"x": tensor}, fence="manual").committed.result(60)
        far.native.begin_capture(far.native.current)
        with pytest.raises(fs.StateError, match="cannot save inside of a CUDA graph capture"):
            checkpointer.save(2, {"x": tensor}, fence="manual")
        assert far.native.end_capture(far.native.current)


def test_a_device_that_fails_before_its_digests_are_made_fails_the_save_by_its_name(
    store: Path, far: SimulatedDevice
) -> None:
    tensor = made(far)
    with opened(store, "digests", on_error="continue") as checkpointer:
        checkpointer.save(1, {"x": tensor}, fence="manual").committed.result(60)
        far.native.fail_after(0)
        error = checkpointer.save(2, {"x": tensor}, fence="manual").committed.exception(60)
        assert isinstance(error, fs.StorageError)
        assert "copy from or to delayed:0" in str(error)


def test_digests_keep_their_device() -> None:
    far = SimulatedDevice(4 * MIB)
    content = torch.arange(2 * MIB, dtype=torch.int64).to(torch.uint8)
    far.tensor(content)
    digested = far.digest(np.array([far.native.address], np.uint64), np.array([content.numel()], np.uint64))
    assert digested is not None
    far.native.settle()
    del far
    gc.collect()
    assert digested.digests()[1] == _native.xxh3_64(content.numpy()[MIB:].tobytes())
