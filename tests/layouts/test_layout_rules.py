"""Layout rules compared with numpy, forwards and back; tensors that they cannot be applied to are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import interrupted_export, read_all
from safetensors.numpy import load_file, save_file

import flowstone as fs
from flowstone.config import MIB
from flowstone.convert.fetch import Fetcher, FetchRequest
from flowstone.convert.layout import Output
from flowstone.convert.opening import open_source
from flowstone.convert.source import SourceCheckpoint
from flowstone.layouts.layout_rules import LayoutRule
from flowstone.layouts.rearrange import Origin, rearrange
from flowstone.table.stored import SourceTensor
from forge import flip, place_of
from random_layout_rules import Arrays, expected, natural, rules_and_shapes, rules_in_a_row


def read(source: SourceCheckpoint, tensors: Mapping[str, SourceTensor], pieces: int = 1) -> Arrays:
    """Every tensor through a fetcher, in so many runs."""
    fetcher = Fetcher(source, 8 * MIB)
    result = {}
    for name, tensor in tensors.items():
        assert sum(stored.box.elements for stored in tensor.boxes) == math.prod(tensor.shape)
        memory = np.full(tensor.bytes, 0xA5, np.uint8)
        item = tensor.dtype.item_bytes
        cuts = [tensor.bytes // item * n // pieces * item for n in range(pieces + 1)]
        output = Output(name, tensor, tensor.dtype)
        fetcher.fetch([FetchRequest(output, a, b, memory[a:b]) for a, b in pairwise(cuts) if a < b])
        result[name] = memory.view(tensor.dtype.name).reshape(tensor.shape)
    fetcher.close()
    return result


@settings(max_examples=300, deadline=None)
@given(rules_and_shapes(), st.sampled_from(["uint8", "int16", "float32", "float64"]), st.integers(1, 4), st.data())
def test_a_rule_does_what_numpy_does_and_its_inverse_undoes_it(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[LayoutRule, dict[str, tuple[int, ...]]], dtype: str,
    pieces: int, data: st.DataObject,
) -> None:
    rule, shapes = drawn
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    arrays = {name: noise.integers(1, 100, shape).astype(dtype) for name, shape in shapes.items()}
    arrays["other"] = np.ones(3, dtype)
    path = tmp_path_factory.mktemp("rules") / "x.safetensors"
    save_file(arrays, path)
    source = open_source(path)
    before = {tensor.name: tensor for tensor in source.tensors}
    after = rearrange(before, [rule], Origin("x"))
    content = read(source, after, pieces)
    assert np.array_equal(content.pop("other"), arrays["other"])
    whole = expected(rule, [arrays[name] for name in shapes])
    assert len(content) == len(whole)
    for values, other in zip((content[name] for name in sorted(content, key=natural)), whole, strict=True):
        assert values.shape == other.shape
        assert np.array_equal(values, other)
    back = read(source, rearrange(after, [rule.inverse], Origin("x")), pieces)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        if isinstance(rule, fs.Unpad) and name != "other":
            array = np.pad(expected(rule, [array])[0], [
                (0, rule.padded - rule.size if dim == rule.dim else 0) for dim in range(array.ndim)
            ])
        assert np.array_equal(back[name], array)
        assert isinstance(rule, fs.Unpad) or len(rearrange(after, [rule.inverse], Origin("x"))[name].boxes) <= 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rules_in_a_row_do_what_numpy_does_and_are_undone_in_the_other_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    noise = np.random.default_rng(3)
    arrays = {name: noise.integers(1, 1 << 20, shape).astype(np.int32) for name in ("a", "b", "c")}
    path = tmp_path_factory.mktemp("rules") / "x.safetensors"
    save_file(arrays, path)
    rules, expected = data.draw(rules_in_a_row(arrays))
    source = open_source(path)
    after = rearrange({tensor.name: tensor for tensor in source.tensors}, rules, Origin("x"))
    content = read(source, after, data.draw(st.integers(1, 3)))
    assert content.keys() == expected.keys()
    assert all(np.array_equal(content[name], expected[name]) for name in expected)
    back = read(source, rearrange(after, fs.RuleSet(rules).inverse.rules, Origin("x")))
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


RULES = fs.RuleSet((
    fs.Split("l.{n}.qkv", ("l.{n}.q", "l.{n}.k", "l.{n}.v"), 0, (8, 2, 2), 2),
    fs.Split("l.{n}.up", ("l.{n}.gate", "l.{n}.linear")),
    fs.Transpose("l.{n}.q"),
    fs.Stack("l.{n}.q", "scanned.q"),
    fs.Stack("l.{n}.e.{e}.w", "l.{n}.e.w", 1),
    fs.Pad("embed", 301, 320),
    fs.Rename("l.{n}.norm", "norms.{n}"),
    fs.Rename("embed", "tok.embed"),
))


@pytest.fixture(scope="module")
def megabytes() -> dict[str, torch.Tensor]:
    """Tensors of several megabytes, so that chunks with digests are cut by the rules."""
    noise = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    megabytes = {f"l.{n}.qkv": made(12 * 64, 1001) for n in range(3)} | {f"l.{n}.norm": made(1001) for n in range(3)}
    megabytes |= {f"l.{n}.up": made(2 * 500, 1001) for n in range(3)}
    megabytes |= {f"l.{n}.e.{e}.w": made(40, 60) for n in range(3) for e in range(11)}
    return megabytes | {"embed": made(301, 2000)}


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_there_and_back_again_is_bit_equal(tmp_path: Path, megabytes: dict[str, torch.Tensor], to: Any) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": megabytes})
    report = fs.export(tmp_path / "run", tmp_path / "b", to=to, rules=RULES, budget_bytes=32 * MIB)
    assert {"scanned.q", "l.2.e.w", "norms.1", "tok.embed", "l.0.gate"} <= set(report.tensors)
    fs.import_checkpoint(tmp_path / "b", tmp_path / "back", rules=RULES.inverse, budget_bytes=32 * MIB)
    assert fs.diff(tmp_path / "run", tmp_path / "back").equal
    back = read_all(tmp_path / "back")
    assert all(torch.equal(back[name], tensor) for name, tensor in megabytes.items())
    assert fs.diff(tmp_path / "run", tmp_path / "b", rules=RULES, names="model.*").equal


def test_an_export_with_rules_goes_on_after_a_crash_and_other_rules_begin_anew(
    tmp_path: Path, megabytes: dict[str, torch.Tensor]
) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": megabytes})
    options = {"rules": RULES, "budget_bytes": 32 * MIB}
    for target in ("b", "c"):
        interrupted_export(tmp_path / "run", tmp_path / target, 1, **options)
    report = fs.export(tmp_path / "run", tmp_path / "b", **options)
    assert 0 < report.resumed_bytes < report.bytes
    assert fs.diff(tmp_path / "run", tmp_path / "b", rules=RULES).equal
    other = fs.RuleSet((*RULES.rules[:3], fs.Transpose("l.{n}.gate"), *RULES.rules[3:]))
    again = fs.export(tmp_path / "run", tmp_path / "c", rules=other, budget_bytes=32 * MIB)
    assert again.resumed_bytes == 0
    assert fs.diff(tmp_path / "run", tmp_path / "c", rules=other).equal


def test_values_are_where_numpy_has_them(tmp_path: Path, megabytes: dict[str, torch.Tensor]) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": megabytes})
    fs.export(tmp_path / "run", tmp_path / "b", rules=RULES)
    actual = load_file(tmp_path / "b" / "model.safetensors")
    grouped = megabytes["l.1.qkv"].numpy().reshape(2, 6 * 64, 1001)
    assert np.array_equal(actual["l.1.k"], grouped[:, 4 * 64 : 5 * 64].reshape(-1, 1001))
    assert np.array_equal(actual["scanned.q"][1], grouped[:, : 4 * 64].reshape(-1, 1001).T)
    assert np.array_equal(actual["tok.embed"][:301], megabytes["embed"])
    assert not actual["tok.embed"][301:].any()
    assert np.array_equal(actual["l.2.e.w"][:, 10], megabytes["l.2.e.10.w"])


def test_damage_is_found_through_rules(tmp_path: Path, megabytes: dict[str, torch.Tensor]) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": megabytes})
    segment, begin = place_of(next((tmp_path / "run").glob("step-*")), "model.l.1.qkv")
    flip(segment, begin + 2_500_000)
    with pytest.raises(fs.DamagedError, match=r"'model.l.1.qkv', chunk 2, does not match its digest"):
        fs.export(tmp_path / "run", tmp_path / "b", rules=RULES)


def test_what_is_tied_stays_tied(tmp_path: Path) -> None:
    weight = torch.randn(10, 4)
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"embed": weight, "head": weight}})
    report = fs.export(tmp_path / "run", tmp_path / "b", rules=fs.RuleSet([
        fs.Pad("{which}", 10, 16), fs.Rename("embed", "tok"),
    ]))
    assert (report.tensors, report.aliases) == (("tok",), (("head", "tok"),))


def test_sections_that_came_as_dicts_load_after_rules(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 4)
    torch.save({"model": {"fused": torch.cat([model.weight, model.weight + 1]).detach(), "bias": model.bias.detach()},
                "step": 3}, tmp_path / "a.pt")
    fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", rules=[
        fs.RuleSet([fs.Split("fused", ("weight", "other"))]), fs.Skip("step")
    ])
    other = torch.nn.Linear(6, 4)
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load({"model": other}, rules=[fs.Skip("model.other")])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


SHAPES = {"a.0.w": (6, 4), "a.1.w": (6, 4), "a.2.w": (6, 4), "b": (5,), "c": (6, 3)}


@pytest.mark.parametrize(("rules", "error", "message"), [
    (fs.Split("x", ("y", "z")), fs.NoTensorError, "Split.*matches no tensor"),
    (fs.Rename("x", "y"), fs.NoTensorError, "Rename.*matches no tensor"),
    (fs.RuleSet([fs.Rename("x", "y")]), fs.NoTensorError, "matches no tensor"),
    (fs.Rename("b", "c"), fs.CollisionError, "two tensors of the target would be called 'c'"),
    (fs.Split("b", ("c", "d"), parts=(2, 3)), fs.CollisionError, "'c'"),
    (fs.Split("b", ("d", "e")), fs.MismatchError, r"'b'[\s\S]*1:1 in 1 groups[\s\S]*5 elements"),
    (fs.Split("c", ("d", "e"), parts=(1, 1), groups=2), fs.MismatchError, "'c'"),
    (fs.Split("b", ("d", "e"), 1), fs.MismatchError, r"a dimension 1[\s\S]*shape \(5,\)"),
    (fs.Fuse(("b", "x"), "y"), fs.MismatchError, r"'y' cannot be fused[\s\S]*missing     x"),
    (fs.Fuse(("b", "c"), "y"), fs.MismatchError, r"'c'[\s\S]*like b: float32 \(5,\)"),
    (fs.Fuse(("a.0.w", "a.1.w"), "y", parts=(2, 1)), fs.MismatchError, r"\[8, 4\]"),
    (fs.Fuse(("a.0.w", "c"), "y"), fs.MismatchError, "'c'"),
    (fs.Transpose("b"), fs.MismatchError, "'b'"),
    (fs.Pad("b", 4, 8), fs.MismatchError, "4 in dimension 0"),
    (fs.Unpad("b", 4, 8), fs.MismatchError, "8 in dimension 0"),
    ([fs.Rename("a.1", "a.7"), fs.Stack("a.{n}.w", "a")], fs.MismatchError, "number 1 is missing"),
    ([fs.Rename("c", "a.3.w"), fs.Stack("a.{n}.w", "a")], fs.MismatchError, "'a.3.w'"),
    (fs.Stack("a.{n}.w", "a", 3), fs.MismatchError, "a dimension 3"),
    (fs.Unstack("b", "b.{n}", 1), fs.MismatchError, "a dimension 1"),
    (fs.RuleSet([fs.Rename("b", "d")], "mine", complete=True), fs.MismatchError, "mine has no rule for 4 tensors"),
    (fs.Cast("b"), fs.ArgumentError, "not a conversion rule"),
])
def test_what_a_rule_cannot_be_applied_to_is_named(tmp_path: Path, rules: Any, error: type, message: str) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, tmp_path / "a.safetensors")
    with pytest.raises(error, match=message):
        fs.import_checkpoint(tmp_path / "a.safetensors", tmp_path / "run", rules=rules)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [
    lambda: fs.Split("a.{n}", ("b", "c.{n}")), lambda: fs.Split("a", ()), lambda: fs.Split("a", "bc"),
    lambda: fs.Split("a", ("b", "b")), lambda: fs.Split("a", ("b", "c"), parts=(1,)),
    lambda: fs.Split("a", ("b", "c"), parts=(0, 1)), lambda: fs.Split("a", ("b", "c"), dim=-1),
    lambda: fs.Split("a", ("b", "c"), groups=0), lambda: fs.Fuse(("a", ""), "c"), lambda: fs.Transpose("a", (0, 0)),
    lambda: fs.Pad("a", 8, 4), lambda: fs.Pad("a", -1, 4), lambda: fs.Stack("a.{n}", "b.{n}"),
    lambda: fs.Stack("a.{n}.{e}", "b"), lambda: fs.Unstack("a.{n}", "b.{e}"), lambda: fs.Rename("a.{n}", "b.{m}"),
    lambda: fs.Rename("a.{n}.{n}", "b.{n}"), lambda: fs.RuleSet([fs.Cast("x")]),  # type: ignore[list-item]
    lambda: fs.RuleSet([fs.Skip("x")]).inverse,
])
def test_rules_that_say_nothing_sensible_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(fs.ArgumentError):
        make()


def test_placeholders_name_parts_and_numbers() -> None:
    assert fs.Rename("l.{n}.mlp", "h.{n}.ff").apply("l.12.mlp.weight") == "h.12.ff.weight"
    assert fs.Rename("l.{n}.mlp", "h.{n}.ff").apply("opt.state.l.3.mlp.w.exp_avg") == "opt.state.h.3.ff.w.exp_avg"
    assert fs.Rename("l.{n}.mlp", "h.{n}.ff").apply("l.1.2.mlp.w") == "l.1.2.mlp.w"
    assert fs.Rename("l.{n}.mlp", "h.{n}.ff").apply("l.1.mlps.w") == "l.1.mlps.w"
    grouped = fs.Rename("fc.weight{e}", "fc.{e}.w")
    assert (grouped.apply("fc.weight11"), grouped.apply("fc.weight_scale")) == ("fc.11.w", "fc.weight_scale")


def test_a_load_takes_renames_with_placeholders(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {f"l.{n}.w": torch.full((3,), float(n)) for n in range(3)}})
        state = {"model": {f"h.{n}.weight": torch.zeros(3) for n in range(3)}}
        checkpointer.load(state, rules=fs.Rename("model.l.{n}.w", "model.h.{n}.weight"))
        assert [state["model"][f"h.{n}.weight"][0].item() for n in range(3)] == [0, 1, 2]
