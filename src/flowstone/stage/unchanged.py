"""Whether tensors are as they were: addresses, version counters, and samples of those in host memory.

Asked three times around each step, of all parameters and all of the optimizer's state: so one pass over them, and one
batch of samples, serve all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.stage.samples import take_samples
from flowstone.state.stepped import address_of, local
from flowstone.state.tensors import DENSE_TYPES, versions_of
from flowstone.table.pieces import Places


class Seen(msgspec.Struct, frozen=True, eq=False):
    """Tensors as they were: where, how often changed in place, and samples of those in one run of host memory.

    sizes    in bytes; 0 for those that are not strided
    sampled  positions of those that are sampled, ascending, and their `lengths` in bytes
    """

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    versions: NDArray[np.int64]
    sampled: NDArray[np.int64]
    lengths: NDArray[np.uint64]
    seed: int
    samples: NDArray[np.uint16]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], seed: int, before: Seen | None = None) -> Seen:
        """`before`: as they were at an earlier time; what is in the same memory is sampled as it was then."""
        own = _held(tensors)
        addresses, sizes = _addresses(own), np.fromiter(map(_size_bytes, own), np.int64, len(own))
        if before is not None and _equal(addresses, before.addresses) and _equal(sizes, before.sizes):
            sampled, lengths = before.sampled, before.lengths
        else:
            is_sampled = np.fromiter(map(_is_sampled, own), np.bool_, len(own)) & (addresses != 0)
            sampled = is_sampled.nonzero()[0]
            lengths = sizes[sampled].astype(np.uint64)
        samples = _sample(addresses, sampled, lengths, seed)
        return cls(addresses, sizes, versions_of(own), sampled, lengths, seed, samples)

    def first_changed(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """The position of one that is elsewhere now, or has changed. `tensors`: the same, or the first of them."""
        own, count = _held(tensors), len(tensors)
        addresses = _addresses(own)
        moved = ((addresses != self.addresses[:count]) | (versions_of(own) != self.versions[:count])).nonzero()[0]
        if len(moved):
            return int(moved[0])
        among = int(np.searchsorted(self.sampled, count))
        sampled, lengths = self.sampled[:among], self.lengths[:among]
        differs = (_sample(addresses, sampled, lengths, self.seed) != self.samples[:among]).nonzero()[0]
        return int(sampled[differs[0]]) if len(differs) else None


def _held(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What this rank holds of each; see `local`, which is called only where a tensor is of a class of its own."""
    return tensors if DENSE_TYPES.issuperset(map(type, tensors)) else list(map(local, tensors))


def _addresses(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """As `address_of`, by one call of torch for each where none raises."""
    try:
        return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    except RuntimeError:
        return np.fromiter(map(address_of, tensors), np.uint64, len(tensors))


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0  # others have no number of bytes


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return len(one) == len(other) and bool((one == other).all())


def _is_sampled(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel() > 0


def _sample(
    addresses: NDArray[np.uint64], sampled: NDArray[np.int64], lengths: NDArray[np.uint64], seed: int
) -> NDArray[np.uint16]:
    """Of memory that is gone: `seed`, which its samples are only by chance. Others' are what they are."""
    if not len(sampled):
        return np.zeros(0, np.uint16)
    try:
        return take_samples(Places(addresses, {}, ()), sampled, lengths, seed=seed).digests()
    except OSError:
        if len(sampled) == 1:
            return np.full(1, seed, np.uint16)
        each = [_sample(addresses, sampled[at : at + 1], lengths[at : at + 1], seed) for at in range(len(sampled))]
        return np.concatenate(each)
