"""Module trees give the names of torch's own state_dict() and named_parameters(), or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowstone.state.names import strip_wrappers
from flowstone.torch.trees import tree_of


def agree(module: nn.Module) -> None:
    tree = tree_of(module)
    assert tree is not None
    entries = module.state_dict(keep_vars=True)
    assert list(tree.keys) == list(entries)
    assert list(tree.names) == [strip_wrappers(key) for key in entries]
    assert all(mine is theirs for mine, theirs in zip(tree.values, entries.values(), strict=True))
    owned = [(key, value) for key, value, own in zip(tree.keys, tree.values, tree.parameters, strict=True) if own]
    expected = list(module.named_parameters(remove_duplicate=False))
    assert [key for key, _ in owned] == [key for key, _ in expected]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(owned, expected, strict=True))


class Odd(nn.Module):
    """A module with something of every kind that is not saved, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.register_buffer("none", None)
        self.shared = nn.Linear(1, 1)
        self.again = self.shared
        self.gone = nn.Linear(1, 1)
        self.gone = None  # type: ignore[assignment]


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Modules inside modules, under names that wrappers use among others; some of them twice."""
    module = nn.Module()
    names = st.sampled_from(["module", "_orig_mod", "layer", "module_", "a", "_fsdp_wrapped_module", "0"])
    for name in draw(st.sets(names, max_size=3)):
        kinds = [lambda: nn.Linear(2, 2), nn.Module, lambda: nn.BatchNorm1d(2), Odd]
        child = draw(modules(depth - 1)) if depth and draw(st.booleans()) else draw(st.sampled_from(kinds))()
        module.add_module(name, child)
        if draw(st.booleans()):
            module.add_module(f"{name}2", child)
    if not hasattr(module, "module") and draw(st.booleans()):
        module.register_parameter("module", nn.Parameter(torch.ones(1)))
    return module


@settings(max_examples=150, deadline=None)
@given(modules())
def test_a_tree_is_what_torch_says(module: nn.Module) -> None:
    agree(module)


def test_parametrized_and_tied_modules_are_ordinary() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Odd())
    module[1].weight = module[0].weight
    nn.utils.parametrizations.weight_norm(module[1])
    agree(module)


class OwnStateDict(nn.Linear):
    def state_dict(self, *args: object, **more: object) -> dict[str, object]:  # type: ignore[override]
        return super().state_dict(*args, **more)  # type: ignore[return-value]


class OwnSaving(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "own"] = self.weight


class OwnExtra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"n": 1}


class OwnTable(nn.Module):
    @property
    def _parameters(self) -> dict[str, object]:  # type: ignore[override]
        return {"made": nn.Parameter(torch.ones(1))}

    @_parameters.setter
    def _parameters(self, table: dict[str, object]) -> None:
        pass


def hooked(register: str) -> nn.Module:
    module = nn.Linear(1, 1)
    getattr(module, register)(lambda *args: None)
    return module


def by_hand(name: str) -> nn.Module:
    module = nn.Linear(1, 1)
    setattr(module, name, lambda *args, **more: None)
    return module


def dotted() -> nn.Module:
    module = nn.Module()
    module._parameters["a.b"] = nn.Parameter(torch.ones(1))
    return module


def no_tensor() -> nn.Module:
    module = nn.Module()
    module._buffers["text"] = "no tensor"  # type: ignore[assignment]
    return module


def without_end() -> nn.Module:
    module = nn.Module()
    module.add_module("again", module)
    return module


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "own state_dict": lambda: OwnStateDict(1, 1), "own saving": lambda: OwnSaving(1, 1),
    "extra state": lambda: OwnExtra(1, 1), "own table": OwnTable,
    "hook": lambda: hooked("register_state_dict_post_hook"),
    "pre-hook": lambda: hooked("register_state_dict_pre_hook"),
    "private hook": lambda: hooked("_register_state_dict_hook"),
    "state_dict of one module": lambda: by_hand("state_dict"),
    "saving of one module": lambda: by_hand("_save_to_state_dict"),
    "a dot in a name": dotted, "a buffer that is no tensor": no_tensor, "a cycle": without_end,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_tree_with_an_unusual_module_is_left_to_torch(name: str) -> None:
    assert tree_of(UNUSUAL[name]()) is None
    assert tree_of(nn.Sequential(nn.Linear(1, 1), UNUSUAL[name]())) is None
