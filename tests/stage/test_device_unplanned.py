"""The device memory that a save without a plan copies before it returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flowstone as fs
from flowstone.config import COPIED_PART_BYTES, MIB
from flowstone.save.pending_plan import copy_until_planned
from flowstone.save.replica_samples import sample_replicas
from flowstone.stage import early_snapshot
from flowstone.stage.bounce import host_array
from flowstone.state import StateDescription, describe
from flowstone.torch import device_memory
from flowstone.torch.device_memory import host_copy
from flowstone.torch.tensors import memory_of
from simulated_device import SimulatedDevice, visible_device


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        device.sync = False
        yield device


def values(described: StateDescription) -> dict[str, bytes]:
    """What would be captured now."""
    pieces, places = described.pieces, described.places
    return {piece.name: host_array(places.memory(index, piece)).tobytes() for index, piece in enumerate(pieces)}


def taken(state: dict[str, torch.Tensor]) -> StateDescription:
    described = describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    pending = copy_until_planned(1, described, samples, fence="auto", watch="auto", room_bytes=1 << 30)
    assert pending.early_bytes == sum(tensor.nbytes for tensor in state.values())
    for tensor in state.values():
        tensor.data.zero_()
    return pending.take()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_small_tensors_are_gathered_at_once_and_not_copied_one_by_one(far: SimulatedDevice) -> None:
    state = {str(index): far.tensor(numbers(index * 7)) for index in range(1, 40)}
    state["turned"] = far.tensor(numbers(30, 50)).t()
    state |= {"on the host": numbers(77), "none": far.tensor(numbers(30))[30:]}
    expected = {name: tensor.clone().contiguous().numpy().tobytes() for name, tensor in state.items()}
    described = describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    samples.wait_digests()
    launches, copies = far.native.launches, far.native.copies
    with mock.patch.object(device_memory, "host_copy", side_effect=AssertionError("copied by torch")):
        pending = copy_until_planned(1, described, samples, fence="auto", watch="auto", room_bytes=1 << 30)
    assert far.native.launches == launches + 2, "one for runs of memory, and one for what is strided"
    assert far.native.copies == copies
    for tensor in state.values():
        tensor.data.zero_()
    for _ in range(3):  # the device gathers into the same memory again
        sample_replicas(2, described, None, digests=False).sampled[1].wait_digests()
    held = pending.take()
    assert not held.places.devices
    assert values(held) == expected


def test_long_ones_are_copied_and_gathers_have_an_end(far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_snapshot, "GATHERED_BYTES_MAX", 1000)
    state = {"long": far.tensor(numbers(100_000)), "long and turned": far.tensor(numbers(300, 400)).t()}
    state |= {f"short {index}": far.tensor(numbers(100 + index)) for index in range(5)}
    expected = {name: tensor.clone().contiguous().numpy().tobytes() for name, tensor in state.items()}
    assert values(taken(state)) == expected


def test_where_the_driver_refuses_the_kernel_small_strided_tensors_are_copied_by_torch() -> None:
    with visible_device(SimulatedDevice(8 * MIB, refuses_kernels=True)) as far:
        state = {"turned": far.tensor(numbers(30, 50)).t(), "dense": far.tensor(numbers(55)), "none": numbers(0)}
        expected = {name: tensor.clone().contiguous().numpy().tobytes() for name, tensor in state.items()}
        assert values(taken(state)) == expected


def test_a_device_that_fails_is_named_and_its_memory_is_not_said_to_have_gone_away(
    far: SimulatedDevice, tmp_path: Path
) -> None:
    state = {"small": far.tensor(numbers(300)), "long": far.tensor(numbers(100_000))}
    described = describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    pending = copy_until_planned(1, described, samples, fence="auto", watch="auto", room_bytes=2000)
    with fs.Checkpointer(tmp_path / "run", budget_bytes=32 * MIB, on_error="continue") as checkpointer:
        far.native.fail_after(0)
        assert checkpointer.save(1, {"x": far.tensor(numbers(MIB))}).committed.exception(60) is not None
    for ask in (pending.take, samples.wait_digests):
        with pytest.raises(fs.StorageError, match="the GPU driver refuses to copy"):
            ask()


class Copies(TorchDispatchMode):
    """The sizes of what is copied, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].nbytes)
            assert args[0].is_contiguous()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("turn", [lambda value: value.t(), lambda value: value[None, None, :, 1:], lambda x: x[:1]])
def test_torch_copies_strided_memory_in_parts_that_take_as_much_of_the_device(turn: object) -> None:
    tensor = turn(torch.arange(10_000_000, dtype=torch.int64).view(2000, 5000))  # type: ignore[operator]
    with Copies() as copies:
        value = host_copy(memory_of(tensor))
    assert np.array_equal(host_array(value), tensor.numpy())
    assert sum(copies.sizes) == tensor.nbytes
    assert max(copies.sizes) <= COPIED_PART_BYTES
    assert len(copies.sizes) == (8 if tensor.nbytes > COPIED_PART_BYTES else 1)
