"""Files of a checkpoint that lies in no directory, but in a bucket: read by ranges through its store, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.config import MIB
from flowstone.errors import DamagedError

_RANGE_BYTES = 8 * MIB
_AT_ONCE = 8  # ranges: 64 MiB of answers on their way, beside the budget

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ranges:
    """Threads that ask a store for ranges. They are started by the first use, and end once nothing refers to this."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "flowstone-convert-range")

    def each(self, act: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The results, in the order of the items; the first error in that order is raised."""
        return self._threads.map(act, items)


class StoredFile:
    """One file of a checkpoint: see `Decoded`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name, self._ranges = checkpoint, name, Ranges()

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes from `begin` on. Raises DamagedError where the file ends before, StorageError."""
        def ask(at: int) -> None:
            target = into[at : at + _RANGE_BYTES]
            found = self._checkpoint.stored_bytes(self._name, begin + at, len(target))
            if len(found) != len(target):
                raise DamagedError(
                    f"{self._checkpoint.path}/{self._name} is too short",
                    range=f"bytes {begin + at}..{begin + at + len(target)}", next="restore the file from a copy",
                )
            target[:] = np.frombuffer(found, np.uint8)

        for _ in self._ranges.each(ask, range(0, len(into), _RANGE_BYTES)):
            pass
