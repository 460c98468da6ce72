"""Columns: many tensors read at once give the same as each tensor by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowstone as fs
from flowstone.errors import UnsupportedStateError
from flowstone.torch import tensors
from flowstone.torch.tensors import TORCH_DTYPES, check_tensor, columns, is_deferred, memory_of
from strategies import tensors as any_tensor

NUMBER = 600  # more than two blocks


@settings(deadline=None)
@given(st.lists(any_tensor(), max_size=6), st.booleans())
def test_columns_are_what_each_tensor_says(some: list[torch.Tensor], hold: bool) -> None:
    actual = columns(some, [f"t{i}" for i in range(len(some))], hold=hold)
    memory = [memory_of(tensor) for tensor in some]
    assert list(actual.dtypes) == [check_tensor(tensor, "t") for tensor in some]
    assert list(actual.shapes) == [tuple(tensor.shape) for tensor in some]
    assert actual.address.tolist() == [array.address for array in memory]
    odd = [index for index, array in enumerate(memory) if not array.contiguous or is_deferred(some[index])]
    assert list(actual.odd) == odd
    assert all(isinstance(owner, torch.UntypedStorage if hold else torch.Tensor) for owner in actual.owners)


@pytest.mark.parametrize("position", [0, tensors._BLOCK - 1, tensors._BLOCK, NUMBER - 1])
def test_an_odd_tensor_is_found_in_any_block(position: int) -> None:
    turned = torch.ones(2, 3).t()
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    for odd in (turned, negative, conjugate, torch._neg_view(torch.ones(3))):
        some = [torch.ones(2) for _ in range(NUMBER)]
        some[position] = odd
        assert list(columns(some, [""] * NUMBER, hold=False).odd) == [position]


def freed(begin: int) -> torch.Tensor:
    """A view of a storage whose memory was given back, as sharded training does between uses."""
    tensor = torch.ones(1_000_000)[begin:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("offset", [0, tensors._BLOCK, NUMBER - 1])
@pytest.mark.parametrize("begin", [0, 1, 999_999])
def test_a_freed_storage_is_refused_by_name(offset: int, begin: int) -> None:
    some = [torch.ones(2) for _ in range(NUMBER)]
    some[offset] = freed(begin)
    with pytest.raises(UnsupportedStateError, match=f"'t{offset}' has no memory"):
        columns(some, [f"t{i}" for i in range(NUMBER)], hold=False)


def test_an_empty_view_of_a_freed_storage_needs_no_memory() -> None:
    assert columns([freed(1)[:0]], ["t"], hold=True).address.tolist() == [0]


def test_an_empty_meta_tensor_is_refused_all_the_same() -> None:
    with pytest.raises(UnsupportedStateError, match="'t' is on the meta device"):
        columns([torch.ones(1), torch.empty(0, device="meta")], ["s", "t"], hold=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch fills new memory, where it can."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("own", TORCH_DTYPES, ids=str)
@pytest.mark.usefixtures("deterministic")
def test_a_tensor_of_any_type_is_made_anew_by_deterministic_torch(own: torch.dtype) -> None:
    dtype = TORCH_DTYPES[own]
    dense = tensors.empty(dtype, (2, 3))
    assert (dense.dtype, dense.shape, dense.stride(), dense._base) == (own, (2, 3), (3, 1), None)
    turned = tensors.empty(dtype, (2, 3), strides=(1, 2))
    assert (turned.dtype, turned.shape, turned.stride()) == (own, (2, 3), (1, 2))
    assert tensors.empty(dtype, ()).nbytes == dtype.item_bytes


class Packed:
    """Holds whatever tensors it is given."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.tensors = held

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict


@pytest.mark.usefixtures("deterministic")
def test_deterministic_torch_loads_types_below_a_byte_into_new_tensors(tmp_path: Path) -> None:
    raw = torch.arange(8, dtype=torch.uint8)
    names = ("float4_e2m1fn_x2", "uint4", "int3", "bits16")  # older torch lacks the first
    saved = {name: raw.view(getattr(torch, name)) for name in names if hasattr(torch, name)}
    loaded = Packed({})
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"packed": Packed(saved)})
        checkpointer.load({"packed": loaded})
    assert list(loaded.tensors) == list(saved)
    for name, value in saved.items():
        tensor = loaded.tensors[name]
        assert tensor.dtype is value.dtype
        assert torch.equal(tensor.view(torch.uint8), raw)
        assert torch.equal(fs.open(tmp_path / "run").read(f"packed.{name}").view(torch.uint8), raw)
