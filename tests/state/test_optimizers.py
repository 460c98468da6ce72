"""Optimizers resume bit-exactly, whatever the order of their parameters, without a dummy step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from reference import Checkpoint, fingerprint, load, save, stored
from torch import nn

from flowstone.errors import CollisionError, StateError, UnsupportedStateError
from flowstone.state import PerRank, Shard, StateDifference, describe, prepare
from strategies import assert_same

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    parameter = next(model.parameters())
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(5, 4, generator=generator).to(parameter.dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    layers = [layer for layer in model if list(layer.parameters())]  # type: ignore[attr-defined]
    return [{"params": list(layer.parameters()), "lr": 0.01 * (i + 1)} for i, layer in enumerate(layers)]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "SGD momentum": lambda m: torch.optim.SGD(groups_of(m), 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(groups_of(m), 0.01, amsgrad=True),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
    "Adam tensor lr": lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.01), capturable=False, foreach=False),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), 0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), 0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.5),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), 0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), 0.5, max_iter=3, line_search_fn="strong_wolfe"),
}


def same(record: dict[str, object], other: dict[str, object]) -> None:
    """Compare models and optimizers of two states."""
    assert_same(dict(record["model"].state_dict()), dict(other["model"].state_dict()))  # type: ignore[attr-defined]
    a, b = (state["optimizer"].state_dict() for state in (record, other))  # type: ignore[attr-defined]
    assert a["state"].keys() == b["state"].keys()
    for key in a["state"]:
        assert_same(dict(sorted(a["state"][key].items())), dict(sorted(b["state"][key].items())), f"state {key}")
    assert_same(
        [dict(sorted(group.items())) for group in a["param_groups"]],
        [dict(sorted(group.items())) for group in b["param_groups"]],
    )


def trained(make: Make, steps: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    torch.manual_seed(0)
    model = net(dtype)
    optimizer = make(model)
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("warm", [0, 2], ids=["fresh", "warmed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_interrupted(name: str, warm: int) -> None:
    state = trained(OPTIMIZERS[name])
    checkpoint = save(state)
    torch.manual_seed(1)
    model = net()
    target = {"model": model, "optimizer": OPTIMIZERS[name](model)}
    if warm:
        train(model, target["optimizer"], warm, start=100)  # type: ignore[arg-type]
    restoration = load(checkpoint, target)
    assert restoration.notes == ()
    same(target, state)
    train(state["model"], state["optimizer"], 3, start=3)  # type: ignore[arg-type]
    train(target["model"], target["optimizer"], 3, start=3)  # type: ignore[arg-type]
    same(target, state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_describe_and_prepare_change_nothing(name: str) -> None:
    state = trained(OPTIMIZERS[name])
    before = fingerprint(state["optimizer"], state["model"])  # type: ignore[attr-defined]
    checkpoint = save(state)
    prepare(state, stored(checkpoint))
    assert fingerprint(state["optimizer"], state["model"]) == before  # type: ignore[attr-defined]
    model = net()
    fresh = {"model": model, "optimizer": OPTIMIZERS[name](model)}
    before = fingerprint(fresh["optimizer"], fresh["model"])  # type: ignore[attr-defined]
    prepare(fresh, stored(checkpoint))
    assert fingerprint(fresh["optimizer"], fresh["model"]) == before  # type: ignore[attr-defined]


def adam(parameters: object, **options: object) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, 0.01, **options)  # type: ignore[arg-type]


def test_slots_are_named_by_the_parameters_full_path() -> None:
    state = trained(lambda m: adam(m.parameters()))
    names = set(save(state).tensors) - {f"model.{name}" for name, _ in state["model"].named_parameters()}  # type: ignore[attr-defined]
    slots = ("step", "exp_avg", "exp_avg_sq")
    assert names == {f"optimizer.state.model.{p}.{slot}" for p in ("0.weight", "0.bias", "2.weight") for slot in slots}


def test_optimizer_state_is_lazy_and_optimizers_are_listed() -> None:
    state = trained(lambda m: adam(m.parameters()))
    described = describe({**state, "nested": [state["optimizer"]]} | {"x": torch.ones(1)})
    assert described.optimizers == (state["optimizer"],)
    eager = {piece.name for piece, lazy in zip(described.pieces, described.lazy, strict=True) if not lazy}
    assert eager == {"x"}


def test_tensor_slots_cost_the_objects_nothing() -> None:
    objects = describe(trained(lambda m: adam(m.parameters()))).objects["optimizer"]
    assert objects["state"] == {}  # type: ignore[index]


def test_parameters_in_another_order_resume() -> None:
    state = trained(lambda m: adam(m.parameters()))
    model = net()
    target = {"model": model, "optimizer": adam(list(model.parameters())[::-1])}
    load(save(state), target)
    train(state["model"], state["optimizer"], 2, start=3)  # type: ignore[arg-type]
    train(model, target["optimizer"], 2, start=3)  # type: ignore[arg-type]
    assert_same(dict(model.state_dict()), dict(state["model"].state_dict()))  # type: ignore[attr-defined]


def test_groups_in_another_order_get_their_own_settings() -> None:
    state = trained(lambda m: adam(groups_of(m)))
    model = net()
    target = {"model": model, "optimizer": adam([{**group, "lr": 9.0} for group in groups_of(model)[::-1]])}
    load(save(state), target)
    assert [group["lr"] for group in target["optimizer"].param_groups] == [0.02, 0.01]  # type: ignore[attr-defined]
    train(state["model"], state["optimizer"], 2, start=3)  # type: ignore[arg-type]
    train(model, target["optimizer"], 2, start=3)  # type: ignore[arg-type]
    assert_same(dict(model.state_dict()), dict(state["model"].state_dict()))  # type: ignore[attr-defined]


def differences(checkpoint: Checkpoint, target: dict[str, object]) -> list[StateDifference]:
    return list(prepare(target, stored(checkpoint)).differences)


def test_a_group_without_match_is_a_difference_on_both_sides() -> None:
    checkpoint = save(trained(lambda m: adam(groups_of(m))))
    model = net()
    changes = differences(checkpoint, {"model": model, "optimizer": adam(model.parameters())})
    assert [(d.kind, d.name) for d in changes] == [
        ("unexpected", "optimizer.param_groups.0"),
        ("unexpected", "optimizer.param_groups.1"),
        ("missing", "optimizer.param_groups.0"),
    ]
    assert "a group of 3: model.0.bias, model.0.weight, model.2.weight" in changes[2].expected


def test_identity_of_slots_and_groups_is_kept() -> None:
    state = trained(lambda m: adam(m.parameters()))
    optimizer = state["optimizer"]
    held = [dict(slots) for slots in optimizer.state.values()]  # type: ignore[attr-defined]
    group = optimizer.param_groups[0]  # type: ignore[attr-defined]
    checkpoint = save(state)
    train(state["model"], optimizer, 1, start=9)  # type: ignore[arg-type]
    load(checkpoint, state)
    assert optimizer.param_groups[0] is group  # type: ignore[attr-defined]
    for slots, before in zip(optimizer.state.values(), held, strict=True):  # type: ignore[attr-defined]
        assert all(slots[name] is before[name] for name in before)


def test_slots_that_the_checkpoint_lacks_are_removed() -> None:
    model = net()
    checkpoint = save({"model": model, "optimizer": adam(model.parameters())})
    state = trained(lambda m: adam(m.parameters()))
    load(checkpoint, state)
    assert len(state["optimizer"].state) == 0  # type: ignore[attr-defined]


def test_one_slot_that_the_checkpoint_lacks_is_removed() -> None:
    state = trained(lambda m: adam(m.parameters()))
    checkpoint = save(state)
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["extra"] = torch.ones(2)
        slots["note"] = 3
    load(checkpoint, state)
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        assert set(slots) == {"step", "exp_avg", "exp_avg_sq"}


def test_moments_keep_their_own_dtype() -> None:
    state = trained(lambda m: adam(m.parameters(), foreach=False), dtype=torch.bfloat16)
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        slots["exp_avg"] = torch.randn(slots["exp_avg"].shape, dtype=torch.float32)
        slots["master"] = torch.randn(slots["exp_avg"].shape, dtype=torch.float64)
    for hooked in (False, True):
        model = net(torch.bfloat16)
        target = {"model": model, "optimizer": adam(model.parameters())}
        if hooked:
            target["optimizer"].register_load_state_dict_post_hook(lambda _: None)
        load(save(state), target)
        for one, other in zip(target["optimizer"].state.values(), state["optimizer"].state.values(), strict=True):  # type: ignore[attr-defined]
            assert_same(dict(sorted(one.items())), dict(sorted(other.items())))


def test_new_slots_take_the_parameters_layout() -> None:
    def make() -> dict[str, object]:
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return {"model": model, "optimizer": adam(model.parameters())}

    state = make()
    state["model"](torch.randn(1, 3, 4, 4)).sum().backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]
    target = make()
    load(save(state), target)
    weight = target["model"].weight  # type: ignore[attr-defined]
    slots = target["optimizer"].state[weight]  # type: ignore[attr-defined]
    assert slots["exp_avg"].stride() == weight.stride() != torch.empty(weight.shape).stride()
    assert torch.equal(slots["exp_avg"], state["optimizer"].state[state["model"].weight]["exp_avg"])  # type: ignore[attr-defined]


def test_a_tensor_lr_is_written_in_place() -> None:
    def make(lr: float) -> dict[str, object]:
        model = net()
        return {"model": model, "optimizer": torch.optim.Adam(groups(model), torch.tensor(lr), foreach=False)}

    def groups(model: nn.Module) -> list[dict[str, object]]:
        return [{"params": [p]} for p in model.parameters()]

    checkpoint = save(make(0.25))
    assert checkpoint.tied == {f"optimizer.param_groups.{i}.lr": "optimizer.param_groups.0.lr" for i in (1, 2)}
    target = make(0.5)
    held = target["optimizer"].param_groups[0]["lr"]  # type: ignore[attr-defined]
    load(checkpoint, target)
    assert all(group["lr"] is held for group in target["optimizer"].param_groups)  # type: ignore[attr-defined]
    assert held.item() == 0.25


def test_a_tensor_lr_replaces_a_number_and_the_other_way_round() -> None:
    model = net()
    numbers = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.5)}
    tensors = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), torch.tensor(0.25), foreach=False)}
    of_numbers, of_tensors = save(numbers), save(tensors)
    load(of_tensors, numbers)
    assert torch.equal(numbers["optimizer"].param_groups[0]["lr"], torch.tensor(0.25))
    load(of_numbers, tensors)
    assert tensors["optimizer"].param_groups[0]["lr"] == 0.5
    assert type(tensors["optimizer"].param_groups[0]["lr"]) is float


def test_settings_that_the_checkpoint_lacks_are_kept_and_noted() -> None:
    model = net()
    state = {"model": model, "optimizer": adam(model.parameters())}
    checkpoint = save(state)
    state["optimizer"].param_groups[0]["later"] = 5
    notes = load(checkpoint, state).notes
    assert state["optimizer"].param_groups[0]["later"] == 5
    assert notes == ("optimizer.param_groups.0: later not in the checkpoint: left unchanged",)


def test_a_tied_parameter_is_found_under_each_of_its_names() -> None:
    class Net(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            self.register_parameter(first, nn.Parameter(torch.ones(3)))
            self.register_parameter(second, getattr(self, first))

    def make(first: str, second: str) -> dict[str, object]:
        model = Net(first, second)
        model.a.grad = torch.ones(3)
        optimizer = adam(model.parameters())
        return {"model": model, "optimizer": optimizer}

    state = make("a", "b")
    state["optimizer"].step()  # type: ignore[attr-defined]
    target = make("b", "a")
    load(save(state), target)
    assert target["optimizer"].state[target["model"].a]["step"] == 1  # type: ignore[attr-defined]


def test_plain_tensors_of_the_state_can_be_parameters() -> None:
    def make() -> dict[str, object]:
        vectors = {"w": [torch.ones(3, requires_grad=True)]}
        return {"opt": adam(vectors["w"]), "vectors": vectors}

    state = make()
    state["vectors"]["w"][0].sum().backward()  # type: ignore[index]
    state["opt"].step()  # type: ignore[attr-defined]
    checkpoint = save(state)
    assert "opt.state.vectors.w.0.exp_avg" in checkpoint.tensors
    target = make()
    load(checkpoint, target)
    assert target["opt"].state[target["vectors"]["w"][0]]["step"] == 1  # type: ignore[attr-defined, index]


def test_a_parameter_outside_the_state_goes_by_its_group_name() -> None:
    model = net()
    optimizer = adam(list(model.named_parameters()))
    train(model, optimizer, 1)
    checkpoint = save({"optimizer": optimizer})
    assert "optimizer.state.0.weight.exp_avg" in checkpoint.tensors
    other = net()
    target = adam(list(other.named_parameters())[::-1])
    load(checkpoint, {"optimizer": target})
    assert torch.equal(target.state[other[0].bias]["exp_avg"], optimizer.state[model[0].bias]["exp_avg"])
    assert target.param_groups[0]["param_names"] == ["2.weight", "0.bias", "0.weight"]


def test_a_parameter_without_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedStateError, match="parameter 0 of group 0 of 'optimizer' has no name") as caught:
        describe({"optimizer": adam(net().parameters())})
    assert "named_parameters()" in str(caught.value)


def test_two_parameters_of_one_name_are_refused() -> None:
    parameters = [("w", nn.Parameter(torch.ones(1)))], [("w", nn.Parameter(torch.ones(1)))]
    optimizer = adam([{"params": parameter} for parameter in parameters])
    with pytest.raises(CollisionError, match="'w'"):
        describe({"optimizer": optimizer})


class Nested(torch.optim.Optimizer):
    """Keeps preconditioners in lists and dicts, numbers, None, and state of no parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def warm(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "precond": [torch.randn(2, 2), {"left": torch.randn(3)}],
                    "step": 4,
                    "none": None,
                    "dotted.name": torch.randn(2),
                    7: torch.randn(1),
                    "buffer": torch.randn(p.shape),
                }
        self.state["global"] = {"count": 3, "table": torch.arange(3)}  # type: ignore[index]


def test_slots_of_any_form_survive() -> None:
    model, other = net(), net()
    optimizer, target = Nested(model.parameters()), Nested(other.parameters())
    optimizer.warm()
    checkpoint = save({"model": model, "optimizer": optimizer})
    load(checkpoint, {"model": other, "optimizer": target})
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert target.state[q].keys() == optimizer.state[p].keys()
        for slot in optimizer.state[p]:
            assert_same(target.state[q][slot], optimizer.state[p][slot])
    assert_same(target.state["global"], optimizer.state["global"])  # type: ignore[index]
    load(checkpoint, {"model": other, "optimizer": target})


class Custom(torch.optim.SGD):
    """Adds to its state_dict(), and has a load_state_dict() of its own."""

    rounds = 0

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "rounds": self.rounds, "table": torch.full((2,), float(self.rounds))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.rounds = state["rounds"]  # type: ignore[assignment]
        self.table = state["table"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def test_a_load_state_dict_of_its_own_gets_the_rebuilt_state() -> None:
    state = trained(lambda m: Custom(groups_of(m), 0.1, momentum=0.9))
    state["optimizer"].rounds = 6  # type: ignore[attr-defined]
    checkpoint = save(state)
    assert "optimizer.table" in checkpoint.tensors
    model = net()
    target = {"model": model, "optimizer": Custom([dict(g) for g in groups_of(model)[::-1]], 0.1, momentum=0.9)}
    load(checkpoint, target)
    assert target["optimizer"].rounds == 6
    assert torch.equal(target["optimizer"].table, torch.full((2,), 6.0))
    train(state["model"], state["optimizer"], 2, start=3)  # type: ignore[arg-type]
    train(model, target["optimizer"], 2, start=3)
    assert_same(dict(model.state_dict()), dict(state["model"].state_dict()))  # type: ignore[attr-defined]


def test_hooks_see_a_load() -> None:
    state = trained(lambda m: adam(m.parameters()))
    model = net()
    target = {"model": model, "optimizer": adam(model.parameters())}
    seen: list[int] = []
    target["optimizer"].register_load_state_dict_pre_hook(lambda _, tree: seen.append(len(tree["state"])))
    load(save(state), target)
    assert seen == [3]
    same(target, state)


def test_a_state_dict_that_fails_is_named() -> None:
    class Broken(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            raise RuntimeError("no")

    model = net()
    with pytest.raises(UnsupportedStateError, match="'optimizer'") as caught:
        describe({"model": model, "optimizer": Broken(model.parameters(), 0.1)})
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "tree", [{"state": {}, "param_groups": []}, {}, {"state": {0: 1}, "param_groups": [{"params": [0]}]}]
)
def test_a_state_dict_of_another_form_is_named(tree: dict[str, object]) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            return tree

    weights = {"w": torch.ones(1, requires_grad=True)}
    with pytest.raises(UnsupportedStateError, match="'optimizer'"):
        describe({**weights, "optimizer": Odd(weights.values(), 0.1)})


def test_a_load_state_dict_that_fails_is_named() -> None:
    class Broken(torch.optim.SGD):
        def load_state_dict(self, state: dict[str, object]) -> None:
            raise RuntimeError("no")

    model = net()
    state = {"model": model, "optimizer": Broken(model.parameters(), 0.1)}
    with pytest.raises(StateError, match="'optimizer'"):
        load(save(state), state)


@pytest.mark.parametrize(
    "other", [3, {"param_groups": []}, {"param_groups": [1], "state": {}, "shared": {}, "extra": {}}]
)
def test_another_kind_of_object_is_a_difference(other: object) -> None:
    model = net()
    changes = differences(
        save({"model": model, "optimizer": other}), {"model": model, "optimizer": adam(model.parameters())}
    )
    assert [(d.kind, d.name) for d in changes] == [("kind", "optimizer")]


def test_an_absent_optimizer_is_a_difference() -> None:
    model = net()
    changes = differences(save({"model": model}), {"model": model, "optimizer": adam(model.parameters())})
    assert [(d.kind, d.name) for d in changes] == [("missing", "optimizer")]


def test_renamed_modules_keep_their_slots() -> None:
    state = trained(lambda m: adam(m.parameters()))
    model = net()
    target = {"net": model, "optimizer": adam(model.parameters())}

    def rename(name: str) -> str:
        return name.replace("model.", "net.")

    load(save(state), target, rename=rename)
    assert_same(dict(model.state_dict()), dict(state["model"].state_dict()))  # type: ignore[attr-defined]
    assert target["optimizer"].state[model[0].weight]["step"] == 3


def test_renaming_the_module_alone_finds_its_slots_too() -> None:
    state = trained(lambda m: adam(m.parameters()))
    model = net()
    target = {"net": model, "optimizer": adam(model.parameters())}

    def rename(name: str) -> str:
        return "net." + name.removeprefix("model.") if name.startswith("model.") else name

    load(save(state), target, rename=rename)
    assert target["optimizer"].state[model[0].weight]["step"] == 3


def test_slots_of_a_sharded_parameter_are_sharded_alike() -> None:
    def make(offset: int) -> dict[str, object]:
        parameter = torch.arange(6.0).view(2, 3).add(offset).requires_grad_()
        parameter.grad = torch.full((2, 3), float(offset + 1))
        return {"w": Shard(parameter, (4, 3), (offset, 0)), "opt": adam([parameter])}

    checkpoint = None
    for rank, offset in enumerate((0, 2)):
        state = make(offset)
        state["opt"].step()  # type: ignore[attr-defined]
        checkpoint = save(state, rank=rank, into=checkpoint)
    assert checkpoint is not None
    assert checkpoint.tensors["opt.state.w.exp_avg"].shape == (4, 3, 4)
    assert checkpoint.tensors["opt.state.w.step"].shape == (4,)
    whole = {"w": torch.zeros(4, 3, requires_grad=True)}
    whole["opt"] = adam([whole["w"]])  # type: ignore[assignment]
    load(checkpoint, whole)
    assert whole["opt"].state[whole["w"]]["exp_avg"][:, 0].tolist() == pytest.approx([0.1, 0.1, 0.3, 0.3])  # type: ignore[attr-defined]
    part = make(1)
    load(checkpoint, part)
    slots = part["opt"].state[part["w"].tensor]  # type: ignore[attr-defined]
    assert slots["exp_avg"][:, 0].tolist() == pytest.approx([0.1, 0.3])
    assert slots["step"] == 1


def test_an_optimizer_of_every_ranks_own_survives() -> None:
    def make() -> dict[str, object]:
        model = net()
        return {"model": PerRank(model), "opt": PerRank(adam(model.parameters()))}

    states = [make(), make()]
    checkpoint = None
    for rank, state in enumerate(states):
        train(state["model"].value, state["opt"].value, rank + 1)  # type: ignore[attr-defined]
        checkpoint = save(state, rank=rank, into=checkpoint)
    assert checkpoint is not None
    target = make()
    load(checkpoint, target, rank=3)
    for one, other in zip(target["opt"].value.state.values(), states[1]["opt"].value.state.values(), strict=True):  # type: ignore[attr-defined]
        assert_same(dict(sorted(one.items())), dict(sorted(other.items())))
    assert_same(dict(target["model"].value.state_dict()), dict(states[1]["model"].value.state_dict()))  # type: ignore[attr-defined]


def adamw_state(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, 2, start=seed)
    return {"model": model, "optimizer": optimizer}


def slots_of(state: dict[str, object]) -> list[torch.Tensor]:
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return [slot for of in optimizer.state.values() for slot in of.values()]


def test_a_job_that_goes_on_keeps_its_slots_and_its_dictionaries() -> None:
    source, target = adamw_state(1), adamw_state(2)
    optimizer = target["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    dictionaries, before = list(optimizer.state.values()), slots_of(target)
    load(save(source), target)
    assert all(first is other for first, other in zip(optimizer.state.values(), dictionaries, strict=True))
    assert all(slot is other for slot, other in zip(slots_of(target), before, strict=True))
    assert_same(slots_of(target), slots_of(source))


def test_slots_that_state_dict_only_copies_are_put_into_the_optimizer() -> None:
    """Bytes go into what state_dict() shows; where that is not what the optimizer has, it gets these."""
    source, target = adamw_state(1), adamw_state(2)
    optimizer = target["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)

    def copied(_: torch.optim.Optimizer, tree: dict[str, dict[int, dict[str, torch.Tensor]]]) -> None:
        for number, slots in tree["state"].items():
            tree["state"][number] = {key: slot.clone() for key, slot in slots.items()}

    optimizer.register_state_dict_post_hook(copied)
    load(save(source), target)
    assert_same(slots_of(target), slots_of(source))


def test_one_slot_more_or_less_in_the_checkpoint_is_followed() -> None:
    for changed in ("source", "target"):
        states = {"source": adamw_state(1), "target": adamw_state(2)}
        optimizer = states[changed]["optimizer"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        first = next(iter(optimizer.state.values()))
        first["extra"] = torch.full((3,), 7.0)
        load(save(states["source"]), states["target"])
        assert_same(slots_of(states["target"]), slots_of(states["source"]))
