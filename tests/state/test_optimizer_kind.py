"""A checkpoint of one kind of optimizer and a state of another: refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import optim

import flowstone as fs
from forge import content

Make = Callable[[list[torch.nn.Parameter]], optim.Optimizer]


class Renamed(optim.Optimizer):
    """AdamW under another name and no subclass of it, with a number of its own more, and a flag."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        numbers = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "warmth": 0.5}
        super().__init__(params, numbers | {"cautious": True})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - group["betas"][1])
                parameter.data -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])


class Heir(optim.AdamW):
    """A subclass that keeps more of each parameter."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        for parameter, state in self.state.items():
            state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.data, 0.1)
        return loss


MAKE: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, 0.1), "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9), "adamw": optim.AdamW,
    "adam": optim.Adam, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad, "adamax": optim.Adamax, "heir": Heir,
    "renamed": Renamed, "nadam": optim.NAdam, "adafactor": optim.Adafactor,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True), "rprop": optim.Rprop,
}
ALIKE = [{"sgd", "momentum"}, {"adamw", "adam", "amsgrad", "heir"}, {"adamw", "adam", "heir", "renamed"}]
OWN_STEP = {"heir", "renamed"}  # of which nobody can tell what it looks up


def make(kind: str, steps: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    state = {"model": model, "optimizer": MAKE[kind](list(model.parameters()))}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict) -> None:
    state["model"](torch.ones(1, 4)).sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("saved", MAKE)
def test_another_kind_of_optimizer_is_refused_and_the_same_kind_loads_and_steps(store: Path, saved: str) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, make(saved, 2)).committed.result()
    for kind in MAKE:
        for steps in (0, 1):
            state = make(kind, steps)
            before = content(state)
            alike = kind == saved or any({kind, saved} <= kinds for kinds in ALIKE)
            with fs.Checkpointer(store) as checkpointer:
                try:
                    checkpointer.load(state)
                except fs.MismatchError:
                    assert not alike, f"{saved} into {kind} after {steps} steps"
                    assert content(state) == before
                else:
                    if alike or kind not in OWN_STEP:
                        step(state)  # no KeyError, whatever was loaded into what


def test_the_refusal_names_both_kinds_and_what_to_do(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, make("adamw", 2)).committed.result()
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load(make("momentum", 1))
    assert caught.value.differences[0] == (
        "kind        optimizer: wanted SGD with dampening, momentum, whose state is momentum_buffer, "
        "stored an optimizer with betas, eps, whose state is exp_avg, exp_avg_sq, step"
    )
    assert "use the kind of optimizer that was saved" in str(caught.value.facts["next"])


def test_keys_of_schedulers_and_flags_of_another_release_make_no_other_kind(store: Path) -> None:
    saved = make("adamw", 1)
    torch.optim.lr_scheduler.OneCycleLR(saved["optimizer"], 1.0, total_steps=5)  # type: ignore[arg-type]
    saved["optimizer"].param_groups[0]["new_flag"] = True  # type: ignore[attr-defined]
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        for kind in ("adamw", "renamed", "heir"):
            state = make(kind, 0)
            checkpointer.load(state)
            step(state)
