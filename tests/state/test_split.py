"""Tensor subclasses are saved as their inner tensors, and restored into them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
import torch
from reference import Checkpoint, fingerprint, load, save, stored
from torch.testing._internal.two_tensor import TwoTensor

import flowstone as fs
from flowstone.errors import ProviderError, UnsupportedStateError
from flowstone.format.objects import TensorRef
from flowstone.state import describe, prepare
from quantised import Momentum8, Net, RowInt8


def two(seed: int = 0, rows: int = 3) -> TwoTensor:
    made = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(rows, 4, generator=made), torch.randn(rows, 4, generator=made))


def same(value: object, other: object) -> bool:
    """Bit for bit, in all components."""
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        assert (names, context) == other.__tensor_flatten__()  # type: ignore[attr-defined]
        return all(same(getattr(value, name), getattr(other, name)) for name in names)
    return torch.equal(value, other)  # type: ignore[arg-type]


def kinds(target: object, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    return [(d.kind, d.name) for d in prepare({"s": target}, stored(checkpoint)).differences]


def trained(seed: int, steps: int = 3) -> tuple[Net, Momentum8]:
    model = Net(seed)
    optimizer = Momentum8([p for p in model.parameters() if p.requires_grad])
    advance(model, optimizer, steps)
    return model, optimizer


def advance(model: Net, optimizer: Momentum8, steps: int) -> list[float]:
    losses = []
    torch.manual_seed(steps)
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [two, lambda seed: RowInt8.of(torch.randn(3, 4, generator=torch.manual_seed(seed)))])
@pytest.mark.parametrize("hold", [lambda t: t, lambda t: [t, 1], lambda t: {"a": {"b": t}, "c": torch.ones(1)}])
def test_components_are_restored_in_place(make: Any, hold: Any) -> None:
    source, target = make(0), make(1)
    addresses = [getattr(target, name).data_ptr() for name in target.__tensor_flatten__()[0]]
    held = {"s": hold(target)}
    load(save({"s": hold(source)}), held)
    assert same(target, source)
    assert [getattr(target, name).data_ptr() for name in target.__tensor_flatten__()[0]] == addresses


def test_names_are_those_of_the_components() -> None:
    model = Net()
    described = describe({"model": model, "o": torch.optim.SGD([{"params": [param]} for param in model.parameters()])})
    assert [piece.name for piece in described.pieces] == [
        "model.base.weight.codes", "model.base.weight.scale", "model.base.bias", "model.head.weight", "model.head.bias",
    ]
    assert described.lazy == (True,) * 5, "the components of a parameter change when it does"
    assert describe({"b": RowInt8.of(torch.ones(2, 2))}).lazy == (False, False)


def test_a_quantised_model_goes_on_as_if_never_interrupted() -> None:
    model, optimizer = trained(0)
    checkpoint = save({"model": model, "optimizer": optimizer})
    assert "optimizer.state.model.head.weight.momentum.codes" in checkpoint.tensors
    other, fresh = Net(1), None
    fresh = Momentum8([p for p in other.parameters() if p.requires_grad])
    with fs.register_provider(RowInt8, fs.SplitTensor(RowInt8)):
        load(checkpoint, {"model": other, "optimizer": fresh})
    momentum = fresh.state[other.head.weight]["momentum"]
    assert same(momentum, optimizer.state[model.head.weight]["momentum"])
    assert same(other.base.weight.data, model.base.weight.data)
    assert advance(other, fresh, 4) == advance(model, optimizer, 4)


def test_the_slots_of_an_optimizer_that_has_them_are_restored_in_place_without_registration() -> None:
    model, optimizer = trained(0)
    other, target = trained(1)
    held = target.state[other.head.weight]["momentum"]
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": target})
    assert target.state[other.head.weight]["momentum"] is held
    assert same(held, optimizer.state[model.head.weight]["momentum"])
    described = describe({"m": model, "o": optimizer})
    late = {piece.name for piece, lazy in zip(described.pieces, described.lazy, strict=True) if lazy}
    assert late == {piece.name for piece in described.pieces if piece.name.startswith(("m.head.", "m.base.bias", "o."))}


def test_slots_of_a_type_that_nobody_registered_are_a_difference() -> None:
    model, optimizer = trained(0)
    checkpoint = save({"model": model, "optimizer": optimizer})
    other = Net(1)
    fresh = Momentum8([p for p in other.parameters() if p.requires_grad])
    differences = prepare({"model": other, "optimizer": fresh}, stored(checkpoint)).differences
    assert [(d.kind, d.name) for d in differences] == [("kind", "optimizer.state.model.head.weight.momentum")]
    assert "quantised.RowInt8" in differences[0].stored
    assert "register" in differences[0].stored


def test_a_dense_slot_and_a_split_one_are_not_the_same() -> None:
    model, optimizer = trained(0)
    other, target = trained(1)
    target.state[other.head.weight]["momentum"] = torch.zeros(3, 5)
    name = "optimizer.state.model.head.weight.momentum"
    state, plain = {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": target}
    for here, there in ((state, plain), (plain, state)):
        differences = prepare(here, stored(save(there))).differences
        assert [(d.kind, d.name) for d in differences] == [("kind", name)]


def test_a_plain_tensor_and_a_component_of_the_same_memory_are_tied() -> None:
    value = two()
    checkpoint = save({"a": value, "b": value.a, "c": {"again": value}})
    assert checkpoint.tied == {"b": "a.a", "c.again.a": "a.a", "c.again.b": "a.b"}
    target = two(1)
    load(checkpoint, {"a": target, "b": target.a, "c": {"again": target}})
    assert same(target, value)
    apart = torch.zeros(3, 4)
    load(checkpoint, {"a": two(2), "b": apart, "c": {"again": two(3)}})
    assert torch.equal(apart, value.a)


def test_tied_quantised_parameters_are_stored_once() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)])
    model[0].weight = model[1].weight = torch.nn.Parameter(RowInt8.of(torch.randn(4, 4)), requires_grad=False)
    checkpoint = save({"m": model})
    assert checkpoint.tied == {"m.1.weight.codes": "m.0.weight.codes", "m.1.weight.scale": "m.0.weight.scale"}
    load(checkpoint, {"m": model})


def test_tensors_of_tensors_of_tensors_are_split_to_the_ground() -> None:
    source, target = (TwoTensor(two(seed), two(seed + 1)) for seed in (0, 5))
    checkpoint = save({"s": source})
    assert list(checkpoint.tensors) == ["s.a.a", "s.a.b", "s.b.a", "s.b.b"]
    load(checkpoint, {"s": target})
    assert same(target, source)


def test_a_graph_that_saved_the_old_values_notices() -> None:
    target = {"s": two()}
    leaf = torch.ones(3, 4, requires_grad=True)
    product = (leaf * target["s"].a).sum()
    versions = [item._version for item in (target["s"], target["s"].a, target["s"].b)]
    load(save({"s": two(1)}), target)
    now = [item._version for item in (target["s"], target["s"].a, target["s"].b)]
    assert all(after > before for before, after in zip(versions, now, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_what_differs_is_listed_by_path_and_nothing_changes() -> None:
    checkpoint = save({"s": {"w": RowInt8.of(torch.randn(3, 4)), "n": 1, "t": torch.ones(1)}})
    codes = RowInt8.of(torch.randn(3, 4))
    unsigned = RowInt8(codes.codes, codes.scale, torch.float32, signed=False)
    target = {"w": unsigned, "n": 1, "t": torch.ones(1)}
    before = fingerprint(codes.codes, codes.scale)
    differences = prepare({"s": target}, stored(checkpoint)).differences
    assert [(d.kind, d.name) for d in differences] == [("kind", "s.w.outer")]
    assert (differences[0].expected, differences[0].stored) == ("context signed False", "context signed True")
    assert fingerprint(codes.codes, codes.scale) == before
    wider = {"w": RowInt8.of(torch.randn(3, 5)), "n": 1, "t": torch.ones(1)}
    assert kinds(wider, checkpoint) == [("kind", "s.w.outer")]  # and the codes' shape, which is found with all tensors'
    assert kinds({"w": two(), "n": 1, "t": torch.ones(1)}, checkpoint) == [("kind", "s.w")]
    assert kinds({"w": torch.ones(3, 4), "n": 1, "t": torch.ones(1)}, checkpoint) == [("kind", "s.w")]
    assert kinds({"w": None, "n": 1, "t": torch.ones(1)}, checkpoint) == [("kind", "s.w")]
    assert kinds({"n": 1, "t": torch.ones(1)}, checkpoint) == []  # its tensors are left over, found with all others


def test_a_quantised_parameter_and_a_dense_one_differ_by_path() -> None:
    dense = Net(1)
    dense.base.weight = torch.nn.Parameter(torch.ones(5, 6))
    for here, there in ((Net(), dense), (dense, Net())):
        differences = prepare({"m": here}, stored(save({"m": there}))).differences
        assert [(d.name, d.kind in ("kind", "missing")) for d in differences] == [("m.base.weight", True)]


def test_a_state_dict_and_its_module_load_each_other() -> None:
    entries = Net(1).state_dict()
    load(save({"m": Net()}), {"m": entries})
    assert same(entries["base.weight"], Net().base.weight.detach())
    model = Net(2)
    load(save({"m": Net().state_dict()}), {"m": model})
    assert same(model.base.weight.detach(), Net().base.weight.detach())


def test_a_module_whose_state_dict_is_its_own_is_handed_tensors_like_its_own() -> None:
    class Own(Net):
        def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
            entries = super().state_dict(*args, **more)
            return {key: type(value)(value.codes.clone(), value.scale.clone(), value.dtype)
                    if isinstance(value, RowInt8) else value for key, value in entries.items()}

    target = Own(1)
    load(save({"m": Own(0)}), {"m": target})
    assert same(target.base.weight.detach(), Net(0).base.weight.detach())


class Keeper:
    """Holds whatever it is given."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def test_a_tensor_may_become_another_under_its_identity() -> None:
    value = two()
    with fs.register_provider(TwoTensor, fs.SplitTensor(TwoTensor)):
        assert describe({"s": value}).pieces[0].shape == (3, 4)
        torch.utils.swap_tensors(value, two(rows=5))  # refused where somebody watches
        assert describe({"s": value}).pieces[0].shape == (5, 4)


def test_tensors_in_a_loaders_tree_are_made_of_a_registered_type() -> None:
    checkpoint = save({"s": Keeper([two(), 5])})
    assert kinds(Keeper(), checkpoint) == [("kind", "s.value.0")]
    target = Keeper()
    with fs.register_provider(TwoTensor, fs.SplitTensor(TwoTensor)):
        load(checkpoint, {"s": target})
    assert same(target.value[0], two())  # type: ignore[index]


class Grain(enum.Enum):
    ROW = 1
    BLOCK = 2


@dataclasses.dataclass
class Recipe:
    grain: Grain
    bits: int = 8


class Told(TwoTensor):
    """A pair with a context that no JSON has."""

    context: object = None

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["a", "b"], self.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: object, size: object, stride: object) -> Told:
        return told(context, inner["a"], inner["b"])


def told(context: object, *parts: torch.Tensor) -> Told:
    made = Told(*(parts or (torch.ones(2), torch.ones(2))))
    made.context = context
    return made


def test_enumerations_and_dataclasses_in_a_context_are_compared() -> None:
    context = {"recipe": Recipe(Grain.ROW), "kinds": (Grain.BLOCK, torch.int8)}
    checkpoint = save({"s": told(context)})
    assert kinds(told(context), checkpoint) == []
    load(checkpoint, {"s": told(context)})
    for other in ({**context, "recipe": Recipe(Grain.BLOCK)}, {**context, "recipe": Recipe(Grain.ROW, 4)}, {}):
        assert kinds(told(other), checkpoint) == [("kind", "s.outer")]


def test_no_tensor_is_made_of_a_context_that_a_file_cannot_tell() -> None:
    with fs.register_provider(Told, fs.SplitTensor(Told)):
        checkpoint = save({"s": Keeper(told(Recipe(Grain.ROW)))})
        differences = prepare({"s": Keeper()}, stored(checkpoint)).differences
        assert [(d.kind, d.name) for d in differences] == [("kind", "s.value")]
        assert "test_split.Recipe" in differences[0].stored
        nested = save({"s": Keeper(told(None, two(), two()))})
        assert "themselves made of tensors" in prepare({"s": Keeper()}, stored(nested)).differences[0].stored
    base = save({"s": Keeper(two())})
    base.objects["s"] = base.objects["s"].replace('"type": "torch.testing._internal.two_tensor.', '"type": "')
    with fs.register_provider(TwoTensor, fs.SplitTensor(TwoTensor)):
        assert "it is a TwoTensor" in prepare({"s": Keeper()}, stored(base)).differences[0].stored


def test_a_context_that_cannot_be_stored_is_refused_by_path() -> None:
    with pytest.raises(ProviderError, match=r"'s\.w'") as caught:
        _ = describe({"s": {"w": told(lambda: 1)}}).objects
    assert "function" in str(caught.value)
    assert "outer.context" in str(caught.value)


def test_a_provider_of_ones_own_knows_another_context() -> None:
    class Knows(fs.SplitTensor):
        def context_of(self, value: torch.Tensor) -> object:
            return value.context.__name__  # type: ignore[attr-defined]

    def recipe() -> None: ...

    with fs.register_provider(Told, Knows(Told)):
        checkpoint = save({"s": told(recipe)})
        load(checkpoint, {"s": told(recipe)})
        assert kinds(told(print), checkpoint) == [("kind", "s.outer")]


def test_what_does_not_split_is_refused_as_before() -> None:
    class Bare(torch.Tensor):
        pass

    with pytest.raises(UnsupportedStateError, match=r"'s\.a' is a kind of tensor"):
        describe({"s": {"a": torch.ones(2).as_subclass(Bare)}})
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(UnsupportedStateError, match="'s'"):
        describe({"s": jagged})
    with pytest.raises(TypeError, match="__tensor_flatten__"):
        fs.SplitTensor(Bare)


def test_every_rank_keeps_its_own() -> None:
    checkpoint = Checkpoint()
    for rank in range(2):
        save({"s": fs.PerRank({"w": two(rank)})}, rank=rank, into=checkpoint)
    for rank in range(3):
        target = two(9)
        load(checkpoint, {"s": fs.PerRank({"w": target})}, rank=rank)
        assert same(target, two(rank % 2))


def test_references_are_found_after_a_rename() -> None:
    checkpoint = save({"old": [two()]})
    checkpoint.objects = {"new": checkpoint.objects["old"]}
    target = two(1)
    load(checkpoint, {"new": [target]}, rename=lambda name: name.replace("old", "new"))
    assert same(target, two())


def test_an_optimizer_over_a_split_tensor_outside_a_module_names_it() -> None:
    weight = torch.nn.Parameter(two())
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, foreach=False)
    weight.grad = two(3)
    optimizer.step()
    checkpoint = save({"w": [weight], "o": optimizer})
    assert "o.state.w.0.momentum_buffer.a" in checkpoint.tensors


def test_parts_refer_to_the_index() -> None:
    node = describe({"s": two()}).objects["s"]
    assert node.parts == {"a": TensorRef("s.a", "tensor"), "b": TensorRef("s.b", "tensor")}  # type: ignore[attr-defined]
