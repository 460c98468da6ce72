"""Files of a checkpoint in a bucket. They are read through the checkpoint's store, in many ranges at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowstone.config import MIB
from flowstone.errors import DamagedError
from flowstone.reading.checkpoint import Checkpoint

_RANGE_BYTES = 8 * MIB
_AT_ONCE = 8  # how many ranges are read at once: 64 MiB of data, in addition to the memory budget

Item = TypeVar("Item")
Result = TypeVar("Result")


class RangeThreads:
    """Threads that read ranges from a store. They start when they are first used, and end with this object."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "flowstone-convert-range")

    def map(self, act: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The results of `act` for all items, in their order. If calls fail, the first error in that order is raised.
        """
        return self._threads.map(act, items)


class StoredFile:
    """One file of a checkpoint: see `DecodedBytes`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name, self._ranges = checkpoint, name, RangeThreads()

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes from offset `begin` on. Raises DamagedError if the file is too short;
        StorageError.
        """
        def ask(low: int) -> None:
            target = into[low : low + _RANGE_BYTES]
            content = self._checkpoint.stored_bytes(self._name, begin + low, len(target))
            if len(content) != len(target):
                raise DamagedError(
                    f"{self._checkpoint.path}/{self._name} is too short",
                    range=f"bytes {begin + low}..{begin + low + len(target)}", next="restore the file from a copy",
                )
            target[:] = np.frombuffer(content, np.uint8)

        for _ in self._ranges.map(ask, range(0, len(into), _RANGE_BYTES)):
            pass
