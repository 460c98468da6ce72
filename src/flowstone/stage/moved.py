"""Moved: whether memory that was captured lazily is still in its place."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone.table.pieces import Places


def moved(places: Places, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of `positions` whose storage now has other memory, or none: shared, resized or freed in place.

    A storage may move or free its memory at any time. Freed memory may still be mapped, and have its old content,
    except for the few bytes in which an allocator keeps its lists. About 0.2 microseconds per piece.
    """
    storages = [places.owners[at] for at in positions.tolist()]
    owned = np.fromiter((isinstance(one, torch.UntypedStorage) for one in storages), np.bool_, len(storages))
    if not owned.all():  # an array does not move while it is referenced
        return moved(places, positions[owned])
    begin = _column(map(torch.UntypedStorage.data_ptr, storages), len(storages))
    end = begin + _column(map(torch.UntypedStorage.nbytes, storages), len(storages))
    address = places.address[positions]
    away = positions[(address < begin) | (address >= end)]
    return np.array([at for at in away.tolist() if _has_address_of_owner(places, at)], np.int64)


def _has_address_of_owner(places: Places, position: int) -> bool:
    """Whether the piece is on the same device as the storage that owns it; else their addresses are unrelated."""
    owner, device = places.owners[position], places.device_of(position)
    return device == "cpu" or (isinstance(owner, torch.UntypedStorage) and str(owner.device) == device)


def _column(numbers: Iterable[int], count: int) -> NDArray[np.uint64]:
    return np.fromiter(numbers, np.uint64, count)
