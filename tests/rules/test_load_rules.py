"""Loads by layout rules: the tensors that numpy computes, in a state's memory, verified, and back again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import flowstone as fs
from flowstone.config import READ_ARENA_BYTES
from forge import flip, place_of
from random_layout_rules import Arrays, by_numpy, expected, rules_in_a_row

ENGINE = fs.EngineOptions(backend="posix", direct="off", workers=1)


@st.composite
def memory_for(draw: st.DrawFn, array: np.ndarray) -> tuple[torch.Tensor, fs.Box]:
    """Memory for a box of an array: as it is, or with its dimensions in another order, and with gaps."""
    offset = tuple(draw(st.integers(0, side - 1)) for side in array.shape)
    box = fs.Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(array.shape, offset, strict=True)))
    if draw(st.booleans()):
        box = fs.Box.whole(array.shape)
    order = draw(st.permutations(range(array.ndim)))
    gap = draw(st.integers(1, 2))
    base = torch.full([box.shape[dim] * gap for dim in order], -1, dtype=torch.int32)
    return base[tuple([slice(None, None, gap)] * array.ndim)].permute(np.argsort(order).tolist()), box


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_load_does_what_numpy_does_and_the_inverse_undoes_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    noise = np.random.default_rng(4)
    arrays = {name: noise.integers(1, 1 << 20, shape).astype(np.int32) for name in ("a", "b", "c")}
    rules, expected = data.draw(rules_in_a_row(arrays))
    verify_first = data.draw(st.booleans())
    with fs.Checkpointer(tmp_path_factory.mktemp("rules"), engine=ENGINE) as checkpointer:
        checkpointer.save(1, {"model": {name: torch.from_numpy(array) for name, array in arrays.items()}})
        places = {name: data.draw(memory_for(array)) for name, array in expected.items()}
        state = {
            name: place if box == fs.Box.whole(expected[name].shape) else
            fs.Shard(place, expected[name].shape, box.offset) for name, (place, box) in places.items()
        }
        report = checkpointer.load({"model": state}, rules=fs.RuleSet(rules), verify_first=verify_first)
        assert set(report.matched) == {f"model.{name}" for name in expected}
        for name, (place, box) in places.items():
            assert np.array_equal(place.numpy(), expected[name][tuple(map(slice, box.offset, box.end))]), name
        checkpointer.save(2, {"model": {name: torch.from_numpy(np.array(array)) for name, array in expected.items()}})
        back = {name: torch.zeros(shape, dtype=torch.int32) for name in arrays}
        checkpointer.load({"model": back}, rules=fs.RuleSet(rules).inverse, verify_first=verify_first)
        assert all(np.array_equal(back[name].numpy(), arrays[name]) for name in arrays)


@pytest.mark.parametrize(("dim", "rules"), [
    (0, [fs.Fuse(("u.0", "u.1"), "f")]),
    (0, [fs.Fuse(("u.1", "u.2"), "f"), fs.Fuse(("f", "u.3"), "g", parts=(2, 1))]),
    (0, [fs.Transpose("u.0"), fs.Transpose("u.1"), fs.Fuse(("u.0", "u.1"), "f", 1)]),
    (0, [fs.Split("u.1", ("v.a", "v.b")), fs.Fuse(("u.0", "v.a"), "f", parts=(2, 1))]),
    (0, [fs.Unstack("u.2", "v.{e}"), fs.Unstack("u.3", "w.{e}"), fs.Fuse(("v.1", "w.0"), "f")]),
    (1, [fs.Fuse(("u.0", "u.1"), "f", 1)]),
])
def test_slices_that_are_fused_again_go_on_beyond_the_end_of_a_stored_dimension(
    tmp_path: Path, dim: int, rules: list[Any]
) -> None:
    array = np.arange(4 * 2 * 4, dtype=np.int32).reshape(4, 2, 4)
    rules = [fs.Unstack("a", "u.{e}", dim), *rules]
    expected = {"a": array}
    for rule in rules:
        expected = by_numpy(rule, expected)
    with fs.Checkpointer(tmp_path, engine=ENGINE) as checkpointer:
        checkpointer.save(1, {"model": {"a": torch.from_numpy(array)}})
        state = {name: torch.full(tensor.shape, -1, dtype=torch.int32) for name, tensor in expected.items()}
        checkpointer.load({"model": state}, rules=fs.RuleSet(rules))
    for name, values in expected.items():
        assert np.array_equal(state[name].numpy(), values), name


RULES = fs.RuleSet((
    fs.Split("l.{n}.qkv", ("l.{n}.q", "l.{n}.k", "l.{n}.v"), 0, (8, 2, 2), 2),
    fs.Transpose("l.{n}.q"),
    fs.Unstack("scanned", "s.{e}", 1),
    fs.Stack("l.{n}.e.{e}", "l.{n}.experts", 2),
    fs.Pad("embed", 301, 320),
    fs.Rename("l.{n}.norm", "norms.{n}"),
), complete=True)


def megabytes() -> Arrays:
    """Tensors of several chunks, which rules cut."""
    noise = np.random.default_rng(6)
    sides = {"l.0.qkv": (12 * 64, 1001), "l.1.qkv": (12 * 64, 1001), "scanned": (300, 7, 300), "embed": (301, 2000),
             "l.0.norm": (1001,), "l.1.norm": (1001,)} | {f"l.{n}.e.{e}": (40, 60) for n in (0, 1) for e in range(11)}
    return {name: noise.standard_normal(side).astype(np.float32) for name, side in sides.items()}


def after_rules(arrays: Arrays) -> Arrays:
    actual = {"embed": np.pad(arrays["embed"], ((0, 19), (0, 0)))}
    actual |= {f"s.{e}": arrays["scanned"][:, e] for e in range(7)}
    for n in (0, 1):
        q, k, v = expected(fs.Split("x", ("q", "k", "v"), 0, (8, 2, 2), 2), [arrays[f"l.{n}.qkv"]])
        actual |= {f"l.{n}.q": q.T, f"l.{n}.k": k, f"l.{n}.v": v, f"norms.{n}": arrays[f"l.{n}.norm"]}
        actual[f"l.{n}.experts"] = np.stack([arrays[f"l.{n}.e.{e}"] for e in range(11)], 2)
    return actual


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load-rules") / "run"
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"model": {name: torch.from_numpy(megabyte) for name, megabyte in megabytes().items()}})
    return path


@pytest.mark.parametrize("in_place", [False, True])
def test_chunks_that_rules_cut_arrive_where_numpy_has_them(run: Path, in_place: bool) -> None:
    expected = after_rules(megabytes())
    state = {name: torch.full(tensor.shape, -7.0) for name, tensor in expected.items()}
    engine = fs.EngineOptions(read_in_place=in_place)
    explained = fs.explain(fs.open(run), {"model": state}, rules=RULES)
    with fs.Checkpointer(run, engine=engine) as checkpointer:
        report = checkpointer.load({"model": state}, rules=RULES)
    for name, array in expected.items():
        assert np.array_equal(state[name].numpy(), array), name
    assert explained.differences == ()
    assert explained.peak_bytes == READ_ARENA_BYTES, "no copy beside the state"
    assert explained.bytes == sum(item.nbytes for item in expected.values())
    assert ("model.l.0.norm", "model.norms.0") in report.renamed
    made = dict(report.rearranged)
    assert made["model.l.1.experts"] == tuple(f"model.l.1.e.{e}" for e in range(11))
    assert made["model.l.0.q"] == ("model.l.0.qkv",)
    assert "model.norms.0" not in made


def test_values_are_converted_on_their_way(run: Path) -> None:
    expected = after_rules(megabytes())
    state = {name: torch.full(tensor.shape, -7.0, dtype=torch.bfloat16) for name, tensor in expected.items()}
    with fs.Checkpointer(run) as checkpointer:
        report = checkpointer.load({"model": state}, rules=[RULES, fs.Cast("model.*")])
    assert set(report.cast) == {f"model.{name}" for name in expected}
    for name, item in expected.items():
        assert torch.equal(state[name], torch.from_numpy(item.copy()).bfloat16()), name


def test_damage_is_found_and_the_tensor_made_of_it_named(run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run, tmp_path / "run")
    segment, offset = place_of(tmp_path / "run" / "step-00000001", "model.l.1.qkv")
    flip(segment, offset + (1 << 20) + 5)
    expected = after_rules(megabytes())
    for verify_first in (False, True):
        state = {name: torch.full(tensor.shape, -7.0) for name, tensor in expected.items()}
        with fs.Checkpointer(tmp_path / "run") as checkpointer:
            reported = pytest.raises(fs.DamagedError, match=r"'model.l.1.qkv', chunk 1")
            with reported as caught:
                checkpointer.load({"model": state}, rules=RULES, verify_first=verify_first)
        written = {name for name, tensor in state.items() if not bool((tensor == -7).all())}
        assert {f"model.{name}" for name in written} == set(caught.value.written)
        assert len(set(caught.value.written)) == len(caught.value.written)
        assert not verify_first or not written


SHAPES = {"a.0.w": (6, 4), "a.1.w": (6, 4), "a.2.w": (6, 4), "b": (5,), "c": (6, 3)}


@pytest.mark.parametrize(("rules", "state", "error", "message"), [
    (fs.Split("model.x", ("model.y", "model.z")), {}, fs.NoTensorError, r"Split.*matches no tensor"),
    (fs.Rename("model.b", "model.c"), {}, fs.MismatchError, "'model.c'"),
    ([fs.Rename("model.b", "model.c"), fs.Transpose("model.a.0.w")], {}, fs.CollisionError, "be called 'model.c'"),
    (fs.Split("model.b", ("model.c", "model.d"), parts=(2, 3)), {}, fs.CollisionError, "'model.c'"),
    (fs.Split("model.b", ("model.d", "model.e")), {}, fs.MismatchError, r"Split rule cannot be applied to 'model.b'"),
    (fs.Fuse(("model.b", "model.x"), "model.y"), {}, fs.MismatchError, r"cannot be fused[\s\S]*missing     model.x"),
    (fs.Stack("model.a.{n}.w", "model.a", 3), {}, fs.MismatchError, "a dimension 3"),
    (fs.RuleSet([fs.Rename("b", "d")], "mine", complete=True), {}, fs.MismatchError, "mine has no rule for 4 tensors"),
    (fs.Stack("model.a.{n}.w", "model.a"), {"a": (3, 6, 5)}, fs.MismatchError,
     r"shape       model.a: wanted \(3, 6, 5\), stored \(3, 6, 4\), which Stack.* makes from model.a.0.w, model.a.1.w"),
    (fs.Stack("model.a.{n}.w", "model.a"), {}, fs.MismatchError, "unexpected  model.a: in the checkpoint"),
    (fs.Unstack("model.c", "model.c.{n}", 1), {"c.0": (6,), "c.1": (6,), "c.2": (6,), "c.3": (6,)}, fs.MismatchError,
     "missing     model.c.3"),
    (fs.Transpose("model.b", (0,)), {"b": (5,), "c": (6, 4)}, fs.MismatchError, r"model.c: wanted \(6, 4\)"),
])
def test_what_does_not_fit_is_named_and_nothing_changes(
    tmp_path: Path, rules: Any, state: dict[str, tuple[int, ...]], error: type, message: str
) -> None:
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {name: torch.ones(shape) for name, shape in SHAPES.items()}})
        tensors = {name: torch.full(shape, -1.0) for name, shape in (SHAPES | state).items()}
        with pytest.raises(error, match=message):
            checkpointer.load({"model": tensors}, rules=rules)
        assert all(bool((tensor == -1).all()) for tensor in tensors.values())
        checkpointer.save(2, {"model": tensors})  # which a load that changed something would forbid


@pytest.mark.parametrize(("make", "pattern"), [
    (lambda: fs.Rename("a.{n}.{n}", "b.{n}"), "a.{n}.{n}"),
    (lambda: fs.Rename("b.{n}", "a.{n}.{n}"), "a.{n}.{n}"),
    (lambda: fs.Split("a.{n}.{n}", ("b.{n}", "c.{n}")), "a.{n}.{n}"),
    (lambda: fs.Fuse(("b.{n}", "c.{n}.{n}"), "a.{n}"), "c.{n}.{n}"),
    (lambda: fs.Stack("a.{n}.{e}", "b.{n}.{n}"), "b.{n}.{n}"),
    (lambda: fs.Unstack("b", "a.{e}.{e}"), "a.{e}.{e}"),
    (lambda: fs.Transpose("a.{n}.{n}"), "a.{n}.{n}"),
    (lambda: fs.Pad("a.{n}.{n}", 0, 3, 4), "a.{n}.{n}"),
    (lambda: fs.Unpad("a.{n}.{n}", 0, 3, 4), "a.{n}.{n}"),
])
def test_a_pattern_with_a_placeholder_twice_is_named(make: Callable[[], object], pattern: str) -> None:
    with pytest.raises(fs.ArgumentError) as caught:
        make()
    assert f"the pattern {pattern!r} has a placeholder twice" in caught.value.message
    assert "next" in caught.value.facts


def test_a_shape_that_claims_very_many_tensors_is_refused(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.zeros(1 << 40, 0)}}).committed.result()
        with pytest.raises(fs.MismatchError, match=r"Unstack rule cannot be applied to 'model.w'[\s\S]*at most"):
            checkpointer.load({"model": {"w.0": torch.zeros(0)}}, rules=fs.Unstack("model.w", "model.w.{n}"))
    with pytest.raises(fs.MismatchError, match="at most"):
        fs.export(tmp_path / "run", tmp_path / "hf", rules=fs.Unstack("model.w", "model.w.{n}"))


def test_a_set_speaks_of_the_section_that_it_is_given(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(3, 2)}, "other": {"w": torch.arange(6.0).view(3, 2)}}
    state = {"model": {"w": torch.zeros(3, 2)}, "other": {"w": torch.zeros(2, 3)}}
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
        checkpointer.load(state, rules=fs.RuleSet([fs.Transpose("w")], complete=True).below("other."))
    assert torch.equal(state["other"]["w"], saved["other"]["w"].T)
    assert torch.equal(state["model"]["w"], saved["model"]["w"])


def test_what_is_tied_stays_tied_through_rules(tmp_path: Path) -> None:
    weight, other = torch.randn(10, 4), torch.zeros(16, 4)
    rules = fs.RuleSet([fs.Pad("{which}", 10, 16), fs.Rename("embed", "tok")])
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"embed": weight, "head": weight}})
        checkpointer.load({"model": {"tok": other, "head": other}}, rules=rules)
        assert torch.equal(other[:10], weight)
        one_by_one = fs.RuleSet([fs.Pad("embed", 10, 16), fs.Pad("head", 10, 16), fs.Rename("embed", "tok")])
        checkpointer.load({"model": {"tok": other, "head": other}}, rules=one_by_one)
        checkpointer.save(2, {"model": {"embed": weight, "head": weight + 1}})
        with pytest.raises(fs.MismatchError, match=r"tied        model.(tok|head): shares memory"):
            checkpointer.load({"model": {"tok": other, "head": other}}, rules=rules)


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 8) for _ in range(4))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 6, bias=False)
        self.out.bias = nn.Parameter(torch.zeros(8))


JOIN = fs.RuleSet([
    *(fs.Fuse(tuple(f"{part}.{name}" for part in "qkv"), f"qkv.{name}") for name in ("weight", "bias")),
    fs.Transpose("out.weight"),
])


def trained(model: nn.Module, steps: int = 2, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> (
    torch.optim.Optimizer
):
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizer_state_follows_its_parameters_and_back(tmp_path: Path, kind: Any, is_fresh: bool) -> None:
    torch.manual_seed(0)
    kind = partial_sgd if kind is torch.optim.SGD else kind
    apart, joined, again = Apart(), Joined(), Apart()
    of_apart, of_joined, of_again = (
        trained(apart, kind=kind), trained(joined, 0 if is_fresh else 1, kind), trained(again, 0, kind)
    )
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": apart, "optimizer": of_apart})
        checkpointer.load({"model": joined, "optimizer": of_joined}, rules=JOIN)
        slots = of_joined.state[joined.qkv.weight]
        assert slots.keys() == of_apart.state[apart.q.weight].keys()
        for slot, value in slots.items():
            parts = [of_apart.state[part.weight][slot] for part in (apart.q, apart.k, apart.v)]
            assert torch.equal(value, torch.cat(parts) if parts[0].dim() else parts[0]), slot
            turned, straight = of_joined.state[joined.out.weight][slot], of_apart.state[apart.out.weight][slot]
            assert torch.equal(turned, straight.T if straight.dim() else straight)
        checkpointer.save(2, {"model": joined, "optimizer": of_joined})
        checkpointer.load({"model": again, "optimizer": of_again}, rules=JOIN.inverse)
    for parameter, other in zip(apart.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert of_apart.state[parameter].keys() == of_again.state[other].keys()
        for slot, value in of_apart.state[parameter].items():
            assert torch.equal(value, of_again.state[other][slot]), slot


def partial_sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def test_training_goes_on_after_rules_as_it_would_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    apart, joined = Apart(), Joined()
    of_apart, of_joined = trained(apart, 3), torch.optim.AdamW(joined.parameters(), lr=0.5)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": apart, "optimizer": of_apart})
        checkpointer.load({"model": joined, "optimizer": of_joined}, rules=JOIN)
    for parameter in apart.parameters():
        parameter.grad = torch.randn_like(parameter)
    joined.qkv.weight.grad = torch.cat([part.weight.grad for part in (apart.q, apart.k, apart.v)])
    joined.qkv.bias.grad = torch.cat([part.bias.grad for part in (apart.q, apart.k, apart.v)])
    joined.out.weight.grad, joined.out.bias.grad = apart.out.weight.grad.T.contiguous(), apart.out.bias.grad
    of_apart.step()
    of_joined.step()
    assert torch.equal(joined.qkv.weight, torch.cat([part.weight for part in (apart.q, apart.k, apart.v)]))
    assert torch.equal(joined.out.weight, apart.out.weight.T)


def one_step_more(model: Apart) -> torch.optim.Optimizer:
    optimizer = trained(model)
    optimizer.state[model.k.bias]["step"] += 1
    return optimizer


def two_groups(model: Apart) -> torch.optim.Optimizer:
    groups = [{"params": [*model.q.parameters(), *model.out.parameters()]},
              {"params": [*model.k.parameters(), *model.v.parameters()], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def without_slots(model: Apart) -> torch.optim.Optimizer:
    optimizer = trained(model)
    del optimizer.state[model.v.weight]
    return optimizer


@pytest.mark.parametrize(("make", "kind", "message"), [
    (one_step_more, torch.optim.AdamW, r"state values, but they differ[\s\S]*'optimizer.state.model.k.bias.step'"),
    (two_groups, torch.optim.AdamW, "optimizer.param_groups"),
    (without_slots, torch.optim.AdamW, r"cannot be fused[\s\S]*missing     optimizer.state.model.v.weight.step"),
    (lambda model: trained(model, kind=torch.optim.Adafactor), torch.optim.Adafactor,
     r"to its optimizer state 'optimizer.state.model.q.weight.row_var'[\s\S]*\(8, 1\); the parameter has \(8, 6\)"),
])
def test_optimizer_state_that_cannot_follow_is_named_and_may_be_left_out(
    tmp_path: Path, make: Callable[[Apart], torch.optim.Optimizer], kind: Any, message: str
) -> None:
    apart, joined = Apart(), Joined()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": apart, "optimizer": make(apart)})
        before = joined.qkv.weight.detach().clone()
        with pytest.raises(fs.MismatchError, match=message):
            checkpointer.load({"model": joined, "optimizer": trained(joined, 0, kind)}, rules=JOIN)
        assert torch.equal(joined.qkv.weight, before)
        checkpointer.load({"model": joined}, rules=JOIN)
    assert torch.equal(joined.qkv.weight[:8], apart.q.weight)


def test_slots_of_a_parameter_that_was_not_saved_are_refused_by_name(tmp_path: Path) -> None:
    apart = Apart()
    optimizer = torch.optim.AdamW(apart.named_parameters())
    for parameter in apart.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    joined = Joined()
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer, "step": 1})
        of_joined = torch.optim.AdamW(joined.named_parameters())
        rules = [fs.Fuse(("q.weight", "k.weight", "v.weight"), "qkv.weight", required=False)]
        with pytest.raises(fs.MismatchError, match=r"'optimizer.state.q.weight.[\s\S]*does not have the parameter"):
            checkpointer.load({"optimizer": of_joined}, rules=rules)


@pytest.mark.parametrize("form", ["param_names", "named", "flat"])
def test_state_dicts_load_by_rules(tmp_path: Path, form: str) -> None:
    apart, joined = Apart(), Joined()
    of_apart, of_joined = trained(apart), trained(joined, 1)

    def dict_of() -> dict[str, Any]:
        if form == "param_names":
            return torch.optim.AdamW(joined.named_parameters()).state_dict()
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        return dict(get_optimizer_state_dict(joined, of_joined, options=options))

    state_dict = {"model": joined.state_dict(), "optimizer": dict_of()}
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": apart, "optimizer": of_apart})
        checkpointer.load_state_dict(state_dict, rules=JOIN)
    expected = torch.cat([of_apart.state[part.weight]["exp_avg"] for part in (apart.q, apart.k, apart.v)])
    optimizer = state_dict["optimizer"]
    if form == "flat":
        moment = optimizer["state.qkv.weight.exp_avg"]
    else:
        groups = optimizer["param_groups"][0]
        index = groups.get("param_names", groups["params"]).index("qkv.weight")
        moment = optimizer["state"][groups["params"][index]]["exp_avg"]
    assert torch.equal(moment, expected)
    assert torch.equal(joined.qkv.weight[:8], apart.q.weight)
