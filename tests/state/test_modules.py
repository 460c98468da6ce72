"""Modules are saved by name and loaded in place, wrapped or bare."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from reference import fingerprint, load, save, stored
from torch import nn

from flowstone.errors import CollisionError, StateError, UnsupportedStateError
from flowstone.state import describe, prepare
from strategies import assert_same


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def same_weights(module: nn.Module, other: nn.Module) -> None:
    assert_same(dict(module.state_dict()), dict(other.state_dict()))


def test_parameters_and_buffers_have_their_own_names() -> None:
    described = describe({"model": net()})
    assert [piece.name for piece in described.pieces] == [f"model.{key}" for key in net().state_dict()]
    assert described.objects == {"model": {}}


def test_only_parameters_that_an_optimizer_of_the_state_steps_are_lazy() -> None:
    model = net()
    state: dict[str, object] = {"model": model, "other": net(1), "optimizer": torch.optim.SGD(model[:2].parameters())}
    described = describe(state)
    lazy = {piece.name for piece, lazy in zip(described.pieces, described.lazy, strict=True) if lazy}
    assert lazy == {f"model.{name}" for name, _ in model[:2].named_parameters()}
    assert not any(describe({"model": model}).lazy)


def test_a_module_is_loaded_into_its_own_memory() -> None:
    target = net(1)
    held = [parameter.data_ptr() for parameter in target.parameters()]
    load(save({"model": net(0)}), {"model": target})
    same_weights(target, net(0))
    assert [parameter.data_ptr() for parameter in target.parameters()] == held


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"])
def test_wrapped_and_bare_give_the_same_names(wrap: object) -> None:
    wrapped = wrap(net(0))  # type: ignore[operator]
    assert set(save({"m": wrapped}).tensors) == set(save({"m": net(0)}).tensors)
    target = net(1)
    load(save({"m": wrapped}), {"m": target})
    same_weights(target, net(0))
    again = wrap(net(2))  # type: ignore[operator]
    load(save({"m": target}), {"m": again})
    assert_same(list(again.state_dict().values()), list(net(0).state_dict().values()))


def test_a_checkpoint_wrapped_part_gives_the_same_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net(0)
    model[0] = checkpoint_wrapper(model[0])
    assert set(save({"m": model}).tensors) == set(save({"m": net()}).tensors)
    load(save({"m": model}), {"m": net(1)})


def test_a_parameter_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.register_parameter("module", nn.Parameter(torch.ones(1)))
    assert set(save({"m": model}).tensors) == {"m.module"}


def test_a_state_dict_and_its_module_load_each_other() -> None:
    bare = net(1).state_dict()
    load(save({"model": net(0)}), {"model": bare})
    assert_same(dict(bare), dict(net(0).state_dict()))
    target = net(1)
    load(save({"model": net(0).state_dict()}), {"model": target})
    same_weights(target, net(0))


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    checkpoint = save({"m": Tied()})
    assert checkpoint.tied == {"m.head.weight": "m.embed.weight"}
    target = Tied()
    load(checkpoint, {"m": target})
    assert target.head.weight is target.embed.weight


def test_tied_weights_load_into_separate_ones() -> None:
    source, target = Tied(), Tied(tie=False)
    load(save({"m": source}), {"m": target})
    assert torch.equal(target.head.weight, source.embed.weight)
    assert torch.equal(target.embed.weight, source.embed.weight)


class Extra(nn.Module):
    """Has extra state of the given kind."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = value

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"scale": 2.0, "history": [torch.arange(3.0)]}, torch.arange(4), None, (1, "a"), b"z" * 70_000],
    ids=["tree", "tensor", "None", "tuple", "bytes"],
)
def test_extra_state_survives_and_follows_the_checkpoint(extra: object) -> None:
    model = nn.Sequential(Extra(extra), Extra({"deep": 1}))
    target = nn.Sequential(Extra("other"), Extra("other"))
    load(save({"m": model}), {"m": target})
    assert_same(target[0].extra, extra)
    assert_same(target[1].extra, {"deep": 1})
    assert torch.equal(target[0].weight, torch.ones(2))


def test_missing_and_unexpected_extra_state_differ() -> None:
    plain = nn.Sequential(nn.Module())
    extra = nn.Sequential(Extra(3))
    differences = prepare({"m": extra}, stored(save({"m": plain}))).differences
    assert [(d.kind, d.name) for d in differences] == [("missing", "m.0._extra_state")]
    differences = prepare({"m": plain}, stored(save({"m": extra}))).differences
    assert [(d.kind, d.name) for d in differences] == [("unexpected", "m.0._extra_state")]


class Half(nn.Module):
    """Its state_dict() holds a copy of the weight, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.bias = nn.Parameter(torch.randn(3))
        self.loaded: list[str] = []
        self._register_state_dict_hook(self._halve)
        self.register_load_state_dict_pre_hook(self._note)

    @staticmethod
    def _halve(module: nn.Module, entries: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        entries[prefix + "weight"] = entries[prefix + "weight"].detach().half()

    @staticmethod
    def _note(module: nn.Module, entries: dict[str, torch.Tensor], *_: object) -> None:
        cast("Half", module).loaded += list(entries)


def test_tensors_made_by_a_hook_go_through_load_state_dict() -> None:
    source, target = Half(), Half()
    checkpoint = save({"m": source})
    assert checkpoint.dtypes == {"m.weight": "float16", "m.bias": "float32"}
    load(checkpoint, {"m": target})
    assert torch.equal(target.weight, source.weight.half().float())
    assert torch.equal(target.bias, source.bias)
    assert target.loaded == ["weight", "bias"]


class Detaching(nn.Linear):
    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"weight": self.weight.detach(), "bias": self.bias.detach()}


def test_an_overridden_state_dict_is_written_in_place_where_it_shows_live_memory() -> None:
    source, target = Detaching(2, 3), Detaching(2, 3)
    held = target.weight.data_ptr()
    load(save({"m": source}), {"m": target})
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)
    assert target.weight.data_ptr() == held


class Failing(Extra):
    def set_extra_state(self, state: object) -> None:
        raise RuntimeError("no")


def test_a_failing_load_is_named() -> None:
    with pytest.raises(StateError, match="'m'") as caught:
        load(save({"m": Extra(1)}), {"m": Failing(1)})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_modules_lie_anywhere_in_the_state() -> None:
    state = {"nets": {"g": net(0), "d": [net(1), net(2)]}, "n": 1}
    assert "nets.d.1.0.weight" in save(state).tensors
    target = {"nets": {"g": net(3), "d": [net(4), net(5)]}, "n": None}
    load(save(state), target)
    same_weights(target["nets"]["d"][1], net(2))  # type: ignore[index]
    assert target["n"] == 1


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'m\.0\.weight' is not initialized") as caught:
        describe({"m": nn.Sequential(nn.LazyLinear(2))})
    assert "forward pass" in str(caught.value)


def test_meta_parameters_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'m\.weight' is on the meta device"):
        describe({"m": nn.Linear(2, 2, device="meta")})
    with pytest.raises(UnsupportedStateError, match=r"'m\.weight' is on the meta device"):
        prepare({"m": nn.Linear(2, 2, device="meta")}, stored(save({"m": nn.Linear(2, 2)})))


def test_wrapper_names_that_collide_are_refused_with_both_paths() -> None:
    model = nn.Module()
    model.module = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.ones(1, 1))
    with pytest.raises(CollisionError) as caught:
        describe({"m": model})
    assert "state['m']['weight']" in str(caught.value)
    assert "state['m']['module.weight']" in str(caught.value)


def test_describe_and_prepare_leave_a_module_as_it_is() -> None:
    model = nn.Sequential(net(0), Extra({"a": [1]}), Half(), Tied())
    state = {"m": model, "compiled": torch.compile(net(1))}
    before = fingerprint(state)
    checkpoint = save(state)
    assert fingerprint(state) == before
    prepare(state, stored(checkpoint))
    assert fingerprint(state) == before


def test_memory_outlives_a_swap_of_a_parameters_data() -> None:
    model = nn.Linear(64, 64)
    expected = model.weight.detach().clone()
    described = describe({"m": model})
    model.half()
    from reference import store

    checkpoint = store(described)
    assert checkpoint.tensors["m.weight"].tobytes() == expected.numpy().tobytes()
