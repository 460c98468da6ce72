"""Quantised parameters of packages that do not describe their parts, by classes that look like theirs."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import pytest
import torch
from reference import load, save, stored
from torch import nn

from flowstone.errors import UnsupportedStateError
from flowstone.state import prepare


class DType(enum.Enum):
    E4M3 = 4


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def as_if(module: str, name: str) -> type:
    """A type of tensors that has the name of a package's own."""
    return type(name, (torch.Tensor,), {"__module__": module, "__qualname__": name})


FLOAT8 = as_if("transformer_engine.pytorch.tensor.float8_tensor", "Float8Tensor")
BLOCKS = as_if("transformer_engine.pytorch.tensor.mxfp8_tensor", "MXFP8Tensor")


def float8(fill: int) -> Any:
    made: Any = torch.zeros(4, 4).as_subclass(FLOAT8)
    made._data, made._scale_inv = torch.full((4, 4), fill, dtype=torch.uint8), torch.full((1,), float(fill))
    made._fp8_dtype, made._transpose_invalid = DType.E4M3, False
    return made


def blocks(fill: int) -> Any:
    made: Any = torch.zeros(4, 4).as_subclass(BLOCKS)
    made._rowwise_data, made._rowwise_scale_inv = torch.full((4, 4), fill, dtype=torch.uint8), torch.full((4,), fill)
    made._columnwise_data = made._columnwise_scale_inv = None
    made._fp8_dtype = DType.E4M3
    return made


def test_a_tensor_with_one_scale_is_restored_and_its_transpose_made_anew() -> None:
    target = float8(0)
    checkpoint = save({"w": float8(3)})
    assert set(checkpoint.tensors) == {"w.data", "w.scale_inv"}
    load(checkpoint, {"w": target})
    assert (target._data.unique().tolist(), target._scale_inv.tolist()) == ([3], [3])
    assert target._transpose_invalid


def test_a_tensor_with_a_scale_for_each_block_is_restored() -> None:
    target = blocks(0)
    checkpoint = save({"w": blocks(3)})
    assert set(checkpoint.tensors) == {"w.rowwise_data", "w.rowwise_scale_inv"}
    load(checkpoint, {"w": target})
    assert (target._rowwise_data.unique().tolist(), target._rowwise_scale_inv.tolist()) == ([3], [3, 3, 3, 3])


def test_another_quantisation_is_a_difference() -> None:
    target = float8(0)
    target._fp8_dtype = "E5M2"
    differences = prepare({"w": target}, stored(save({"w": float8(1)}))).differences
    assert [(difference.kind, difference.name) for difference in differences] == [("kind", "w.quantisation")]


def test_a_class_of_such_a_package_that_is_not_known_is_refused_with_what_works() -> None:
    other: Any = as_if("bitsandbytes.nn.modules", "Params2bit")
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(other), requires_grad=False)
    with pytest.raises(UnsupportedStateError, match=r"'m\.weight'") as caught:
        save({"m": model})
    assert "if p.requires_grad" in str(caught.value)
    save({"m": {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}})
