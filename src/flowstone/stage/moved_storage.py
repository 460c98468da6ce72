"""Checks whether storages still have the memory that was captured lazily."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flowstone.state.imported import class_if_imported
from flowstone.table.pieces import Places


def storage_moved(places: Places, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of the pieces at `positions` have a storage that now has other memory, or none, because it was moved to
    shared memory, resized or freed.

    A storage may move or free its memory at any time. Freed memory may still be mapped, and have its old content,
    except for the few bytes in which an allocator keeps its lists. The check takes about 0.2 microseconds per piece.
    """
    storage = class_if_imported("torch", "UntypedStorage")
    if storage is None:
        return positions[:0]
    storages = [places.owners[position] for position in positions.tolist()]
    owned = np.fromiter((isinstance(owner, storage) for owner in storages), np.bool_, len(storages))
    if not owned.all():  # the memory of an array does not move while it is referenced
        return storage_moved(places, positions[owned])
    begin = _column(map(storage.data_ptr, storages), len(storages))
    end = begin + _column(map(storage.nbytes, storages), len(storages))
    address = places.address[positions]
    away = positions[(address < begin) | (address >= end)]
    return np.array([position for position in away.tolist() if _has_address_of_owner(places, position)], np.int64)


def _has_address_of_owner(places: Places, position: int) -> bool:
    """Whether the piece is on the same device as the storage that owns it, so that their addresses can be compared."""
    owner, device = places.owners[position], places.device_of(position)
    return device == "cpu" or str(getattr(owner, "device", "")) == device


def _column(numbers: Iterable[int], count: int) -> NDArray[np.uint64]:
    return np.fromiter(numbers, np.uint64, count)
