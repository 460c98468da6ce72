"""A description of a load, printed before the load does anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import flowstone as fs


class Net(nn.Module):
    def __init__(self, wide: int = 500) -> None:
        super().__init__()
        self.one = nn.Linear(400, wide)
        self.two = nn.Linear(500, 300)


@pytest.fixture
def checkpoint(tmp_path: Path) -> fs.Checkpoint:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "step": 1})
    return fs.open(tmp_path / "run")


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_load_of_all_is_explained_as_it_then_happens(checkpoint: fs.Checkpoint, tmp_path: Path) -> None:
    model = Net()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    explanation = fs.explain(checkpoint, state)
    assert (explanation.step, explanation.differences, explanation.missing, explanation.unwanted) == (1, (), (), ())
    assert explanation.bytes == 3 * bytes_of(model) + 4 * 4
    assert explanation.peak_bytes >= 2 * bytes_of(model), "the slots of a new optimizer are new"
    assert [source.segment for source in explanation.sources] == ["rank-00000.safetensors"]
    assert explanation.sources[0].bytes == explanation.read_bytes <= explanation.sources[0].of_bytes
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.load(state).bytes == explanation.read_bytes


def test_part_of_a_state_reads_part_of_the_file(checkpoint: fs.Checkpoint) -> None:
    model = Net()
    explanation = fs.explain(checkpoint, {"model": model})
    assert explanation.bytes == explanation.read_bytes == bytes_of(model)
    assert explanation.unwanted == ()
    row = fs.Shard(torch.zeros(10, 400), (500, 400), (490, 0))
    part = fs.explain(checkpoint, {"model": {"one": {"weight": row}}}, rules=[fs.Skip("model.*")])
    assert part.bytes == 10 * 400 * 4
    assert part.resharded == ("model.one.weight",)
    assert set(part.unwanted) == {"model.one.bias", "model.two.weight", "model.two.bias"}


def test_differences_are_told_and_change_nothing(checkpoint: fs.Checkpoint) -> None:
    model = nn.ModuleDict({"one": nn.Linear(400, 501), "two": nn.Linear(500, 300).double(), "three": nn.Linear(2, 2)})
    before = [parameter.clone() for parameter in model.parameters()]
    explanation = fs.explain(checkpoint, {"model": model})
    kinds = {line.split()[0] for line in explanation.differences}
    assert kinds == {"shape", "dtype", "missing"}
    assert set(explanation.missing) == {"model.three.weight", "model.three.bias"}
    assert set(explanation.cast) == {"model.two.weight", "model.two.bias"}
    assert explanation.bytes == 2 * 4 * (500 * 300 + 300)
    text = str(explanation)
    assert "refused    shape       model.one.weight: wanted (501, 400), stored (500, 400)" in text
    assert "cast       2: model.two.weight, model.two.bias" in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_rules_are_heeded(checkpoint: fs.Checkpoint) -> None:
    model = nn.ModuleDict({"two": nn.Linear(500, 300).half(), "three": nn.Linear(2, 2)})
    rules = [fs.Init("model.three.*"), fs.Skip("model.one.*"), fs.Cast("model.two.*")]
    explanation = fs.explain(checkpoint, {"model": model}, rules=rules)
    assert explanation.differences == ()
    assert set(explanation.initialised) == {"model.three.weight", "model.three.bias"}
    assert explanation.missing == ()
    assert set(explanation.unwanted) == {"model.one.weight", "model.one.bias"}
    plain = fs.explain(checkpoint, {"model": nn.ModuleDict({"two": nn.Linear(500, 300)})}, rules=rules)
    assert explanation.peak_bytes - plain.peak_bytes == 4 * (500 * 300 + 300), "what is converted lies aside first"
