"""DLPack's functions report the same about tensors as torch's methods."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.torch import tensors
from flowstone.torch.tensors import TORCH_DTYPES, empty

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
needs_exchange = pytest.mark.skipif(EXCHANGE is None, reason="this torch has no DLPack functions")


def kinds() -> dict[str, torch.Tensor]:
    """Of each kind of dense tensor one."""
    base = torch.arange(24.0).view(2, 3, 4)
    kinds = {
        "whole": base, "number": torch.tensor(3), "empty": torch.empty(0), "empty in the middle": torch.empty(2, 0, 3),
        "transposed": base.transpose(0, 2), "columns": base[:, :, 1:3], "a row": base[1], "every second": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3), "expanded by one": torch.ones(3).expand(1, 3),
        "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "from the middle": base.flatten()[5:9],
        "one column": base[:, :, :1].squeeze(), "parameter": torch.nn.Parameter(torch.ones(3, 5)),
        "of a graph": torch.ones(3, requires_grad=True) * 2, "complex": torch.ones(3, dtype=torch.complex64),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "freed": torch.ones(8), "64 dimensions": torch.ones([1] * 64),
    }
    kinds["freed"].untyped_storage().resize_(0)
    with torch.inference_mode():
        kinds["of inference"] = torch.ones(4)
    return kinds


@needs_exchange
@pytest.mark.parametrize("name", kinds())
def test_a_tensor_is_read_as_by_its_methods(name: str) -> None:
    kind = kinds()[name]
    address, types, shapes, odd, is_complex, number, devices = tensors._reader()([kind])  # type: ignore[misc]
    expected = tensors._read_each([kind])
    assert (number.tolist(), devices) == (expected[5].tolist(), expected[6]) == ([-1], [])
    assert (address.dtype, address.tolist()) == (np.uint64, expected[0].tolist())
    assert (types, [tuple(shape) for shape in shapes], odd, is_complex) == (
        expected[1], [tuple(shape) for shape in expected[2]], expected[3], expected[4],
    )


@needs_exchange
def test_every_type_is_read_as_itself_or_not_at_all() -> None:
    known = 0
    for own, dtype in TORCH_DTYPES.items():
        actual = tensors._reader()([empty(dtype, (2, 3))])
        assert actual is None or (actual[1], actual[2]) == ([dtype], [(2, 3)]), own
        known += actual is not None
    assert known >= 14


@needs_exchange
def test_deterministic_torch_which_cannot_make_all_types_reads_as_well() -> None:
    tensors._samples.cache_clear()
    torch.use_deterministic_algorithms(True)
    try:
        actual = tensors._reader()([torch.ones(3), torch.ones(2, dtype=torch.int8)])
    finally:
        torch.use_deterministic_algorithms(False)
        tensors._samples.cache_clear()
    assert actual is not None
    assert [dtype.name for dtype in actual[1]] == ["float32", "int8"]


@needs_exchange
def test_a_type_that_cannot_be_stored_does_not_pass_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a later torch, with types of which this version of Flowstone knows nothing."""
    without = {own: dtype for own, dtype in TORCH_DTYPES.items() if own is not torch.int8}
    monkeypatch.setattr(tensors, "TORCH_DTYPES", without)
    tensors._samples.cache_clear()
    try:
        with pytest.raises(fs.UnsupportedStateError, match="int8"):
            tensors.columns([torch.ones(3), torch.ones(3, dtype=torch.int8)], ["a", "b"], hold=True)
    finally:
        tensors._samples.cache_clear()


@needs_exchange
def test_without_a_sample_of_each_type_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors._samples.cache_clear()
    monkeypatch.setattr(torch.Tensor, "view", _raises)
    try:
        assert tensors._reader()([torch.ones(3)]) is None
        actual = tensors.columns([torch.ones(3)], ["a"], hold=True)
    finally:
        tensors._samples.cache_clear()
    assert [dtype.name for dtype in actual.dtypes] == ["float32"]


def _raises(*_: object) -> None:
    raise RuntimeError("no such view")


@needs_exchange
def test_equal_shapes_are_one_object() -> None:
    actual = tensors._reader()([torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 3, dtype=torch.int8)])
    assert actual is not None
    assert actual[2] == [(2, 3), (3, 2), (2, 3)]
    assert actual[2][0] is actual[2][2]


@needs_exchange
@pytest.mark.parametrize("kind", ["sparse", "meta", "quantized", "no tensor"])
def test_what_has_no_address_is_left_to_torch(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value: object = {
            "sparse": lambda: torch.eye(3).to_sparse(), "meta": lambda: torch.ones(2, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "no tensor": lambda: 7,
        }[kind]()
    assert tensors._reader()([torch.ones(1), value]) is None  # type: ignore[list-item]
    assert tensors._reader()([torch.ones(1)]) is not None, "no error is left behind"


@pytest.mark.parametrize("wrong", [None, 7, "another"])
def test_only_dlpacks_own_functions_are_called(wrong: object) -> None:
    from ctypes import py_object, pythonapi

    pythonapi.PyCapsule_New.restype = py_object
    capsule = pythonapi.PyCapsule_New(1, b"another", None) if wrong == "another" else wrong
    with pytest.raises((TypeError, ValueError)):
        _native.TensorReader(capsule)
