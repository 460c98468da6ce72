"""Derived tensors on a device: the device's digests recognise them, and they are not copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.config import Watch
from forge import content, stored_bytes
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20
Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB)) as device:
        device.sync = False
        yield device


def opened(path: Path, watch: Watch = "digests", **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch, compress="derived")
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 64 * MIB, **options})  # type: ignore[arg-type]


def masters() -> Tensors:
    """Of one chunk, of several, and with an end below the half of one."""
    torch.manual_seed(5)
    return {"wide": torch.randn(1100, 700), "small": torch.randn(200, 200), "odd": torch.randn(262_145 * 3)}


def sections(far: SimulatedDevice) -> State:
    """All on the device: masters, an average that is equal yet, and working copies in two types."""
    master = masters()
    made = {
        "master": master, "average": {name: tensor.clone() for name, tensor in master.items()},
        "model": {name: tensor.bfloat16() for name, tensor in master.items()},
        "half": {name: tensor.half() for name, tensor in master.items()},
    }
    return {section: {name: far.tensor(tensor) for name, tensor in of.items()} for section, of in made.items()}


def size(*of: Tensors) -> int:
    return sum(tensor.nbytes for tensors in of for tensor in tensors.values())


def saved(far: SimulatedDevice, checkpointer: fs.Checkpointer, step: int, state: State) -> tuple[fs.Checkpoint, int]:
    """The checkpoint, and how many bytes came from the device."""
    copied = far.native.copied_bytes
    checkpoint = checkpointer.save(step, state, fence="manual").committed.result(60)
    return checkpoint, far.native.copied_bytes - copied


def is_stored(checkpoint: fs.Checkpoint, state: State) -> bool:
    read = {section: {name: checkpoint.read(f"{section}.{name}") for name in of} for section, of in state.items()}
    return checkpoint.verify().sound and content(read) == content(state)


@pytest.mark.parametrize("watch", ["digests", "exact"])
def test_working_copies_and_equal_tensors_on_a_device_are_not_even_copied(
    store: Path, far: SimulatedDevice, watch: Watch
) -> None:
    state = sections(far)
    with opened(store, watch) as checkpointer:
        for step in (1, 2):
            actual, copied = saved(far, checkpointer, step, state)
            assert copied == size(state["master"])
            assert actual.manifest.io.copied_bytes < size(state["master"]) + 300_000
            assert actual.manifest.io.exact_bytes == size(*state.values())
            assert is_stored(actual, state)
    assert fs.open(store).manifest.critical == ("delta", "copies", "codec.cast")


def test_without_digests_they_are_copied_and_compared_on_the_host(store: Path, far: SimulatedDevice) -> None:
    state = sections(far)
    with opened(store, "auto") as checkpointer:
        actual, copied = saved(far, checkpointer, 1, state)
        assert copied == size(*state.values())
        assert is_stored(actual, state)
    assert stored_bytes(store) < size(state["master"]) + 60_000


def test_the_files_are_the_same_whoever_compares(tmp_path: Path, far: SimulatedDevice) -> None:
    state = sections(far)
    state["model"]["wide"].view(torch.int16)[500, 3] ^= 1
    for name in ("digests", "auto"):
        with opened(tmp_path / name, name) as checkpointer:  # type: ignore[arg-type]
            saved(far, checkpointer, 1, state)
    files = [tmp_path / name / "step-00000001" for name in ("digests", "auto")]
    for name in ("rank-00000.safetensors", "index.safetensors", "objects.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()


@pytest.mark.parametrize("place", [0, 262_143, 262_144, 524_287, 524_288, 786_434])
def test_a_working_copy_that_differs_in_one_bit_is_stored_as_it_is(
    store: Path, far: SimulatedDevice, place: int
) -> None:
    state = sections(far)
    state["model"]["odd"].view(torch.int16)[place] ^= 1
    with opened(store) as checkpointer:
        actual, copied = saved(far, checkpointer, 1, state)
        assert size(state["master"]) < copied < size(*state.values())
        assert is_stored(actual, state)


def test_a_number_that_is_none_is_stored_in_whatever_half_it_is(store: Path, far: SimulatedDevice) -> None:
    state = sections(far)
    for section in state.values():
        section["odd"][[0, 300_000]] = float("nan")
    with opened(store) as checkpointer:
        actual, copied = saved(far, checkpointer, 1, state)
        assert copied > size(state["master"])
        assert is_stored(actual, state)


@pytest.mark.parametrize("which", ["master", "model", "average"])
def test_a_change_after_save_is_found_or_comes_too_late_for_what_is_left_out(
    store: Path, far: SimulatedDevice, which: str
) -> None:
    """Of a master before its copy: the save fails. Of what follows from it, what was there at `save` counts."""
    state = sections(far)
    with opened(store, on_error="continue", max_unsaved_steps=None) as checkpointer:
        saved(far, checkpointer, 1, state)
        before = {section: {name: tensor.clone() for name, tensor in of.items()} for section, of in state.items()}
        far.native.hold(True)
        save = checkpointer.save(2, state, fence="manual")
        far.native.settle()
        tensor = state[which]["odd"]
        tensor.data.view(torch.int16)[12_345] ^= 1  # moves no version counter
        far.native.hold(False)
        error = save.committed.exception(60)
        if error is None:
            assert which != "master"
            assert is_stored(fs.open(store, 2), before)
        else:
            assert which == "master"
            assert isinstance(error, fs.StateChangedError)
        assert is_stored(fs.open(store, 1), before)


def test_a_master_on_the_host_stands_for_a_working_copy_on_the_device(store: Path, far: SimulatedDevice) -> None:
    master = masters()
    state = {"model": {name: far.tensor(tensor.bfloat16()) for name, tensor in master.items()}, "master": master}
    with opened(store) as checkpointer:
        for step in (1, 2):
            far.native.hold(step == 2)  # the digests are there when the device has come to them, not before
            save = checkpointer.save(step, state, fence="manual")
            far.native.hold(False)
            assert is_stored(save.committed.result(60), state)
        assert far.native.copied_bytes == 0


def test_a_device_that_fails_before_what_is_compared_with_is_there_fails_the_save(
    store: Path, far: SimulatedDevice
) -> None:
    state = sections(far)
    with opened(store, on_error="continue") as checkpointer:
        saved(far, checkpointer, 1, state)
        far.native.fail_after(0)
        error = checkpointer.save(2, state, fence="manual").committed.exception(60)
        assert isinstance(error, fs.StorageError)
        assert "copy from or to delayed:0" in str(error)
    assert fs.open(store).step == 1
