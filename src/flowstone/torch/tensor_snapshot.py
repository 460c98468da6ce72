"""Detects changed tensors by their addresses, version counters, and samples of host memory.

A snapshot is used three times around each optimizer step, for all parameters and optimizer state. To be fast, it makes
one pass over the tensors, and takes all samples in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.stage.samples import take_samples
from flowstone.table.pieces import Places
from flowstone.torch.stepped_tensors import address_of, local_tensor
from flowstone.torch.tensors import DENSE_TYPES, versions_of


class TensorSnapshot(msgspec.Struct, frozen=True, eq=False):
    """Tensors at one moment: their addresses, version counters, and samples of contiguous host memory.

    sizes    length of each tensor in bytes; 0 for tensors that are not strided
    sampled  positions of the sampled tensors, ascending
    lengths  lengths of the sampled tensors, in bytes
    """

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    versions: NDArray[np.int64]
    sampled: NDArray[np.int64]
    lengths: NDArray[np.uint64]
    seed: int
    samples: NDArray[np.uint16]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], seed: int, before: TensorSnapshot | None = None) -> TensorSnapshot:
        """Take a snapshot. `before`: an earlier one; tensors in the same memory are sampled at the same places."""
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
        """The position of the first tensor that has moved or changed since the snapshot; None if none has. `tensors`:
        the tensors of the snapshot in the same order, or only the first n of them.
        """
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
    """The local part of each tensor; `local_tensor` is called only if some tensor is of a subclass."""
    return tensors if DENSE_TYPES.issuperset(map(type, tensors)) else list(map(local_tensor, tensors))


def _addresses(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """The address of each tensor, see `address_of`; but with only one call of torch for each tensor, if none raises."""
    try:
        return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    except RuntimeError:
        return np.fromiter(map(address_of, tensors), np.uint64, len(tensors))


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0  # other layouts have no number of bytes


def _equal(first: NDArray[Any], other: NDArray[Any]) -> bool:
    return len(first) == len(other) and bool((first == other).all())


def _is_sampled(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel() > 0


def _sample(
    addresses: NDArray[np.uint64], sampled: NDArray[np.int64], lengths: NDArray[np.uint64], seed: int
) -> NDArray[np.uint16]:
    """Digests of samples of the tensors. If memory was freed, `seed` is returned for each, which equals a digest only
    by chance.
    """
    if not len(sampled):
        return np.zeros(0, np.uint16)
    try:
        return take_samples(Places(addresses, {}, ()), sampled, lengths, seed=seed).wait_digests()
    except OSError:
        if len(sampled) == 1:
            return np.full(1, seed, np.uint16)
        each = [_sample(addresses, sampled[i : i + 1], lengths[i : i + 1], seed) for i in range(len(sampled))]
        return np.concatenate(each)
