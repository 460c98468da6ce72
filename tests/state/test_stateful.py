"""Schedulers, scalers, loaders: any object with state_dict and load_state_dict."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import load, save, stored
from torch.optim import lr_scheduler

import flowstone as fs
from flowstone.errors import DamagedError, StateError, UnsupportedStateError
from flowstone.state import describe, prepare
from strategies import assert_same


class Warmup:
    """A callable with state, which LambdaLR saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        return min(1.0, epoch / self.steps)


Make = Callable[[torch.optim.Optimizer], object]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, Warmup(4)),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
}


def parts(make: Make, lr: float | torch.Tensor = 0.1) -> dict[str, object]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return {"scheduler": make(optimizer), "optimizer": optimizer, "model": model}


def advance(state: dict[str, object], steps: int, *values: float) -> list[object]:
    rates = []
    for _ in range(steps):
        state["optimizer"].step()  # type: ignore[attr-defined]
        state["scheduler"].step(*values)  # type: ignore[attr-defined]
        rates.append(float(state["optimizer"].param_groups[0]["lr"]))  # type: ignore[attr-defined]
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_scheduler_goes_on_as_if_never_interrupted(name: str, lr: float | torch.Tensor) -> None:
    if isinstance(lr, torch.Tensor) and name in ("OneCycleLR", "CyclicLR"):
        pytest.skip("torch's own cyclic schedulers want numbers or capturable optimizers")
    state = parts(SCHEDULERS[name], lr if isinstance(lr, float) else lr.clone())
    advance(state, 3)
    target = parts(SCHEDULERS[name], lr if isinstance(lr, float) else lr.clone())
    load(save(state), target)
    assert_same(target["scheduler"].state_dict(), state["scheduler"].state_dict())  # type: ignore[attr-defined]
    assert advance(target, 6) == advance(state, 6)


def test_a_plateau_scheduler_goes_on() -> None:
    def make(optimizer: torch.optim.Optimizer) -> object:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    state, target = parts(make), parts(make)
    advance(state, 3, 1.0)
    load(save(state), target)
    assert advance(target, 6, 1.0) == advance(state, 6, 1.0)


def test_milestones_stay_a_counter() -> None:
    objects = describe(parts(SCHEDULERS["MultiStepLR"])).objects
    assert objects["scheduler"]["milestones"] == Counter({2: 2, 4: 1})  # type: ignore[index]


def test_a_scaler_survives() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
    scaler.update(4.0) if scaler._scale is not None else scaler.scale(torch.ones(1))
    target = torch.amp.GradScaler("cpu")
    load(save({"scaler": scaler}), {"scaler": target})
    assert target.state_dict() == scaler.state_dict()


class Recorder:
    """Notes when it is loaded."""

    log: list[str] = []  # noqa: RUF012 - one log for all, which is what the test reads

    def __init__(self, name: str, value: object = None) -> None:
        self.name = name
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.log.append(self.name)
        self.value = state["value"]


def test_tensors_inside_are_fresh_and_tied_ones_shared() -> None:
    shared = torch.arange(3.0)
    source = Recorder("a", {"x": [shared, OrderedDict(y=shared)], "z": torch.ones(2).bfloat16(), "view": shared[:2]})
    checkpoint = save({"loader": source})
    assert checkpoint.tied == {"loader.value.x.1.y": "loader.value.x.0"}
    target = Recorder("b")
    load(checkpoint, {"loader": target})
    assert_same(target.value, source.value)
    assert target.value["x"][0] is target.value["x"][1]["y"]  # type: ignore[index]
    assert target.value["x"][0].data_ptr() != shared.data_ptr()  # type: ignore[index]


def test_tensors_of_a_renamed_section_are_found() -> None:
    target = Recorder("b")
    checkpoint = save({"old": Recorder("a", torch.ones(2))})
    checkpoint.objects = {"new": checkpoint.objects["old"]}
    load(checkpoint, {"new": target}, rename=lambda name: name.replace("old", "new"))
    assert torch.equal(target.value, torch.ones(2))  # type: ignore[arg-type]


def test_objects_are_loaded_last_and_in_the_states_order() -> None:
    Recorder.log.clear()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_load_state_dict_post_hook(lambda _: Recorder.log.append("optimizer"))
    state = {"b": Recorder("b"), "x": [Recorder("x")], "optimizer": optimizer, "a": Recorder("a"), "model": model}
    load(save(state), state)
    assert Recorder.log == ["optimizer", "b", "x", "a"]


def test_nothing_is_loaded_before_finish() -> None:
    Recorder.log.clear()
    state = {"a": Recorder("a", 1), "n": 1, "l": [1]}
    checkpoint = save({"a": Recorder("a", 2), "n": 2, "l": [2]})
    prepare(state, stored(checkpoint))
    assert Recorder.log == []
    assert state["n"] == 1
    assert state["l"] == [1]


def test_an_absent_object_is_a_difference() -> None:
    differences = prepare({"a": Recorder("a")}, stored(save({}))).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "a")]


class Broken(Recorder):
    def state_dict(self) -> dict[str, object]:
        if self.value == "save":
            raise KeyError("inner")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise KeyError("inner")


def test_a_failing_method_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'s\.deep'") as saving:
        describe({"s": {"deep": Broken("a", "save")}})
    assert isinstance(saving.value.__cause__, KeyError)
    with pytest.raises(StateError, match=r"'s\.deep'") as loading:
        load(save({"s": {"deep": Recorder("a")}}), {"s": {"deep": Broken("b")}})
    assert isinstance(loading.value.__cause__, KeyError)


def test_what_a_state_dict_cannot_hold_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'loader\.value\.0'"):
        describe({"loader": Recorder("a", [lambda: 1])})


def test_a_failing_load_leaves_a_state_that_is_not_saved(tmp_path: Path) -> None:
    class Failing(Recorder):
        def load_state_dict(self, state: dict[str, object]) -> None:
            raise KeyError("no")

    weight = torch.zeros(2)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.ones(2), "l": Recorder("l", [])}).committed.result()
        with pytest.raises(StateError, match="'l'") as caught:
            ckpt.load({"w": weight, "l": Failing("l", [])})
        assert "load again before you save" in str(caught.value)
        assert weight.tolist() == [1, 1]
        with pytest.raises(DamagedError, match="the load of step 1 did not finish"):
            ckpt.save(2, {"w": weight})
        with pytest.raises(DamagedError, match="the load of step 1 did not finish"):
            ckpt.save_state_dict(2, {"w": weight})
        ckpt.load({"w": weight, "l": Recorder("l", [])})
        ckpt.save(2, {"w": weight}).committed.result()
