"""The idiom of torch.save: state_dict()s instead of objects. Reported once, and also loaded into live objects."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flowstone as fs
from flowstone.state import state_dicts

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> None:
    state_dicts.warn_state_dict_saved.cache_clear()
    state_dicts.warn_state_dict_loaded.cache_clear()


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))


def groups(module: torch.nn.Module) -> list[dict[str, object]]:
    """As everybody splits them: no decay for what has one dimension."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
    ]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
    "named": lambda module: torch.optim.AdamW(module.named_parameters(), lr=0.01),
    "grouped": lambda module: torch.optim.AdamW(groups(module), lr=0.01, amsgrad=True),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
    "plain": lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), lr=0.01),
}


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        module(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def idiom(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}


def saved(store: Path, make: Make) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = model()
    optimizer = make(module)
    train(module, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as a scheduler would
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(3, idiom(module, optimizer))
    return module, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_state_dicts_were_saved_of_is_brought_back_in_live_objects(store: Path, make: Make) -> None:
    module, optimizer = saved(store, make)
    fresh = model(seed=1)
    again = make(fresh)
    with fs.Checkpointer(store) as checkpointer:
        report = checkpointer.load({"model": fresh, "optimizer": again, "step": 0})
    assert any("a state_dict() was saved" in note for note in report.notes)
    mine, theirs = optimizer.state_dict(), again.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    train(module, optimizer, 3)
    train(fresh, again, 3)
    assert all(torch.equal(param, other) for param, other in zip(module.parameters(), fresh.parameters(), strict=True))
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(6, {"model": fresh, "optimizer": again, "step": 6})
        checkpointer.load({"model": module, "optimizer": optimizer, "step": 0})


def test_named_parameters_are_found_by_their_names_in_another_order(store: Path) -> None:
    module, optimizer = saved(store, OPTIMIZERS["named"])
    fresh = model(seed=1)
    again = torch.optim.AdamW(list(reversed(list(fresh.named_parameters()))), lr=0.01)
    with fs.Checkpointer(store) as checkpointer:
        report = checkpointer.load({"model": fresh, "optimizer": again, "step": 0})
    assert "by name" in " ".join(report.notes)
    for parameter, other in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], again.state[other]["exp_avg"])


def test_names_of_another_model_are_refused(store: Path) -> None:
    saved(store, OPTIMIZERS["named"])
    other = torch.nn.ModuleDict({"a": model()})
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.MismatchError) as caught:
        checkpointer.load({"model": torch.nn.ModuleList([model(), model()]), "optimizer": OPTIMIZERS["named"](other)})
    assert any("unexpected" in difference for difference in caught.value.differences)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda module: torch.optim.AdamW(list(module.parameters())[:-1]), "of 5 parameters, stored groups of 6"),
        (OPTIMIZERS["grouped"], "groups of 2, 4 parameters, stored groups of 6"),
        (lambda module: torch.optim.AdamW(list(module.parameters())[::-1]), "shape       optimizer.state.model.2.bias"),
    ],
    ids=["fewer", "grouped", "reversed"],
)
def test_an_order_that_cannot_be_the_same_is_refused_and_changes_nothing(store: Path, make: Make, says: str) -> None:
    saved(store, OPTIMIZERS["adamw"])
    fresh = model(seed=1)
    before = copy.deepcopy(fresh.state_dict())
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.MismatchError) as caught:
        checkpointer.load({"model": fresh, "optimizer": make(fresh)})
    assert says in str(caught.value)
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_state_dicts_of_wrapped_modules_are_brought_back_in_bare_ones(store: Path, prefix: str) -> None:
    module = model()
    wrapped = torch.nn.Module()
    inner = wrapped
    *outer, last = prefix.rstrip(".").split(".")
    for name in outer:
        inner.add_module(name, torch.nn.Module())
        inner = getattr(inner, name)
    inner.add_module(last, module)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": wrapped.state_dict()})
        fresh = model(seed=1)
        report = checkpointer.load({"model": fresh})
    assert (f"model.{prefix}0.weight", "model.0.weight") in report.renamed
    assert all(torch.equal(param, other) for param, other in zip(module.parameters(), fresh.parameters(), strict=True))


def test_state_dicts_by_names_are_brought_back_too(store: Path) -> None:
    """As torch.distributed.checkpoint.state_dict makes them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module = model()
    optimizer = OPTIMIZERS["adamw"](module)
    train(module, optimizer, 3)
    of_module, of_optimizer = get_state_dict(module, optimizer)
    fresh = model(seed=1)
    again = OPTIMIZERS["adamw"](fresh)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(3, {"model": of_module, "optimizer": of_optimizer})
        checkpointer.load({"model": fresh, "optimizer": again})
    train(module, optimizer, 1)
    train(fresh, again, 1)
    assert all(torch.equal(param, other) for param, other in zip(module.parameters(), fresh.parameters(), strict=True))


# The other way round


def test_a_state_dict_that_is_to_take_a_saved_optimizer_is_told_to_be_the_optimizer(store: Path) -> None:
    module = model()
    optimizer = OPTIMIZERS["adamw"](module)
    train(module, optimizer, 1)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer})
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    assert caught.value.differences[0] == (
        "kind        optimizer: wanted the state_dict() of an optimizer, stored an optimizer"
    )
    assert caught.value.facts["next"] == (
        "pass the optimizer itself as state['optimizer'], not its state_dict()"
    )


def test_a_fresh_state_dict_is_told_to_be_the_optimizer_and_no_skip_is_proposed(store: Path) -> None:
    saved(store, OPTIMIZERS["adamw"])
    fresh = model(seed=1)
    with fs.Checkpointer(store) as checkpointer, pytest.raises(fs.MismatchError) as caught:
        checkpointer.load(idiom(fresh, OPTIMIZERS["adamw"](fresh)))
    assert str(caught.value.facts["next"]).startswith("pass the optimizer itself as state['optimizer']")
    assert "Skip" not in str(caught.value)


def test_state_dicts_are_loaded_in_place_into_ones_of_the_same_form(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, optimizer = saved(store, OPTIMIZERS["adamw"])
    fresh = model(seed=1)
    again = OPTIMIZERS["adamw"](fresh)
    train(fresh, again, 1)
    state = idiom(fresh, again)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(state)
    assert "pass the dict to the optimizer's load_state_dict()" in caplog.text
    assert all(torch.equal(param, other) for param, other in zip(module.parameters(), fresh.parameters(), strict=True))
    again.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# Told


def test_a_save_of_state_dicts_is_told_once_with_what_to_write_instead(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = model()
    optimizer = OPTIMIZERS["adamw"](module)
    with caplog.at_level(logging.WARNING, logger="flowstone"):
        for position in ("one", "two"):
            with fs.Checkpointer(store / position) as checkpointer:
                checkpointer.save(1, idiom(module, optimizer))
                checkpointer.save(2, idiom(module, optimizer))
    (message,) = caplog.messages
    assert message.startswith(
        "state['model'] is the state_dict() of a module, state['optimizer'] is the state_dict() of an optimizer. "
    )
    assert 'save(step, {"model": model, "optimizer": optimizer})' in message


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda module, optimizer: module.state_dict(), "the state itself is the state_dict() of a module"),
        (
            lambda module, optimizer: {"trainer": {"optimizers": [optimizer.state_dict()]}},
            "state['trainer']['optimizers'][0] is the state_dict() of an optimizer",
        ),
        (lambda module, optimizer: {"model": module, "optimizer": optimizer}, ""),
        (lambda module, optimizer: {"scheduler": {"state": {}, "param_groups": 3}, "x": {"state": {}}}, ""),
        (lambda module, optimizer: {"ema": dict(module.named_parameters())}, ""),
    ],
)
def test_where_they_lie_is_told(state: Callable[..., dict[str, object]], says: str) -> None:
    module = model()
    assert state_dicts.find_state_dicts(state(module, OPTIMIZERS["adamw"](module))) == says


def test_a_section_that_is_called_otherwise_says_what_there_is(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": model(), "step": 1})
        with pytest.raises(fs.MismatchError) as caught:
            checkpointer.load({"modle": model()})
    assert str(caught.value.facts["next"]).startswith("the checkpoint has no 'modle'; it has 'model', 'step': use")
