"""Differences between two runs of elements, compared with numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.convert.elements import Differences, Tolerance, compare, has_numbers, numbers
from flowstone.table.dtype import DTYPES

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz"]


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def compared(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance | None = None) -> Differences:
    kinds = tuple(DTYPES[str(tensor.dtype).removeprefix("torch.")] for tensor in (a, b))
    return compare(raw(a), raw(b), kinds, tolerance or Tolerance())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*FLOATS, "float8_e8m0fnu"])
def test_values_of_every_pattern_of_bits_are_those_that_torch_sees(name: str) -> None:
    kind = DTYPES[name]
    content = np.random.default_rng(1).integers(0, 256, 1 << 12, np.uint8)
    content[:256] = np.arange(256)
    expected = torch.from_numpy(content.copy()).view(getattr(torch, name)).to(torch.float64).numpy()
    assert np.array_equal(numbers(content, kind), expected, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS)
def test_nans_are_counted_on_both_sides(name: str) -> None:
    content = np.random.default_rng(2).integers(0, 256, 1 << 12, np.uint8)
    content[:256] = np.arange(256)
    tensor = torch.from_numpy(content.copy()).view(getattr(torch, name))
    count = int(tensor.to(torch.float64).isnan().sum())
    assert count > 0
    assert compared(tensor, torch.zeros_like(tensor)).nans == (count, 0)
    assert compared(tensor, tensor) == Differences(nans=(count, count))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*FLOATS[:4], "int64", "uint8", "int32", "complex64"]), st.data())
def test_what_is_unequal_is_what_numpy_says(name: str, draw: st.DataObject) -> None:
    noise = np.random.default_rng(draw.draw(st.integers(0, 1 << 20)))
    a = torch.from_numpy(noise.integers(0, 5, 300)).to(getattr(torch, name))
    b = a.clone()
    places = noise.integers(0, 300, draw.draw(st.integers(0, 20)))
    b[places] = torch.from_numpy(noise.integers(0, 9, len(places))).to(getattr(torch, name))
    tolerance = Tolerance(draw.draw(st.sampled_from([0.0, 0.3])), draw.draw(st.sampled_from([0.0, 1.0])))
    x, y = (tensor.to(torch.complex128).numpy() for tensor in (a, b))
    comparison = compared(a, b, tolerance)
    assert comparison.unequal == np.count_nonzero(~np.isclose(x, y, rtol=tolerance.relative, atol=tolerance.absolute))
    assert comparison.unequal_bits == np.count_nonzero(x != y)
    assert comparison.absolute == np.abs(x - y).max()
    if comparison.largest_index is not None:
        assert np.abs(x - y)[comparison.largest_index] == comparison.absolute > 0


def test_zeros_of_two_signs_and_nans_of_two_payloads_are_equal_in_value_but_not_in_bits() -> None:
    quiet = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert compared(quiet, other) == Differences(unequal=0, unequal_bits=2, nans=(1, 1))


def test_a_nan_or_an_infinity_on_one_side_is_unequal_whatever_the_tolerance() -> None:
    a = torch.tensor([1.0, float("inf"), float("inf"), 2.0])
    b = torch.tensor([float("nan"), 3.0, float("inf"), 2.5])
    actual = compared(a, b, Tolerance(10.0, 10.0))
    assert (actual.unequal, actual.absolute, actual.largest_index, actual.nans) == (2, float("inf"), 1, (0, 1))
    assert actual.relative == pytest.approx(0.2)


def test_large_integers_are_compared_exactly() -> None:
    a = torch.tensor([2**62 + 1, -(2**63)], dtype=torch.int64)
    b = torch.tensor([2**62, 2**63 - 1], dtype=torch.int64)
    comparison = compared(a, b)
    assert (comparison.unequal, comparison.largest_index, comparison.absolute) == (2, 1, float(2**64 - 1))
    assert compared(a[:1], b[:1]).absolute == 1


def test_values_of_two_types_are_compared() -> None:
    a = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    comparison = compared(a, a.to(torch.bfloat16), Tolerance(2**-8))
    assert comparison.unequal == 0
    assert 0 < (comparison.relative or 0) <= 2**-8
    assert compared(torch.arange(9), torch.arange(9, dtype=torch.int32)) == Differences()


def test_of_types_without_numbers_bits_are_compared() -> None:
    content = torch.arange(64, dtype=torch.uint8)
    kind = DTYPES["float4_e2m1fn_x2"]
    assert not has_numbers(kind)
    other = content.clone()
    other[7] = 0
    matched = compare(content.numpy(), other.numpy(), (kind, kind), Tolerance())
    assert matched == Differences(1, 1, None, None, None)


def test_blocks_are_added_up() -> None:
    a = torch.zeros(1 << 19)
    b = a.clone()
    b[3], b[200_000], b[500_000] = 1.0, 5.0, 4.0
    comparison = compared(a, b)
    assert (comparison.unequal, comparison.largest_index, comparison.absolute) == (3, 200_000, 5.0)
