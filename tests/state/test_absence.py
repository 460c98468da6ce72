"""Entries that a state dict has and the checkpoint lacks: removed, or an error, never kept from before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import flowstone as fs

State = dict[str, Any]
SAVED = ["objects", "numbered", "named", "flat"]


class Run:
    """Two layers, of which a step uses the first, or both: then the second has no gradient, and no slots."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)

    def step(self, *used: str) -> None:
        self.optimizer.zero_grad()
        sum(self.model[name](torch.ones(1, 3)).square().sum() for name in used).backward()  # type: ignore[union-attr]
        self.optimizer.step()

    def state(self, form: str) -> State:
        if form == "objects":
            return {"model": self.model, "optimizer": self.optimizer}
        if form == "numbered":
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        slots = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": get_model_state_dict(self.model), "optimizer": slots}

    def take(self, state: Mapping[str, Any], form: str) -> None:
        if form == "numbered":
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(
            self.model, self.optimizer, state["optimizer"], options=StateDictOptions(strict=False)
        )

    def save(self, path: Path, form: str) -> None:
        with fs.Checkpointer(path) as ckpt:
            (ckpt.save if form == "objects" else ckpt.save_state_dict)(1, self.state(form))

    def contents(self) -> State:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    if isinstance(value, dict):
        return isinstance(other, dict) and value.keys() == other.keys() and all(same(value[k], other[k]) for k in value)
    return value == other


def resumed_in(path: Path, run: Run, form: str) -> fs.LoadReport:
    state = run.state(form)
    with fs.Checkpointer(path) as ckpt:
        report = ckpt.load_state_dict(state)
    run.take(state, form)
    return report


@pytest.mark.parametrize("live", [False, True], ids=["fresh", "rollback"])
@pytest.mark.parametrize("form", ["numbered", "named"])
@pytest.mark.parametrize("saved", SAVED)
def test_slots_that_were_not_saved_are_removed_from_the_dict(
    tmp_path: Path, saved: str, form: str, live: bool
) -> None:
    source = Run()
    for _ in range(3):
        source.step("a")
    source.save(tmp_path, saved)
    target = Run()
    if live:
        target.step("a", "b")
    report = resumed_in(tmp_path, target, form)
    assert same(target.contents(), source.contents())
    assert ("exp_avg of" in str(report.notes)) is (live or form == "named"), "only then it had some"
    for run in (source, target):
        run.step("a", "b")
    assert same(target.contents(), source.contents())


@pytest.mark.parametrize("saved", SAVED)
def test_a_flattened_dict_is_refused_as_torch_cannot_read_it_back_without_them(tmp_path: Path, saved: str) -> None:
    source = Run()
    source.step("a")
    source.save(tmp_path, saved)
    target = Run()
    target.step("a", "b")
    before, state = target.contents(), target.state("flat")
    with fs.Checkpointer(tmp_path) as ckpt, pytest.raises(fs.MismatchError, match="not flattened") as caught:
        ckpt.load_state_dict(state)
    assert same(target.contents(), before)
    assert any("b.weight.exp_avg" in difference for difference in caught.value.differences)
    assert not any("a.weight" in difference for difference in caught.value.differences)
    rules = [fs.Init("optimizer.state.*b.*")]
    with fs.Checkpointer(tmp_path) as ckpt:
        assert "optimizer.state.model.b.weight.step" in str(ckpt.load_state_dict(state, rules=rules).initialised)


@pytest.mark.parametrize("form", ["numbered", "named"])
def test_one_slot_that_was_not_saved_is_removed_and_others_are_loaded(tmp_path: Path, form: str) -> None:
    source, target = Run(), Run(amsgrad=True)
    source.step("a", "b")
    target.step("a", "b")
    source.save(tmp_path, form)
    report = resumed_in(tmp_path, target, form)
    assert same(target.contents(), source.contents())
    assert "max_exp_avg_sq of" in str(report.notes)


@pytest.mark.parametrize("form", ["numbered", "named", "flat"])
def test_settings_that_were_not_saved_are_not_kept(tmp_path: Path, form: str) -> None:
    source, target = Run(), Run()
    source.step("a", "b")
    target.step("a", "b")
    source.save(tmp_path, "objects")
    torch.optim.lr_scheduler.StepLR(target.optimizer, 2)
    state = target.state(form)
    with fs.Checkpointer(tmp_path) as ckpt:
        if form == "flat":
            with pytest.raises(fs.MismatchError, match=r"param_groups\.0\.initial_lr: wanted a setting, stored noth"):
                ckpt.load_state_dict(state)
            return
        report = ckpt.load_state_dict(state)
    assert "initial_lr" not in state["optimizer"]["param_groups"][0]
    assert "initial_lr not in the checkpoint: removed from the state dict" in str(report.notes)


def test_what_belongs_to_no_parameter_is_replaced_in_the_dict(tmp_path: Path) -> None:
    source, target = Run(), Run()
    source.step("a", "b")
    target.step("a", "b")
    source.optimizer.state["schedule"] = {"k": 3}  # type: ignore[index]
    target.optimizer.state["schedule"] = {"k": 9}  # type: ignore[index]
    target.optimizer.state["other"] = {"k": 7}  # type: ignore[index]
    source.save(tmp_path, "objects")
    resumed_in(tmp_path, target, "numbered")
    assert same(target.contents(), source.contents())


@pytest.mark.parametrize(
    ("saved", "target", "name"),
    [
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": torch.ones(1)}}, "s.a.y"),
        ({"a": {"t": torch.zeros(1)}}, {"a": {"t": torch.zeros(1), "x": 5}}, "s.a.x"),
        ({"a": {"t": torch.zeros(1)}}, {"a": {"t": torch.zeros(1), "empty": {}}}, "s.a.empty"),
        ({"a": {"t": torch.zeros(1)}}, {"a": {"t": torch.zeros(1), "empty": []}}, "s.a.empty"),
        ({"a": [torch.zeros(1)]}, {"a": [torch.zeros(1), torch.ones(1)]}, "s.a.1"),
        ({"a": [torch.zeros(1)]}, {"a": [torch.zeros(1), 7]}, "s.a.1"),
        ({"a": (torch.zeros(1), 1)}, {"a": (torch.zeros(1), 1, torch.ones(1))}, "s.a.2"),
        ({"a": {}}, {"a": {"b": {"c": torch.ones(1)}}}, "s.a.b.c"),
    ],
)
@pytest.mark.parametrize("verb", ["load", "load_state_dict"])
def test_entries_beside_tensors_that_were_not_saved_are_refused(
    tmp_path: Path, saved: State, target: State, name: str, verb: str
) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save_state_dict(1, {"s": saved})
        ckpt.wait()
        with pytest.raises(fs.MismatchError) as caught:
            getattr(ckpt, verb)({"s": target})
    assert any(diff.startswith("missing") and f" {name}:" in diff for diff in caught.value.differences)


@pytest.mark.parametrize("verb", ["load", "load_state_dict"])
def test_plain_entries_that_were_not_saved_are_removed(tmp_path: Path, verb: str) -> None:
    target: State = {"s": {"a": {"x": 1, "more": 2}, "list": [1, 2, 3], "empty": {}, "set": {1, 2}, "kept": {"k": [1]}}}
    saved: State = {"s": {"a": {"x": 5}, "list": [4], "set": set(), "kept": {}}}
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save_state_dict(1, copy.deepcopy(saved))
        ckpt.wait()
        getattr(ckpt, verb)(target)
    assert target == saved
