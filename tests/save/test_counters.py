"""Version counters: in-place changes between `save` and the capture are detected, even of few elements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flowstone as fs
from lagging_loops import MIB, WIDTH, backward, failure, network, training, waiting
from simulated_device import SimulatedDevice, visible_device

Model = nn.Sequential
Move = Callable[[Model, torch.optim.Optimizer], None]


@torch.no_grad()
def dead_row(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """One neuron is given another chance: its weights, and what the optimizer knows of it."""
    weight = model[2].weight
    weight[77].normal_()
    for slot in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][slot][77].zero_()


@torch.no_grad()
def renormalised(model: Model, _: torch.optim.Optimizer) -> None:
    """As nn.functional.embedding(max_norm=) does in the forward."""
    nn.functional.embedding(torch.arange(3), model[2].weight, max_norm=1e-3)


@torch.no_grad()
def one_element(model: Model, _: torch.optim.Optimizer) -> None:
    model[2].weight[200, 100] += 1


def loaded(model: Model, _: torch.optim.Optimizer) -> None:
    model[2].load_state_dict({key: value.clone() for key, value in model[2].state_dict().items()})


def initialised(model: Model, _: torch.optim.Optimizer) -> None:
    nn.init.eye_(model[2].weight)


@torch.no_grad()
def clamped(model: Model, _: torch.optim.Optimizer) -> None:
    model[2].weight.clamp_(-1e-3, 1e-3)


@torch.no_grad()
def detached(model: Model, _: torch.optim.Optimizer) -> None:
    model.state_dict()["2.weight"][3, 4] = 5


MOVES: dict[str, tuple[Move, set[str]]] = {
    "dead row": (
        dead_row, {"model.2.weight", *(f"optimizer.state.model.2.weight.{slot}" for slot in ("exp_avg", "exp_avg_sq"))}
    ),
    "renormalised": (renormalised, {"model.2.weight"}),
    "one element": (one_element, {"model.2.weight"}),
    "loaded": (loaded, {"model.2.weight"}),
    "initialised": (initialised, {"model.2.weight"}),
    "clamped": (clamped, {"model.2.weight"}),
    "through state_dict": (detached, {"model.2.weight"}),
}


@pytest.mark.parametrize("move", MOVES)
def test_few_elements_that_change_between_save_and_capture_fail_that_save_by_name(tmp_path: Path, move: str) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    change, names = MOVES[move]
    with waiting(tmp_path) as checkpointer:
        assert failure(checkpointer.save(1, state)) is None
        save = checkpointer.save(2, state)
        change(model, optimizer)
        error = failure(save)
        assert isinstance(error, fs.StateChangedError)
        assert set(error.names) == names
        assert fs.open(tmp_path).step == 1
        kept = model[2].weight.clone()
        save = checkpointer.save(3, state)
        optimizer.step()
        assert failure(save) is None
    assert torch.equal(fs.open(tmp_path).read("model.2.weight"), kept)


def test_a_change_is_told_before_anybody_hears_that_all_is_captured(tmp_path: Path) -> None:
    """Else a change after that, which is allowed, could not be told from one before."""
    model, optimizer = training()
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        save.captured.result(60)
        one_element(model, optimizer)
        assert failure(save) is None


def test_who_calls_the_fence_by_hand_is_watched_likewise(tmp_path: Path) -> None:
    plain = torch.zeros(MIB)
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"plain": plain}, fence="manual")
        plain[5] = 1
        error = failure(save)
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("plain",)
        save = checkpointer.save(2, {"plain": plain}, fence="manual")
        checkpointer.fence()
        plain[5] = 2
        assert failure(save) is None
    assert fs.open(tmp_path).read("plain")[5] == 1


def test_forward_and_backward_count_nothing(tmp_path: Path) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    with waiting(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            save = checkpointer.save(step, state)
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.train().requires_grad_()
            assert not save.captured.done()
            optimizer.step()
            optimizer.zero_grad()
            assert failure(save) is None


def test_a_write_beside_a_parameter_in_its_storage_is_no_change_of_it(tmp_path: Path) -> None:
    """Parameter and gradient in one buffer share a counter, which every backward moves."""
    buffer = torch.zeros(2, MIB)
    weight = nn.Parameter(buffer[0])
    weight.grad = buffer[1]
    model = nn.ParameterList([weight])
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        counted = weight._version
        (2 * weight.sum()).backward()
        buffer[1].add_(1)
        assert weight._version > counted
        assert failure(save) is None


def test_a_write_into_what_shares_a_storage_with_nothing_but_the_state_is_a_change(tmp_path: Path) -> None:
    flat = torch.zeros(3 * MIB)
    model = nn.ParameterList([nn.Parameter(part) for part in flat.split(MIB)])
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, state)
        flat[7] = 1
        error = failure(save)
    assert isinstance(error, fs.StateChangedError)
    assert "model.0" in error.names


def test_tied_weights_are_watched_under_each_of_their_names(tmp_path: Path) -> None:
    """A second tensor over the same memory may count for itself."""
    model, optimizer = training()
    other = nn.Linear(WIDTH, WIDTH)
    other.weight.data = model[2].weight.data
    assert other.weight is not model[2].weight
    optimizer.add_param_group({"params": other.parameters()})
    with waiting(tmp_path) as checkpointer:
        state = {"model": model, "other": other, "optimizer": optimizer}
        save = checkpointer.save(1, state)
        with torch.no_grad():
            other.weight[9, 9] = 1
        error = failure(save)
    assert isinstance(error, fs.StateChangedError)
    assert error.names == ("model.2.weight",)


def test_what_counts_nothing_is_saved_all_the_same(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = network()
    other, optimizer = training()
    with waiting(tmp_path) as checkpointer:
        state = {"frozen": model, "model": other, "optimizer": optimizer}
        assert failure(checkpointer.save(1, state)) is None
        assert failure(checkpointer.save(2, state, fence="manual")) is None


def test_of_many_that_changed_the_error_shows_some_and_has_all(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(128, 128) for _ in range(40))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        error = failure(save)
    assert isinstance(error, fs.StateChangedError)
    assert set(error.names) == {f"model.{index}.weight" for index in range(40)}
    assert "and 20 more changed before they were captured" in str(error)


def test_a_step_that_the_fence_has_let_go_on_the_device_is_no_change(tmp_path: Path) -> None:
    """There the fence lets go when copies are queued, long before the capture is over."""
    with visible_device(SimulatedDevice(64 * MIB)) as far:
        model, optimizer = training()
        far.take(model)
        far.sync = False
        state = {"model": model, "optimizer": optimizer}
        engine = fs.EngineOptions(request_bytes=2 * MIB)
        with fs.Checkpointer(tmp_path, engine=engine, budget_bytes=32 * MIB, on_error="continue") as checkpointer:
            checkpointer.save(1, state).committed.result(60)
            for step, early in ((2, False), (3, True)):
                far.native.hold(True)
                save = checkpointer.save(step, state)
                if early:
                    one_element(model, optimizer)
                checkpointer.fence()
                assert not save.captured.done()
                one_element(model, optimizer)
                far.native.hold(False)
                error = failure(save)
                assert (type(error) is fs.StateChangedError) == early, error


def test_nothing_is_kept_once_it_is_captured(tmp_path: Path) -> None:
    model, optimizer = training()
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"model": model, "optimizer": optimizer})
        weight = model[2].weight
        held = sys.getrefcount(weight)
        save.committed.result(60)
        checkpointer.wait()
        assert sys.getrefcount(weight) < held
