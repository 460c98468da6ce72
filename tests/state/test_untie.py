"""Entries of state dicts that share memory, but are stored with different values: each gets its own tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resumes import Case, outcome
from torch.distributed.checkpoint.api import CheckpointException

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter

Dicts = dict[str, Any]


def through_state_dicts(store: Path, saved: Dicts, target: Dicts) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save_state_dict(1, saved)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load_state_dict(target)


def through_states(store: Path, saved: Dicts, target: Dicts) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, saved)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(target)


def through_dcp(store: Path, saved: Dicts, target: Dicts) -> None:
    dcp.save(saved, storage_writer=FlowstoneWriter(store), no_dist=True)
    dcp.load(target, storage_reader=FlowstoneReader(store), no_dist=True)


FLOWS = (through_state_dicts, through_states, through_dcp)
REFUSALS = (fs.MismatchError, CheckpointException)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(params=FLOWS)
def load(request: pytest.FixtureRequest, store: Path) -> Callable[[Dicts, Dicts], None]:
    """Saves the first state, and loads the second."""
    return lambda saved, target: request.param(store, saved, target)


def values(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor(number) for number in numbers]


@pytest.mark.parametrize("flow", ["numbered", "objects into dicts", "named", "flattened", "DCP", "DCP staged"])
def test_a_new_sequential_scheduler_of_tensors_takes_the_rates_of_one_that_has_moved_on(
    tmp_path: Path, flow: str
) -> None:
    assert outcome(Case("SGD tensor lr", "SequentialLR", "plain", flow, live=False), tmp_path / "run") == "equal"


def test_one_list_at_two_places_becomes_two_where_its_values_differ(load: Callable[[Dicts, Dicts], None]) -> None:
    shared = values(0.0, 0.0)
    target: Dicts = {"s": {"n": 0, "last": shared, "inner": [{"n": 0, "last": shared}]}}
    load({"s": {"n": 1, "last": values(1.0, 2.0), "inner": [{"n": 2, "last": values(3.0, 2.0)}]}}, target)
    assert target == {"s": {"n": 1, "last": values(1.0, 2.0), "inner": [{"n": 2, "last": values(3.0, 2.0)}]}}


def test_what_is_stored_equal_stays_one(load: Callable[[Dicts, Dicts], None]) -> None:
    tensor, other = torch.zeros(3), torch.ones(3)
    target: Dicts = {"s": {"n": 0, "a": [tensor], "b": [tensor], "c": [tensor], "d": [tensor]}}
    load({"s": {"n": 1, "a": [torch.ones(3)], "b": [torch.ones(3)], "c": [other * 2], "d": [other * 3]}}, target)
    assert target["s"]["a"][0] is target["s"]["b"][0] is tensor
    assert [target["s"][key][0].tolist() for key in "abcd"] == [[n] * 3 for n in (1.0, 1.0, 2.0, 3.0)]


@pytest.mark.parametrize("load", [through_state_dicts, through_states])  # DCP stores each
def test_what_is_stored_as_one_becomes_one(store: Path, load: Callable[[Path, Dicts, Dicts], None]) -> None:
    tensor, stored = torch.zeros(3), torch.ones(3)
    target: Dicts = {"s": {"n": 0, "a": [tensor], "b": [tensor], "c": [tensor]}}
    load(store, {"s": {"n": 1, "a": [torch.zeros(3) + 5], "b": [stored], "c": [stored]}}, target)
    assert target["s"]["b"][0] is target["s"]["c"][0]
    assert (target["s"]["a"][0].tolist(), target["s"]["b"][0].tolist()) == ([5.0] * 3, [1.0] * 3)


def test_a_list_keeps_its_values_where_another_place_of_it_gets_others(load: Callable[[Dicts, Dicts], None]) -> None:
    tensor = torch.zeros(2)
    shared = [tensor]
    target: Dicts = {"s": {"n": 0, "a": [tensor], "b": shared, "c": shared}}
    load({"s": {"n": 1, "a": [torch.ones(2)], "b": [torch.ones(2) * 2], "c": [torch.ones(2)]}}, target)
    assert [target["s"][key][0].tolist() for key in "abc"] == [[1.0] * 2, [2.0] * 2, [1.0] * 2]


def test_strided_entries_and_tuples_are_replaced(load: Callable[[Dicts, Dicts], None]) -> None:
    entry = torch.zeros(4, 4).t()
    target: Dicts = {"s": {"n": 0, "a": (entry, 1), "b": (entry, 1)}}
    load({"s": {"n": 1, "a": (torch.eye(4), 2), "b": (torch.arange(16.0).view(4, 4), 3)}}, target)
    assert torch.equal(target["s"]["a"][0], torch.eye(4))
    assert torch.equal(target["s"]["b"][0], torch.arange(16.0).view(4, 4))
    assert (target["s"]["a"][1], target["s"]["b"][1]) == (2, 3)


def test_one_dict_in_two_sections_becomes_two(load: Callable[[Dicts, Dicts], None]) -> None:
    shared = {"n": 0, "last": torch.zeros(2)}
    target: Dicts = {"a": shared, "b": shared, "model": torch.nn.Linear(2, 2).state_dict()}
    saved = {**target, "a": {"n": 1, "last": torch.ones(2)}, "b": {"n": 1, "last": torch.ones(2) * 2}}
    load(saved, target)
    assert [target[key]["last"].tolist() for key in "ab"] == [[1.0] * 2, [2.0] * 2]
    assert [target[key]["n"] for key in "ab"] == [1, 1]


@pytest.mark.parametrize("load", [through_state_dicts, through_states])  # DCP itself sets one value in both
def test_a_list_with_other_values_beside_its_tensors_becomes_two(
    store: Path, load: Callable[[Path, Dicts, Dicts], None]
) -> None:
    shared: list[object] = [torch.zeros(2), 0.0, {"n": 0}]
    target: Dicts = {"s": {"n": 0, "a": shared, "b": (shared,)}, "c": shared}
    saved = {"s": {"n": 1, "a": [torch.ones(2), 0.1, {"n": 1}], "b": ([torch.ones(2), 0.2, {"n": 2}],)},
             "c": [torch.ones(2) * 3, 0.3, {"n": 3}]}
    load(store, saved, target)
    actual = target["s"]["a"], target["s"]["b"][0], target["c"]
    assert actual[0] is shared
    assert [entry[0].tolist() for entry in actual] == [[1.0] * 2, [1.0] * 2, [3.0] * 2]
    assert [entry[1:] for entry in actual] == [[0.1, {"n": 1}], [0.2, {"n": 2}], [0.3, {"n": 3}]]


def _tied_weights(model: Dicts, tensor: torch.Tensor) -> Dicts:
    return {"model": {**model, "tied": tensor}}


def _beside_a_model(model: Dicts, tensor: torch.Tensor) -> Dicts:
    return {"model": model, "s": {"n": 0, "last": [tensor]}}


def _view_beside_a_model(model: Dicts, tensor: torch.Tensor) -> Dicts:
    return {"model": model, "s": {"n": 0, "last": [tensor[:1], tensor[:1]]}}


def _slots(model: Dicts, tensor: torch.Tensor) -> Dicts:
    groups = [{"params": [0, 1], "lr": 0.1}]
    return {"o": {"state": {0: {"buffer": tensor}, 1: {"buffer": tensor}}, "param_groups": groups}}


def _parameters(model: Dicts, tensor: torch.Tensor) -> Dicts:
    return {"s": {"n": 0, "own": [torch.nn.Parameter(tensor), tensor]}}


@pytest.mark.parametrize("make", [_tied_weights, _beside_a_model, _view_beside_a_model, _slots, _parameters])
def test_memory_of_modules_and_slots_cannot_hold_two_values(
    load: Callable[[Dicts, Dicts], None], make: Callable[[Dicts, torch.Tensor], Dicts]
) -> None:
    model = torch.nn.Linear(3, 3, bias=False).state_dict()
    target = make(model, model["weight"])
    before = model["weight"].clone()

    def others(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return torch.randn(value.shape)
        if isinstance(value, dict):
            return {key: others(item) for key, item in value.items()}
        return [others(item) for item in value] if isinstance(value, list) else value

    saved: Any = others(target)
    with pytest.raises(REFUSALS, match="shares memory with"):
        load(saved, target)
    assert torch.equal(model["weight"], before)


def _journaled(store: Path, target: Dicts) -> Dicts:
    """Steps of which the full one has equal values, and the last has others; loaded into `target`, beside a model.
    """
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects: Dicts = {"model": model, "optimizer": optimizer}
    first, second = torch.ones(3), torch.ones(3)
    with fs.Checkpointer(store, every_step=True) as checkpointer:
        for step in range(1, 5):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            second += step - 1
            state = {**objects, **_like(target, iter([first, second]))}
            checkpointer.save(step, state).committed.result()
    assert len(list(store.glob("step-*"))) == 1, "the rest is in a journal"
    with fs.Checkpointer(store, every_step=True) as checkpointer:
        state = {**objects, **target}
        assert checkpointer.load(state).step == 4
    return state


def _like(value: Any, tensors: Any) -> Any:
    if isinstance(value, dict):
        return {key: _like(item, tensors) for key, item in value.items()}
    return [_like(item, tensors) for item in value] if isinstance(value, list) else (
        next(tensors) if isinstance(value, torch.Tensor) else value
    )


def test_what_differs_only_in_the_journal_gets_memory_of_its_own(store: Path) -> None:
    tensor = torch.zeros(3)
    state = _journaled(store, {"s": {"n": 1, "a": [tensor], "b": [tensor]}})
    assert (state["s"]["a"][0].tolist(), state["s"]["b"][0].tolist()) == ([1.0] * 3, [7.0] * 3)


def test_memory_that_cannot_hold_both_values_of_a_journal_is_refused(store: Path) -> None:
    tensor = torch.zeros(3)
    with pytest.raises(fs.MismatchError, match=r"'s\.b' shares memory with 's\.a', and their values at step 4 differ"):
        _journaled(store, {"s": {"a": tensor, "b": tensor}})


def test_a_load_says_what_has_memory_of_its_own_now(store: Path) -> None:
    tensor = torch.zeros(2)
    target: Dicts = {"s": {"n": 0, "a": [tensor], "b": [tensor]}}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"s": {"n": 1, "a": [torch.ones(2)], "b": [torch.zeros(2)]}}).committed.result()
        assert fs.explain(checkpointer.latest(), target).differences == ()
        assert target == {"s": {"n": 0, "a": [tensor], "b": [tensor]}}
        report = checkpointer.load(target)
    assert report.notes == ("s.b.0: shared memory with s.a.0 when it was saved, but is now a separate tensor",)
