"""Quantised weights of bitsandbytes and torchao: the real packages, on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowstone as fs

pytest.importorskip("bitsandbytes", reason="`make test-integrations` installs it")
pytest.importorskip("torchao", reason="`make test-integrations` installs it")

import bitsandbytes
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from torchao.quantization import quantize_ as quantize

INPUT = torch.linspace(-1, 1, 128).reshape(2, 64)


def layer(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    plain = nn.Linear(64, 64)
    if kind.startswith("int8"):
        made: nn.Module = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(64, 64, compress_statistics=kind.endswith("nested"), quant_type=kind[:3])
    made.load_state_dict(plain.state_dict())
    return made.to("cpu")


KINDS = ["nf4", "nf4 nested", "fp4 nested", "int8"]


def adapted(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A frozen quantised layer below one that trains."""
    model = nn.Sequential(layer(kind, seed), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(INPUT).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "after a step"])
def test_training_over_quantised_weights_resumes_exactly(tmp_path: Path, kind: str, steps: int) -> None:
    model, optimizer = adapted(kind, 0)
    train(model, optimizer)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}).committed.result()
    expected = [train(model, optimizer) for _ in range(2)]
    again, its_optimizer = adapted(kind, 1)
    for _ in range(steps):
        train(again, its_optimizer)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"model": again, "optimizer": its_optimizer})
    assert [train(again, its_optimizer) for _ in range(2)] == expected


def test_the_components_are_pieces_of_their_own_and_stored_once(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": layer("nf4 nested", 0)}).committed.result()
    parts = {"data", "absmax", "quant_map", "offset", "nested_absmax", "nested_quant_map"}
    assert set(fs.open(tmp_path).tensors) == {"m.bias", *(f"m.weight.{part}" for part in parts)}
    assert fs.open(tmp_path).verify().sound


@pytest.mark.parametrize("target", ["fp4", "nf4", "int8", "plain", "not quantised"])
def test_another_quantisation_is_refused_before_anything_changes(tmp_path: Path, target: str) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": layer("nf4 nested", 0)}).committed.result()
    made = {
        "plain": lambda: nn.Linear(64, 64), "not quantised": lambda: bitsandbytes.nn.Linear4bit(64, 64),
    }.get(target, lambda: layer(target, 1))()
    before = copy.deepcopy(dict(made.state_dict()))
    with fs.Checkpointer(tmp_path) as ckpt, pytest.raises(fs.MismatchError, match="nothing was changed"):
        ckpt.load({"m": made})
    assert all(torch.equal(tensor, before[key]) for key, tensor in made.state_dict().items())


CONFIGS: dict[str, Any] = {
    "int8 weights": Int8WeightOnlyConfig, "int8 both": Int8DynamicActivationInt8WeightConfig,
    # Each layout of Int4WeightOnlyConfig needs a GPU or an XPU.
    "int4 weights": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_torchao_come_back(tmp_path: Path, name: str) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
        quantize(model, CONFIGS[name]())
        return model

    source, target = made(0), made(1)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": source}).committed.result()
        ckpt.load({"m": target})
    for key, value in source.state_dict().items():
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        parts = [(getattr(value, part), getattr(target.state_dict()[key], part)) for part in names]
        assert all(torch.equal(tensor, other) for tensor, other in parts or [(value, target.state_dict()[key])])
