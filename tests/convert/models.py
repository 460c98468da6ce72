"""A model with every kind of tensor, and its comparison in tests of conversion."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.convert import copy
from flowstone.layouts.layout_rules import GivenRules

STEP = 5


def tensors() -> dict[str, torch.Tensor]:
    """Every kind of tensor that a model may hold: types, sizes, no elements, no dimensions, tied."""
    noise = torch.Generator().manual_seed(0)
    tensors = {
        "embed": torch.randn(301, 1000, generator=noise),
        "half": torch.randn(7, 3, generator=noise).to(torch.bfloat16),
        "f16": torch.randn(33, generator=noise).to(torch.float16),
        "double": torch.randn(5, 5, generator=noise, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "f8": torch.randn(1000, 1300, generator=noise).to(torch.float8_e4m3fn),
        "long": torch.randn(2_500_003, generator=noise),
        "ints": torch.arange(-4, 5, dtype=torch.int8),
        "flags": torch.tensor([True, False, True]),
        "deep": torch.randn(2, 3, 5, 7, 11, generator=noise),
        **{f"small.{number}": torch.randn(number + 1, 9, generator=noise) for number in range(300)},
    }
    return tensors | {"head": tensors["embed"]}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(actual[name]) == raw(tensor), name


def assert_refused(
    golden: Path, harm: Callable[[Path], object], message: str, place: Path, rules: GivenRules = ()
) -> None:
    """A copy of a checkpoint is not imported once it is harmed, and nothing is left of the try."""
    shutil.copytree(golden, place / "harmed")
    harm(place / "harmed")
    with pytest.raises(fs.FlowstoneError, match=message):
        fs.import_checkpoint(place / "harmed", place / "run", rules=rules)
    assert not (place / "run").exists()


def read_all(store: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Every tensor of a section of the newest checkpoint, which is verified first."""
    checkpoint = fs.open(store)
    assert checkpoint.verify().extra == ()
    return {name.removeprefix(prefix): checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefix)}


def interrupted_export(source: Path, target: Path, windows: int, **options: Any) -> None:
    """Begin an export, and stop it once so many windows are written, each of them durable."""
    real, left = copy.FileWriter.write, iter(range(windows))

    def write(*given: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(*given)

    with (
        mock.patch.object(copy.FileWriter, "write", write), mock.patch.object(copy, "_WINDOWS_BETWEEN_SYNCS", 1),
        pytest.raises(KeyboardInterrupt),
    ):
        fs.export(source, target, **options)
