"""Tests of derived tensors that need a GPU; `test_device_derived.py` tests them on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.config import Watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIB = 1 << 20
State = dict[str, torch.Tensor]


def mixed() -> State:
    """Masters of one chunk, of several, and with an end below the half of one; their roundings, and an equal copy."""
    torch.manual_seed(5)
    masters = {"wide": (1100, 700), "small": (200, 200), "odd": (262_145 * 3,)}
    state = {f"master.{name}": torch.randn(shape, device="cuda") for name, shape in masters.items()}
    for name in masters:
        state[f"model.{name}"] = state[f"master.{name}"].bfloat16()
        state[f"half.{name}"] = state[f"master.{name}"].half()
        state[f"average.{name}"] = state[f"master.{name}"].clone()
    return state


def opened(path: Path, watch: Watch) -> fs.Checkpointer:
    engine = fs.EngineOptions(watch=watch, compress="derived")
    return fs.Checkpointer(path, engine=engine, budget_bytes=64 * MIB, on_error="continue", max_unsaved_steps=None)


def size(state: State, section: str = "") -> int:
    return sum(tensor.nbytes for name, tensor in state.items() if name.startswith(section))


def is_stored(stored: fs.Checkpoint, state: State) -> bool:
    return stored.verify().sound and all(torch.equal(stored.read(name), tensor.cpu()) for name, tensor in state.items())


@pytest.mark.parametrize("watch", ["auto", "digests", "exact"])
def test_what_follows_comes_back_and_is_not_copied_where_the_gpu_digests(store: Path, watch: Watch) -> None:
    state = mixed()
    with opened(store, watch) as checkpointer:
        for step in (1, 2):
            checkpoint = checkpointer.save(step, state, fence="manual").committed.result(60)
            assert is_stored(checkpoint, state)
            assert checkpoint.manifest.io is not None
            if watch == "auto":
                assert checkpoint.manifest.io.copied_bytes >= size(state)
            else:
                assert checkpoint.manifest.io.copied_bytes < size(state, "master") + MIB


@pytest.mark.parametrize("place", [0, 262_144, 524_287, 786_434])
def test_a_working_copy_that_differs_in_one_bit_is_stored_as_it_is(store: Path, place: int) -> None:
    state = mixed()
    state["model.odd"].view(torch.int16)[place] ^= 1
    state["half.wide"].view(torch.int16)[place % 1100, 5] ^= 1
    with opened(store, "digests") as checkpointer:
        assert is_stored(checkpointer.save(1, state, fence="manual").committed.result(60), state)


@pytest.mark.parametrize("name", ["master.odd", "model.odd", "average.odd"])
def test_a_change_that_comes_from_another_stream_is_found_or_what_was_there_at_save_is_stored(
    store: Path, name: str
) -> None:
    state, side = mixed(), torch.cuda.Stream()
    with opened(store, "digests") as checkpointer:
        for step in range(1, 8):
            torch.cuda.synchronize()
            before = {name: tensor.clone() for name, tensor in state.items()}
            save = checkpointer.save(step, state, fence="manual")
            torch.cuda.current_stream().synchronize()  # the digests are there
            with torch.cuda.stream(side):
                state[name].data.view(torch.int16)[-1] += 1
            error = save.committed.exception(60)
            if error is None:
                assert is_stored(fs.open(store, step), before)
            else:
                assert isinstance(error, fs.StateChangedError)
            side.synchronize()
