"""Columns: what is read off many tensors at once is what each of them says by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import tensors as any_tensor

from flowstone.errors import UnsupportedStateError
from flowstone.state import tensors
from flowstone.state.tensors import check_tensor, columns, deferred, memory_of

NUMBER = 600  # more than two blocks


@settings(deadline=None)
@given(st.lists(any_tensor(), max_size=6), st.booleans())
def test_columns_are_what_each_tensor_says(some: list[torch.Tensor], hold: bool) -> None:
    found = columns(some, [f"t{i}" for i in range(len(some))], hold=hold)
    memory = [memory_of(tensor) for tensor in some]
    assert list(found.dtypes) == [check_tensor(tensor, "t") for tensor in some]
    assert list(found.shapes) == [tuple(tensor.shape) for tensor in some]
    assert found.address.tolist() == [one.address for one in memory]
    odd = [at for at, one in enumerate(memory) if not one.contiguous or deferred(some[at])]
    assert list(found.odd) == odd
    assert all(isinstance(owner, torch.UntypedStorage if hold else torch.Tensor) for owner in found.owners)


@pytest.mark.parametrize("at", [0, tensors._BLOCK - 1, tensors._BLOCK, NUMBER - 1])
def test_an_odd_tensor_is_found_in_any_block(at: int) -> None:
    turned = torch.ones(2, 3).t()
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    for odd in (turned, negative, conjugate, torch._neg_view(torch.ones(3))):
        some = [torch.ones(2) for _ in range(NUMBER)]
        some[at] = odd
        assert list(columns(some, [""] * NUMBER, hold=False).odd) == [at]


def freed(begin: int) -> torch.Tensor:
    """A view of a storage whose memory was given back, as sharded training does between uses."""
    tensor = torch.ones(1_000_000)[begin:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("at", [0, tensors._BLOCK, NUMBER - 1])
@pytest.mark.parametrize("begin", [0, 1, 999_999])
def test_a_freed_storage_is_refused_by_name(at: int, begin: int) -> None:
    some = [torch.ones(2) for _ in range(NUMBER)]
    some[at] = freed(begin)
    with pytest.raises(UnsupportedStateError, match=f"'t{at}' has no memory"):
        columns(some, [f"t{i}" for i in range(NUMBER)], hold=False)


def test_an_empty_view_of_a_freed_storage_needs_no_memory() -> None:
    assert columns([freed(1)[:0]], ["t"], hold=True).address.tolist() == [0]


def test_an_empty_meta_tensor_is_refused_all_the_same() -> None:
    with pytest.raises(UnsupportedStateError, match="'t' is on the meta device"):
        columns([torch.ones(1), torch.empty(0, device="meta")], ["s", "t"], hold=False)
