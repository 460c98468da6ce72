"""Objects inside another object's state: restored into the existing objects, or refused by name."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import load, save, stored
from torch.optim import lr_scheduler

import flowstone as fs
from flowstone.errors import UnsupportedStateError
from flowstone.state import describe, prepare


class Holder:
    """Its state is whatever it holds, objects included, as a scheduler's is."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Warmup(lr_scheduler.LRScheduler):
    """The usual way to warm up: a scheduler that hands over to another one, which it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, *after: Any) -> None:
        self.steps, self.after = steps, list(after)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [base * min(1, (self.last_epoch + 1) / self.steps) for base in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        if self.last_epoch < self.steps:
            super().step()
        else:
            for item in self.after:
                item.step()


def run(count: int = 1) -> tuple[torch.optim.Optimizer, Warmup]:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    inner = Warmup(optimizer, 1, *(lr_scheduler.StepLR(optimizer, 2) for _ in range(count)))
    return optimizer, Warmup(optimizer, 2, inner, lr_scheduler.MultiStepLR(optimizer, [3, 5]))


def rates(optimizer: torch.optim.Optimizer, scheduler: Warmup, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


FORMS = ["save", "save_state_dict"]


def state_of(optimizer: torch.optim.Optimizer, scheduler: Warmup, verb: str) -> dict[str, Any]:
    """As an object, or as the dict that it returns."""
    options: dict[str, Any] = {"lr": [group["lr"] for group in optimizer.param_groups]}
    if verb in ("save", "load"):
        return {"options": options, "scheduler": scheduler}
    return {"options": options, "scheduler": scheduler.state_dict()}


@pytest.mark.parametrize("loaded", ["load", "load_state_dict"])
@pytest.mark.parametrize("saved", ["save", "save_state_dict"])
def test_a_scheduler_that_holds_schedulers_goes_on(tmp_path: Path, saved: str, loaded: str) -> None:
    optimizer, scheduler = run()
    rates(optimizer, scheduler, 5)
    with fs.Checkpointer(tmp_path) as ckpt:
        getattr(ckpt, saved)(5, state_of(optimizer, scheduler, saved))
    again, target = run()
    inner = target.after[0].after[0]
    state = state_of(again, target, loaded)
    with fs.Checkpointer(tmp_path) as ckpt:
        getattr(ckpt, loaded)(state)
    again.param_groups[0]["lr"] = state["options"]["lr"][0]
    if loaded == "load_state_dict":
        target.load_state_dict(state["scheduler"])
    assert target.after[0].after[0] is inner, "it still has the optimizer of this process"
    assert rates(again, target, 6) == rates(optimizer, scheduler, 6)


def test_where_no_object_is_there_the_load_is_refused_and_changes_nothing() -> None:
    checkpoint = save({"s": run(count=2)[1], "n": 1})
    _, target = run(count=1)
    before = copy.deepcopy(target.after[0].after[0].state_dict())
    restoration = prepare({"s": target, "n": 0}, stored(checkpoint))
    (difference,) = restoration.differences
    assert (difference.name, difference.stored) == ("s.after.0.after.1", "an object")
    assert difference.expected == "an object to restore into, but the state has nothing of that name"
    assert restoration.remedies == ("create the object at 's.after.0.after.1' before the load",)
    assert target.after[0].after[0].state_dict() == before


def test_generators_scalers_and_modules_are_restored_where_they_are() -> None:
    def make(seed: int) -> Holder:
        torch.manual_seed(seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 + seed)
        scaler.scale(torch.ones(1))
        return Holder(
            generator=torch.Generator().manual_seed(seed), scaler=scaler, module=torch.nn.BatchNorm1d(3),
            optimizer=Holder(deep=[Holder(n=seed), {"t": torch.full((2,), float(seed))}]), plain=seed,
        )

    source, target = make(5), make(1)
    source.module(torch.randn(4, 3))
    kept = dict(target.__dict__)
    load(save({"h": source}), {"h": target})
    assert all(getattr(target, name) is kept[name] for name in ("generator", "scaler", "module", "optimizer"))
    assert torch.equal(target.generator.get_state(), source.generator.get_state())
    assert target.scaler.state_dict() == source.scaler.state_dict()
    assert torch.equal(target.module.running_mean, source.module.running_mean)
    assert (target.optimizer.deep[0].n, target.optimizer.deep[1]["t"][0].item(), target.plain) == (5, 5.0, 5)


def test_an_object_is_restored_before_the_one_that_holds_it() -> None:
    """Also one that the state holds a copy of: the load of the outer one reads it."""
    class Copies(Holder):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": self.generator.clone_state(), "inner": copy.deepcopy(self.inner)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["generator"].get_state())
            self.inner.n = state["inner"].n

    source = Copies(generator=torch.Generator().manual_seed(3), inner=Holder(n=3))
    target = Copies(generator=torch.Generator().manual_seed(4), inner=Holder(n=4))
    load(save({"c": source}), {"c": target})
    assert torch.equal(target.generator.get_state(), source.generator.get_state())
    assert target.inner.n == 3


class Noise(torch.nn.Linear):
    """Its extra state has objects."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, 2)
        self.generator = torch.Generator().manual_seed(seed)

    def get_extra_state(self) -> Any:
        return {"generator": self.generator, "seen": 1}

    def set_extra_state(self, state: Any) -> None:
        self.generator = state["generator"]


def test_objects_in_extra_state_and_in_an_optimizers_settings_are_restored() -> None:
    def make(seed: int) -> dict[str, Any]:
        module = Noise(seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["generator"] = torch.Generator().manual_seed(seed)
        return {"model": module, "optimizer": optimizer}

    source, target = make(1), make(2)
    load(save(source), target)
    assert torch.equal(target["model"].generator.get_state(), source["model"].generator.get_state())
    generator = target["optimizer"].param_groups[0]["generator"]
    assert isinstance(generator, torch.Generator)
    assert torch.equal(generator.get_state(), source["optimizer"].param_groups[0]["generator"].get_state())


def with_slot(slot: object) -> dict[str, Any]:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["noise"] = slot
    return {"model": module, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"line": collections.deque([Holder(n=1)])}, r"line\.0"),
        ({"h": Holder(line=collections.deque([torch.Generator()]))}, r"h\.line\.0"),
        (with_slot(torch.Generator()), r"optimizer\.state\.model\.weight\.noise"),
        (with_slot({"deep": Holder(n=1)}), r"optimizer\.state\.model\.weight\.noise\.deep"),
    ],
    ids=["deque", "inner-deque", "slot", "in-a-slot"],
)
def test_what_a_load_could_not_restore_is_refused_at_save(state: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"'{name}' is an object that a load could not restore"):
        describe(state)


def test_a_checkpoint_reads_as_dicts_without_the_objects(tmp_path: Path) -> None:
    optimizer, scheduler = run()
    rates(optimizer, scheduler, 5)
    module = torch.nn.Linear(2, 2)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(5, {"scheduler": scheduler, "h": Holder(module=module)})
    read = fs.open(tmp_path).state_dict()
    assert read["scheduler"]["after"][1]["last_epoch"] == scheduler.after[1].last_epoch
    assert torch.equal(read["h"]["module"]["weight"], module.weight)


def test_a_value_that_was_none_replaces_an_object() -> None:
    target = Holder(inner=Holder(n=1), other=None)
    load(save({"h": Holder(inner=None, other=None)}), {"h": target})
    assert target.inner is None
    assert target.other is None


def test_one_list_at_two_places_is_two_equal_lists_for_an_object_and_stays_one_in_a_live_state() -> None:
    line: list[int] = [1, 2]
    holder, target = Holder(a=line, b=line), Holder(a=[], b=[])
    fresh: list[int] = []
    held = {"h": target, "d": {"a": fresh, "b": fresh}}
    load(save({"h": holder, "d": {"a": line, "b": line}}), held)
    assert target.a == target.b == line
    assert target.a is not target.b, "as docs/STATE.md says"
    assert held["d"]["a"] is held["d"]["b"] is fresh  # type: ignore[index]
    assert fresh == line
