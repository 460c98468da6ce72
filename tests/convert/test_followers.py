"""Optimizer state in conversions by rules: it follows its parameters, with its groups, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowstone as fs

WIDTH = 24
RULES = fs.RuleSet([
    fs.Fuse(tuple(f"layers.{{n}}.{part}.weight" for part in "qkv"), "layers.{n}.qkv.weight", 0, (2, 1, 1), 2),
    fs.Fuse(tuple(f"layers.{{n}}.{part}.bias" for part in "qkv"), "layers.{n}.qkv.bias", 0, (2, 1, 1), 2),
    fs.Transpose("layers.{n}.out.weight"),
    fs.Stack("layers.{n}.norm.weight", "norms"),
    fs.Pad("embed.weight", 30, 32),
    fs.Rename("layers", "decoder.layers"),
])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.out, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.RMSNorm(WIDTH)


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))


def trained(
    model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, groups: Any = None
) -> torch.optim.Optimizer:
    optimizer = kind(groups(model) if groups else model.parameters(), lr=0.01)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Apart, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Apart()
    optimizer = trained(model)
    with fs.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "step": 1})
    return tmp_path / "a", model, optimizer


def test_there_and_back_again_is_bit_equal_with_the_optimizer(
    tmp_path: Path, saved: tuple[Path, Apart, torch.optim.Optimizer]
) -> None:
    source, model, optimizer = saved
    there = fs.import_checkpoint(source, tmp_path / "b", rules=RULES)
    assert {"model.norms", "optimizer.state.model.norms.exp_avg"} <= set(there.tensors)
    checkpoint = fs.open(tmp_path / "b")
    first = model.layers[0]
    for slot in ("exp_avg", "exp_avg_sq"):
        parts = [optimizer.state[item.weight][slot].reshape(2, -1, WIDTH) for item in (first.q, first.k, first.v)]
        fused = checkpoint.read(f"optimizer.state.model.decoder.layers.0.qkv.weight.{slot}")
        assert torch.equal(fused, torch.cat(parts, 1).reshape(-1, WIDTH))
        turned = checkpoint.read(f"optimizer.state.model.decoder.layers.0.out.weight.{slot}")
        assert torch.equal(turned, optimizer.state[first.out.weight][slot].T)
        padded = checkpoint.read(f"optimizer.state.model.embed.weight.{slot}")
        assert torch.equal(padded[:30], optimizer.state[model.embed.weight][slot])
        assert not padded[30:].any()
    assert checkpoint.read("optimizer.state.model.decoder.layers.2.qkv.bias.step") == 2
    members = checkpoint.objects["optimizer"]["param_groups"][0]["params"]
    assert members[:2] == ["model.embed.weight", "model.decoder.layers.0.qkv.weight"]
    assert set(members) == {name for name in checkpoint.tensors if name.startswith("model.")}
    assert fs.diff(source, tmp_path / "b", rules=RULES).equal  # without converting, the groups included
    fs.import_checkpoint(tmp_path / "b", tmp_path / "back", rules=RULES.inverse)
    back = fs.diff(source, tmp_path / "back")
    assert (back.differing, back.only_in_a, back.only_in_b) == ((), (), ())
    again = Apart()
    of_again = torch.optim.AdamW(again.parameters(), lr=0.5)
    fs.Checkpointer(tmp_path / "back").load({"model": again, "optimizer": of_again})
    assert of_again.param_groups[0]["lr"] == 0.01
    for param, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(param, other)
        assert all(torch.equal(value, of_again.state[other][slot]) for slot, value in optimizer.state[param].items())


def test_a_conversion_gives_what_a_load_by_the_same_rules_gives(
    tmp_path: Path, saved: tuple[Path, Apart, torch.optim.Optimizer]
) -> None:
    source, _, _ = saved
    rules = fs.RuleSet([fs.Fuse(("layers.{n}.k.weight", "layers.{n}.v.weight"), "layers.{n}.kv.weight")])

    class Fused(Apart):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.kv = nn.Linear(WIDTH, WIDTH, bias=False)
                del layer.k.weight, layer.v.weight

    fs.import_checkpoint(source, tmp_path / "b", rules=rules)
    states = []
    for store, given in ((source, rules), (tmp_path / "b", ())):
        model = Fused()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.load({"model": model, "optimizer": optimizer}, rules=given)
        states.append([*model.parameters(), *(slot for slots in optimizer.state.values() for slot in slots.values())])
    assert len(states[0]) == len(states[1]) == 4 * len([*Fused().parameters()])
    assert all(torch.equal(state, other) for state, other in zip(*states, strict=True))


def test_all_sections_go_out_by_the_same_rules(
    tmp_path: Path, saved: tuple[Path, Apart, torch.optim.Optimizer]
) -> None:
    source, _, _ = saved
    rules = RULES.below("model.")
    fs.import_checkpoint(source, tmp_path / "b", rules=rules)
    skips = [fs.Skip(f"optimizer.{name}*") for name in ("param_groups", "shared", "extra")]
    fs.export(source, tmp_path / "c.pt", to="torch", section=None, rules=[rules, *skips, fs.Skip("step")])
    expected, state = fs.open(tmp_path / "b"), torch.load(tmp_path / "c.pt", weights_only=True)
    assert state.keys() == set(expected.tensors)
    assert "optimizer.state.model.decoder.layers.1.qkv.weight.exp_avg_sq" in state
    assert all(torch.equal(expected.read(name), tensor) for name, tensor in state.items())


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one of which has the keys."""
    keys = [parameter for name, parameter in model.named_parameters() if ".k." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".k." not in name]
    return [{"params": rest}, {"params": keys, "weight_decay": 0.5}]


def one_step_more(model: Apart) -> torch.optim.Optimizer:
    optimizer = trained(model)
    optimizer.state[model.layers[1].k.bias]["step"] += 1
    return optimizer


@pytest.mark.parametrize(("make", "message"), [
    (lambda model: trained(model, groups=by_kind), r"do not fit optimizer\.param_groups\.0[\s\S]*missing"),
    (one_step_more, r"state values, but they differ[\s\S]*layers\.1\.k\.bias\.step"),
    (lambda model: trained(model, torch.optim.Adafactor), r"to its optimizer state 'optimizer[\s\S]*row_var"),
])
def test_what_cannot_follow_is_named_and_may_be_left_out(
    tmp_path: Path, make: Callable[[Apart], torch.optim.Optimizer], message: str
) -> None:
    model = Apart()
    with fs.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": make(model)})
    with pytest.raises(fs.MismatchError, match=message):
        fs.import_checkpoint(tmp_path / "a", tmp_path / "b", rules=RULES)
    assert not (tmp_path / "b").exists()
    with pytest.raises(fs.MismatchError, match=message):
        fs.diff(tmp_path / "a", tmp_path / "a", rules=RULES)
    fs.import_checkpoint(tmp_path / "a", tmp_path / "b", rules=[RULES, fs.Skip("optimizer.*")])
    assert fs.diff(tmp_path / "a", tmp_path / "b", rules=RULES, names="model.*").equal
    assert fs.diff(tmp_path / "a", tmp_path / "b", rules=RULES, skip="optimizer.*").equal
    assert fs.open(tmp_path / "b").read("model.decoder.layers.0.qkv.weight").shape == (2 * WIDTH, WIDTH)


def test_an_optimizer_of_each_rank_does_not_follow(tmp_path: Path) -> None:
    model = Apart()
    with fs.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(1, {"model": model, "own": fs.PerRank(trained(model))})
    with pytest.raises(fs.MismatchError, match=r"own\.param_groups\.0, but this optimizer was saved by each rank"):
        fs.import_checkpoint(tmp_path / "a", tmp_path / "b", rules=RULES)
    with pytest.raises(fs.MismatchError, match="each rank"):
        fs.diff(tmp_path / "a", tmp_path / "a", rules=RULES)
    assert not fs.diff(tmp_path / "a", tmp_path / "a", rules=[RULES, fs.Skip("own*")]).equal


def test_slots_that_are_no_tensors_follow_where_they_are_equal(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        """With a slot that is a number, and one that is text."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for parameter in self.param_groups[0]["params"]:
                slots = self.state[parameter]
                slots["count"], slots["kind"] = slots.get("count", 0) + 1, "plain"

    model = Apart()
    optimizer = trained(model, Counting)
    with fs.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        optimizer.state[model.layers[2].v.weight]["count"] += 1
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
    fs.import_checkpoint(fs.open(tmp_path / "a", 1).path, tmp_path / "b", rules=RULES)
    listed = fs.open(tmp_path / "b").objects["optimizer"]["state"]
    assert listed["model.decoder.layers.2.qkv.weight"] == {"count": 2, "kind": "plain"}
    assert "model.layers.2.v.weight" not in listed
    with pytest.raises(fs.MismatchError, match=r"joins parameters into '.*layers\.2\.qkv\.weight'"):
        fs.import_checkpoint(tmp_path / "a", tmp_path / "c", rules=RULES)
