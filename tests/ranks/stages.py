"""Functions for tests of pipeline stages: each rank holds some layers of one model, by their global names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from acts import opened, outcome
from torch import nn

import flowstone as fs

LAYERS = 5
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "RANKS.md"


class Stage(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(200, 97 + layer) for layer in layers})


def stage_of(rank: int, size: int) -> range:
    """Of a pipeline: some layers each, and none where there are more ranks than layers."""
    each = -(-LAYERS // size)
    return range(min(rank * each, LAYERS), min((rank + 1) * each, LAYERS))


def state_of(layers: range, *, extra: bool = False) -> dict[str, object]:
    """Weights decay, biases do not; every rank has both groups, of its own members."""
    model = Stage(layers)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name.endswith(end)], "weight_decay": decay, "lr": 0.25}
        for end, decay in ((".weight", 0.5), (".bias", 0.0))
    ]
    optimizer = torch.optim.AdamW(groups)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parts: dict[str, object] = {f"part{layer}": {"of": layer, "scale": torch.ones(3)} for layer in layers}
    return {"model": model, "optimizer": optimizer, "parts": parts, "step": 4} | ({"extra": 1} if extra else {})


def each(state: dict[str, object], do: Callable[[str, torch.Tensor, float], None]) -> None:
    """Every tensor with a name and a number of its own, the same on any rank."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, Stage)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name, parameter in model.named_parameters():
        base = float(sum(name.encode()))
        do(name, parameter.data, base)
        for slot, value in optimizer.state[parameter].items():
            do(f"{name} {slot}", value, base + len(slot))


def put(name: str, tensor: torch.Tensor, base: float) -> None:
    tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + base)


def spoil(name: str, tensor: torch.Tensor, base: float) -> None:
    tensor.fill_(-1)


def check(name: str, tensor: torch.Tensor, base: float) -> None:
    expected = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + base
    assert torch.equal(tensor, expected), name


def save(rank: int, path: str, size: int) -> None:
    state = state_of(stage_of(rank, size))
    each(state, put)
    with opened(path) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        checkpointer.save(2, state).committed.result(60)


def load(rank: int, path: str, size: int) -> float:
    """Load what `save` has saved, on whatever number of ranks; what an option has become."""
    state = state_of(stage_of(rank, size))
    each(state, spoil)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 99.0
    with opened(path) as checkpointer:
        checkpointer.load(state)
    each(state, check)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    return float(optimizer.param_groups[0]["lr"])


def load_part(rank: int, path: str) -> str:
    """Two ranks want two of five layers: no rank wants the other three."""
    state = state_of(range(rank, rank + 1))
    with opened(path) as checkpointer:
        try:
            checkpointer.load(state)
        except fs.FlowstoneError as error:
            message = f"{type(error).__name__}: {error}"
        checkpointer.load(state, rules=[fs.Skip("*")])
    each(state, check)
    return message


def same_local_names(rank: int, path: str) -> str:
    """Every stage calls its layers 0, 1, ...: what the second saved would be lost."""
    torch.manual_seed(rank)
    state = {"model": Stage(range(2))}
    with opened(path, on_error="continue") as checkpointer:
        names = str(outcome(checkpointer, 1, state))
        torch.manual_seed(0)
        assert outcome(checkpointer, 1, {"model": Stage(range(2))}) is None
    return names


def loop(rank: int, path: str, size: int, steps: int, begins: bool) -> list[int]:
    """Hand out samples with the loader of the document, `steps` of each rank, and save. What was seen here."""
    example: dict[str, object] = {}
    samples = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)
    exec(next(sample for sample in samples if "class Loader" in sample), example)
    loader = example["Loader"](100, rank, size)  # type: ignore[operator]
    state = {"loader": fs.PerRank(loader, redistribute=example["redistribute"])}  # type: ignore[arg-type]
    with opened(path) as checkpointer:
        step = 0 if begins else checkpointer.load(state).step
        seen = [sample for _, sample in zip(range(steps), loader, strict=False)]
        checkpointer.save(step + 1, state).committed.result(60)
    return seen
