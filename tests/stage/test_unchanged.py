"""Whether tensors are unchanged: by address, by version counter, and by samples of their memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from flowstone import _native
from flowstone.torch.tensor_snapshot import TensorSnapshot


def tensors(*elements: int) -> list[torch.Tensor]:
    return [torch.arange(count, dtype=torch.float32) for count in elements]


def seen(known: list[torch.Tensor], before: TensorSnapshot | None = None) -> TensorSnapshot:
    return TensorSnapshot.of(known, 7, before)


def test_what_nothing_touched_is_unchanged() -> None:
    known = tensors(5, 4000, 0)
    assert seen(known).first_changed(known) is None


@pytest.mark.parametrize("position", [0, 1])
def test_a_change_in_place_is_found_by_its_counter(position: int) -> None:
    known = tensors(5, 4000)
    before = seen(known)
    known[position].add_(1)
    assert before.first_changed(known) == position


@pytest.mark.parametrize("position", [0, 1])
def test_a_change_past_the_counter_is_found_by_samples(position: int) -> None:
    known = tensors(5, 4000)
    before = seen(known)
    known[position].data.add_(1)
    assert before.first_changed(known) == position


def test_a_tensor_with_other_memory_is_changed() -> None:
    known = tensors(5, 4000)
    before = seen(known)
    known[1].data = known[1].clone()
    assert before.first_changed(known) == 1


def test_the_first_of_them_can_be_asked_for_alone() -> None:
    known = tensors(5, 4000, 6)
    before = seen(known)
    known[2].data.add_(1)
    assert before.first_changed(known[:2]) is None
    known[1].data.add_(1)
    assert before.first_changed(known[:2]) == 1


def test_what_was_seen_before_does_not_hide_what_has_changed_since() -> None:
    known = tensors(5, 4000, 6)
    first = seen(known)
    known[0].data, known[1].data = known[1].data, known[0].data  # the same addresses, elsewhere
    second = seen(known, first)
    assert second.first_changed(known) is None
    for index in range(3):
        again = seen(known, second)
        known[index].data.add_(1)
        assert again.first_changed(known) == index


def test_tensors_without_memory_of_their_own_are_not_sampled() -> None:
    known = [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), *tensors(4)]
    before = seen(known)
    assert before.sampled.tolist() == [2]
    assert before.first_changed(known) is None
    known[2].data.add_(1)
    assert before.first_changed(known) == 2


def test_memory_that_is_gone_does_not_hide_a_change_elsewhere() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype, library.mmap.argtypes = ctypes.c_void_p, [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    ]
    length = 1 << 16
    address = library.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    gone = torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
    known = [gone, *tensors(4000)]
    library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
    before = seen(known)
    known[1].data.add_(1)
    assert before.first_changed(known) == 1


def test_digests_of_memory_are_those_of_its_bytes() -> None:
    data = [np.arange(count, dtype=np.uint8) for count in (1, 200, 255)] * 3
    address = np.array([item.ctypes.data for item in data] + [0], np.uint64)
    length = np.array([item.nbytes for item in data] + [0], np.uint64)
    assert _native.digest_memory(address, length).tolist() == [*map(_native.xxh3_64, data), _native.xxh3_64(b"")]
    with pytest.raises(ValueError, match="length: the columns differ"):
        _native.digest_memory(address, length[1:])
    with pytest.raises(ValueError, match="address: wrong dtype"):
        _native.digest_memory(address.astype(np.int64), length)
